"""Products over one packed panel: against numpy, and bit-equal whatever the company of a row."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_kernels.gemm import STREAM_ROWS, multiply_panel
from tests.kernels.support import TOL, address, to_bf16
from tests.naive import gemm as naive

ROWS = [0, 1, 2, 5, 6, 7, 8, 13, STREAM_ROWS, STREAM_ROWS + 1, 200]
UNTOUCHED = np.float32(-7)


def operands(rows: int, num_pairs: int, scale: float = 1.0) -> tuple[naive.Bits, naive.Bits]:
    rng = np.random.default_rng([rows, num_pairs])
    x = rng.standard_normal((rows, 2 * num_pairs), np.float32) * np.float32(scale)
    return to_bf16(x), to_bf16(rng.standard_normal((64, 2 * num_pairs), np.float32))


def multiply(x: naive.Bits, weight: naive.Bits, next_panel: bool = True) -> naive.F32:
    """Rows of x lie apart, rows of the result too; checks that only the 64 columns are written."""
    rows, inputs = x.shape
    apart = np.full((rows + 1, inputs + 6), 0x7FC0, np.uint16)
    apart[:rows, :inputs] = x
    panel = naive.pack_panels(weight)
    out = np.full((rows + 1, 80), UNTOUCHED, np.float32)
    multiply_panel(
        rows, address(apart), apart.shape[1] * 2, address(panel), inputs // 2, address(out),
        out.shape[1] * 4, address(panel) + panel.nbytes if next_panel else 0,
    )  # fmt: skip
    assert (out[rows:] == UNTOUCHED).all() and (out[:, 64:] == UNTOUCHED).all()
    return out[:rows, :64].copy()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("num_pairs", [1, 7, 33, 64])
def test_multiply_panel_matches_naive(rows: int, num_pairs: int) -> None:
    """Every way rows are cut into blocks, with odd numbers of input pairs among them."""
    x, weight = operands(rows, num_pairs)
    error = np.abs(multiply(x, weight) - naive.multiply_panel(x, weight))
    assert (error <= TOL["f32"] * naive.multiply_bound(x, weight)).all()


@pytest.mark.parametrize("rows", ROWS[2:])
def test_a_row_does_not_depend_on_the_others(rows: int) -> None:
    """Bit-equal alone and in any number of rows, in whatever block it falls."""
    x, weight = operands(rows, 33, scale=1e3)
    together = multiply(x, weight)
    for row in range(rows):
        assert np.array_equal(multiply(x[row : row + 1], weight)[0], together[row]), row
    assert np.array_equal(multiply(x[1:], weight), together[1:])


@pytest.mark.parametrize("rows", [3, STREAM_ROWS + 1])
def test_prefetch_changes_nothing(rows: int) -> None:
    """The last panel has no next one to fetch."""
    x, weight = operands(rows, 9)
    assert np.array_equal(multiply(x, weight), multiply(x, weight, next_panel=False))
