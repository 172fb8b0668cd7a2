"""The register-tile product against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_kernels.micro import MR, multiply_block
from tests.kernels.support import TOL, address, from_bf16, to_bf16
from tests.naive import ops as naive

MAX_VECS = 9


def _operands(num_pairs: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(num_pairs)
    a = to_bf16(rng.standard_normal((MR, 2 * num_pairs), dtype=np.float32) * scale)
    b = to_bf16(rng.standard_normal((2 * num_pairs, 16 * MAX_VECS), dtype=np.float32))
    return a, b


def _multiply(a: np.ndarray, b: np.ndarray, num_vecs: int, c: np.ndarray) -> None:
    """c[:, :16·num_vecs] = a · b[:, …] with b packed as [pair][vector][16][2]."""
    num_pairs = a.shape[1] // 2
    packed = np.ascontiguousarray(
        b.reshape(num_pairs, 2, MAX_VECS, 16).transpose(0, 2, 3, 1), np.uint16
    )
    multiply_block(
        len(a), num_vecs, address(a), a.shape[1] * 2, address(packed), 64, MAX_VECS * 64,
        num_pairs, address(c), c.shape[1] * 4, address(a), 0,
    )  # fmt: skip


@pytest.mark.parametrize("rows", range(1, MR + 1))
@pytest.mark.parametrize("num_vecs", [1, 3, 4, 9])
@pytest.mark.parametrize("num_pairs", [1, 7, 64])
def test_multiply_block_matches_naive(rows: int, num_vecs: int, num_pairs: int) -> None:
    """Every row count, whole and partial strips; nothing outside the block is written."""
    a, b = _operands(num_pairs)
    c = np.full((MR + 1, 16 * MAX_VECS), -7, np.float32)
    _multiply(a[:rows].copy(), b, num_vecs, c)
    width = 16 * num_vecs
    expected = naive.multiply_block(from_bf16(a[:rows]), from_bf16(b))[:, :width]
    bound = np.abs(from_bf16(a[:rows])) @ np.abs(from_bf16(b))[:, :width]
    assert (np.abs(c[:rows, :width] - expected) <= TOL["f32"] * bound).all()
    assert (c[rows:] == -7).all() and (c[:, width:] == -7).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    """Bit-equal alone, in any company, and whatever strip width its columns fall into."""
    a, b = _operands(33, scale=1e4)
    together = np.zeros((MR, 16 * MAX_VECS), np.float32)
    _multiply(a, b, MAX_VECS, together)
    for row in range(MR):
        alone = np.zeros((1, 16 * MAX_VECS), np.float32)
        _multiply(a[row : row + 1].copy(), b, MAX_VECS, alone)
        assert (alone[0] == together[row]).all()
        _multiply(a[row : row + 1].copy(), b, 1, alone)
        assert (alone[0] == together[row]).all()


def test_no_pairs_give_zero() -> None:
    """An empty sum overwrites what was there."""
    a, b = _operands(1)
    c = np.full((1, 16 * MAX_VECS), np.nan, np.float32)
    multiply_block(1, 5, address(a), 4, address(b), 64, 64, 0, address(c), 4, address(a), 0)
    assert (c[0, :80] == 0).all()
