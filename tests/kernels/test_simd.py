"""The vector operations, lane by lane against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_kernels.jit import kernel
from ellm_kernels.simd import (
    LANES,
    store_f32,
    vexp2,
    vfma,
    vhmax,
    vkeep,
    vload,
    vload_bf16,
    vmax,
    vstore,
    vstore_bf16,
    vsum,
)
from tests.kernels.support import TOL, address, from_bf16, to_bf16


@kernel
def exp2_all(x: int, num_vecs: int, out: int) -> None:
    """out = 2^x"""
    for i in range(num_vecs):
        vstore(out + 64 * i, vexp2(vload(x + 64 * i)))


@kernel
def round_all(x: int, num_vecs: int, out: int) -> None:
    """float32 to bf16"""
    for i in range(num_vecs):
        vstore_bf16(out + 32 * i, vload(x + 64 * i))


@kernel
def widen_all(x: int, num_vecs: int, out: int) -> None:
    """bf16 to float32"""
    for i in range(num_vecs):
        vstore(out + 64 * i, vload_bf16(x + 32 * i))


@kernel
def fold_one(x: int, out: int) -> None:
    """Sum and maximum of 16 lanes"""
    store_f32(out, vsum(vload(x)))
    store_f32(out + 4, vhmax(vload(x)))


@kernel
def combine(x: int, y: int, n: int, out: int) -> None:
    """max, x·y + y, and the first n lanes of x followed by y"""
    a, b = vload(x), vload(y)
    vstore(out, vmax(a, b))
    vstore(out + 64, vfma(a, b, b))
    vstore(out + 128, vkeep(a, n, b))


def _exp2(values: list[float] | np.ndarray) -> np.ndarray:
    x = np.zeros(-(-len(values) // LANES) * LANES, np.float32)
    x[: len(values)] = values
    out = np.empty_like(x)
    exp2_all(address(x), len(x) // LANES, address(out))
    return out[: len(values)]


def test_exp2_is_accurate_over_its_range() -> None:
    """Relative error stays near float32 rounding from -120 to 127."""
    x = np.linspace(-120, 127, 4096, dtype=np.float32)
    expected = np.exp2(x.astype(np.float64))
    assert np.abs(_exp2(x) / expected - 1).max() < TOL["exp2"]


def test_exp2_of_whole_numbers_is_exact() -> None:
    """2^0 must be 1: folding a piece with itself as maximum must not change it."""
    x = np.arange(-120, 128)
    assert (_exp2(x.astype(np.float32)) == np.ldexp(np.float32(1), x)).all()


def test_exp2_outside_its_range() -> None:
    """Masked scores (-inf) vanish exactly and huge ones stay finite."""
    assert _exp2([-np.inf, -1e30, -120.5, 128.0, 1e30]).tolist() == [0, 0, 0, 2.0**127, 2.0**127]


def test_bf16_rounds_to_nearest_even() -> None:
    """Ties, overflow to infinity, both signs, zeros."""
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFF7FFFFF, 0, 0x80000000],
        np.uint32,
    )
    x = np.concatenate([bits, bits]).view(np.float32)
    out = np.empty(LANES, np.uint16)
    round_all(address(x), 1, address(out))
    expected = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xFF80, 0, 0x8000]
    assert out.tolist() == expected * 2


def test_bf16_keeps_nan_and_infinity() -> None:
    """A NaN whose upper half looks like infinity must not become infinity."""
    x = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7F800000] * 4, np.uint32).view(np.float32)
    out = np.empty(LANES, np.uint16)
    round_all(address(x), 1, address(out))
    assert np.isnan(from_bf16(out)).tolist() == [True, True, True, False] * 4


def test_bf16_agrees_with_numpy_on_random_values() -> None:
    """Rounding and widening, many magnitudes."""
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(1024) * 10.0 ** rng.uniform(-30, 30, 1024)).astype(np.float32)
    out, wide = np.empty(1024, np.uint16), np.empty(1024, np.float32)
    round_all(address(x), 64, address(out))
    widen_all(address(out), 64, address(wide))
    assert (out == to_bf16(x)).all()
    assert (wide == from_bf16(out)).all()


def test_sum_folds_halves_in_a_fixed_order() -> None:
    """Every variant adds lanes in the same tree, so sums are equal bit for bit."""
    x = (np.random.default_rng(2).standard_normal(LANES) * 1e3).astype(np.float32)
    tree = x
    while len(tree) > 1:
        tree = tree[: len(tree) // 2] + tree[len(tree) // 2 :]
    out = np.empty(2, np.float32)
    fold_one(address(x), address(out))
    assert out.tolist() == [tree[0], x.max()]


@pytest.mark.parametrize("n", [-3, 0, 1, 7, 15, 16, 40])
def test_keep_takes_the_first_lanes(n: int) -> None:
    """Counts outside 0..16 mean none or all."""
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((2, LANES)).astype(np.float32)
    x, y = x.copy(), y.copy()
    out = np.empty((3, LANES), np.float32)
    combine(address(x), address(y), n, address(out))
    kept = min(max(n, 0), LANES)
    assert out[2].tolist() == [*x[:kept], *y[kept:]]
    assert (out[0] == np.maximum(x, y)).all()
    exact = x.astype(np.float64) * y + y
    assert np.abs(out[1] - exact).max() <= TOL["f32"]


def test_max_ignores_nan() -> None:
    """A NaN on either side loses, so garbage beside a mask cannot win."""
    x = np.full(LANES, np.nan, np.float32)
    y = np.arange(LANES, dtype=np.float32)
    out = np.empty((3, LANES), np.float32)
    for first, second in ((x, y), (y, x)):
        combine(address(first), address(second), 0, address(out))
        assert (out[0] == y).all()
