"""RMSNorm rows against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_kernels.norm import rms_norm_rows
from tests.kernels.support import TOL, address, assert_close, from_bf16
from tests.naive import ops as naive

EPS = 1e-6


def _norm(
    x: np.ndarray, delta: np.ndarray | None, weight: np.ndarray, begin: int, end: int,
    fresh: bool = False,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The residual afterwards and the bf16 output (0xFFFF where nothing was written).

    delta: one delta [row][dim], several [share][row][dim], or none.
    """
    residual = x.copy()
    out = np.full(x.shape, 0xFFFF, np.uint16)
    shares = np.zeros((0, *x.shape)) if delta is None else delta.reshape(-1, *x.shape)
    # A gap of NaN between two shares: the stride counts, not the size.
    apart = np.full((len(shares) + 1, x.size + 5), np.nan, np.float32)
    apart[:-1, : x.size] = shares.reshape(len(shares), x.size)
    rms_norm_rows(
        address(residual), address(apart), apart.strides[0], len(shares), int(fresh),
        address(weight), np.float32(EPS), x.shape[1], begin, end, address(out),
    )  # fmt: skip
    return residual, out


def _case(rows: int, dim: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(dim)
    x, delta = (rng.standard_normal((2, rows, dim)) * scale).astype(np.float32)
    return x.copy(), delta.copy(), rng.uniform(-2, 2, dim).astype(np.float32)


@pytest.mark.parametrize("dim", [16, 17, 31, 64, 80, 100, 2048, 2051])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e8])
def test_rms_norm_matches_naive(dim: int, scale: float) -> None:
    """Tails of every kind, and magnitudes where eps matters or squares are huge."""
    x, delta, weight = _case(3, dim, scale)
    residual, out = _norm(x, delta, weight, 0, 3)
    assert (residual == x + delta).all()
    assert_close(from_bf16(out), naive.rms_norm_rows(x + delta, weight, EPS), TOL["bf16"])
    residual, out = _norm(x, None, weight, 0, 3)
    assert (residual == x).all()
    assert_close(from_bf16(out), naive.rms_norm_rows(x, weight, EPS), TOL["bf16"])


def test_zero_row_gives_zeros() -> None:
    """eps keeps a row of zeros from becoming NaN."""
    x = np.zeros((1, 40), np.float32)
    assert (_norm(x, None, np.ones(40, np.float32), 0, 1)[1] == 0).all()


def test_only_the_range_is_touched_and_rows_are_independent() -> None:
    """One row alone gives the bits it gives in company; an empty range does nothing."""
    x, delta, weight = _case(4, 83)
    residual, out = _norm(x, delta, weight, 0, 4)
    alone_residual, alone = _norm(x, delta, weight, 2, 3)
    assert (alone[2] == out[2]).all() and (alone_residual[2] == residual[2]).all()
    assert (alone[[0, 1, 3]] == 0xFFFF).all() and (alone_residual[[0, 1, 3]] == x[[0, 1, 3]]).all()
    untouched, nothing = _norm(x, delta, weight, 2, 2)
    assert (untouched == x).all() and (nothing == 0xFFFF).all()


@pytest.mark.parametrize("dim", [16, 31, 64, 83])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("fresh", [False, True])
def test_shares_are_added_in_the_order_of_the_sockets(dim: int, count: int, fresh: bool) -> None:
    """Every socket must get the same bits, so the sum is one chain and not a matter of taste."""
    rng = np.random.default_rng([dim, count])
    x, _, weight = _case(3, dim)
    # Magnitudes that make float32 sums depend on their order.
    scale = 10.0 ** rng.uniform(-4, 4, (count, 1, dim))
    shares = (rng.standard_normal((count, 3, dim)) * scale).astype(np.float32)
    forth, back = (_chain(x, order, fresh) for order in (shares, shares[::-1]))
    # Two shares alone may be swapped.
    assert (forth != back).any() or (fresh and count == 2)
    residual, out = _norm(x, shares, weight, 0, 3, fresh)
    assert (residual == forth).all()
    assert_close(from_bf16(out), naive.rms_norm_rows(forth, weight, EPS), TOL["bf16"])


def _chain(x: np.ndarray, shares: np.ndarray, fresh: bool) -> np.ndarray:
    """((x + share 0) + share 1) + …, in float32, row by row."""
    total: np.ndarray = shares[0].copy() if fresh else x + shares[0]
    for share in shares[1:]:
        total += share
    return total


@pytest.mark.parametrize("dim", [16, 31, 80])
def test_a_fresh_residual_forgets_what_was_there(dim: int) -> None:
    """The first norm of a step meets whatever the last step left, NaN included."""
    x, delta, weight = _case(3, dim)
    residual, out = _norm(np.full_like(x, np.nan), delta, weight, 0, 2, fresh=True)
    assert (residual[:2] == delta[:2]).all() and np.isnan(residual[2]).all()
    expected = naive.rms_norm_rows(delta[:2], weight, EPS)
    assert_close(from_bf16(out[:2]), expected, TOL["bf16"])
    assert (out[2] == 0xFFFF).all()
