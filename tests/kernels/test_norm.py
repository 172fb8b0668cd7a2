"""RMSNorm rows against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_kernels.norm import rms_norm_rows
from tests.kernels.support import TOL, address, assert_close, from_bf16
from tests.naive import ops as naive

EPS = 1e-6


def _norm(
    x: np.ndarray, delta: np.ndarray | None, weight: np.ndarray, begin: int, end: int
) -> tuple[np.ndarray, np.ndarray]:
    """The residual afterwards and the bf16 output (0xFFFF where nothing was written)."""
    residual = x.copy()
    out = np.full(x.shape, 0xFFFF, np.uint16)
    added = address(delta) if delta is not None else 0
    rms_norm_rows(
        address(residual), added, address(weight), np.float32(EPS), x.shape[1], begin, end,
        address(out),
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
