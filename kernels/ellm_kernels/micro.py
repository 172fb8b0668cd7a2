"""The micro-kernel: a few rows times a strip of packed columns, accumulators in registers.

One primitive serves the linear layers, the experts and both products of attention; they differ only
in strides. `a` is bf16 with pairs along the reduced dimension, the strip is pair-interleaved
(`[k/2][16 columns][2]` per vector), the result is float32.
"""

from __future__ import annotations

from typing import Any

from ellm_kernels import isa
from ellm_kernels.jit import kernel, outlined
from ellm_kernels.simd import (
    make_pointers_load,
    make_tile_load_rows,
    make_tile_zero,
    prefetch,
    tile_outer,
    tile_outer_rows,
    tile_store,
    tile_store_rows,
)
from ellm_kernels.tiles import PAIR_BYTES

MR = isa.active().mr
NV = isa.active().nv


def _make_micro(mr: int, nv: int) -> Any:
    tile_zero = make_tile_zero(mr, nv)

    @kernel
    def micro(
        a: int, a_stride: int, b: int, vec_stride: int, pair_stride: int, num_pairs: int,
        c: int, c_stride: int, ahead: int, ahead_step: int,
    ) -> None:  # fmt: skip
        outlined()
        tile = tile_zero()
        for k in range(num_pairs):
            tile = tile_outer(tile, a + 4 * k, a_stride, b + k * pair_stride, vec_stride)
            prefetch(ahead + k * ahead_step)
        tile_store(tile, c, c_stride)

    return micro


def _make_micro_rows(nv: int) -> Any:
    """`micro` for any number of rows from 1 to 6 and `nv` vectors of columns."""
    one, two, three, four, five, six = (_make_micro(rows, nv) for rows in range(1, 7))

    @kernel
    def micro_rows(
        rows: int, a: int, a_stride: int, b: int, vec_stride: int, pair_stride: int,
        num_pairs: int, c: int, c_stride: int, ahead: int, ahead_step: int,
    ) -> None:  # fmt: skip
        if rows == 6:
            six(a, a_stride, b, vec_stride, pair_stride, num_pairs, c, c_stride, ahead, ahead_step)
        elif rows == 5:
            five(a, a_stride, b, vec_stride, pair_stride, num_pairs, c, c_stride, ahead, ahead_step)
        elif rows == 4:
            four(a, a_stride, b, vec_stride, pair_stride, num_pairs, c, c_stride, ahead, ahead_step)
        elif rows == 3:
            three(
                a, a_stride, b, vec_stride, pair_stride, num_pairs, c, c_stride, ahead, ahead_step
            )
        elif rows == 2:
            two(a, a_stride, b, vec_stride, pair_stride, num_pairs, c, c_stride, ahead, ahead_step)
        elif rows == 1:
            one(a, a_stride, b, vec_stride, pair_stride, num_pairs, c, c_stride, ahead, ahead_step)

    return micro_rows


_strip = _make_micro_rows(NV)
_single = _make_micro_rows(1)


@kernel
def multiply_block(
    rows: int, num_vecs: int, a: int, a_stride: int, b: int, vec_stride: int, pair_stride: int,
    num_pairs: int, c: int, c_stride: int, ahead: int, ahead_step: int,
) -> None:  # fmt: skip
    """c[rows, 16·num_vecs] = a[rows, 2·num_pairs] · b, for 1 ≤ rows ≤ MR.

    a: bf16, `a_stride` bytes from row to row. b: vector j of pair k at
    `b + j·vec_stride + k·pair_stride`. c: float32, `c_stride` bytes from row to row, overwritten.
    ahead: address of memory wanted soon; `ahead_step` bytes further on with every pair.
    Each result is one chain of fused steps over k = 0, 1, …: it does not depend on `rows`.
    """
    j = 0
    while j + NV <= num_vecs:
        _strip(
            rows, a, a_stride, b + j * vec_stride, vec_stride, pair_stride, num_pairs,
            c + 64 * j, c_stride, ahead, ahead_step,
        )  # fmt: skip
        j += NV
    if NV > 1:
        while j < num_vecs:
            _single(
                rows, a, a_stride, b + j * vec_stride, vec_stride, pair_stride, num_pairs,
                c + 64 * j, c_stride, ahead, ahead_step,
            )  # fmt: skip
            j += 1


def _make_gather(mr: int, nv: int) -> Any:
    tile_zero = make_tile_zero(mr, nv)
    pointers_load = make_pointers_load(mr)

    @kernel
    def gather(
        rows_at: int, b: int, num_pairs: int, c: int, c_stride: int, ahead: int, ahead_step: int
    ) -> None:
        outlined()
        rows = pointers_load(rows_at)
        tile = tile_zero()
        for k in range(num_pairs):
            tile = tile_outer_rows(tile, rows, 4 * k, b + k * PAIR_BYTES, 64)
            prefetch(ahead + k * ahead_step)
        tile_store(tile, c, c_stride)

    return gather


_gather_1, _gather_2, _gather_3, _gather_4, _gather_5, _gather_6 = (
    _make_gather(rows, NV) for rows in range(1, 7)
)


@kernel
def multiply_gathered(
    rows: int, rows_at: int, panel: int, num_pairs: int, c: int, c_stride: int,
    ahead: int, ahead_step: int,
) -> None:  # fmt: skip
    """`multiply_block` over one weight panel for rows anywhere in memory.

    rows_at: int64 address of every row; the same chain of steps per result as `multiply_block`.
    """
    for j in range(0, 4, NV):
        at = panel + 64 * j
        to = c + 64 * j
        if rows == 6:
            _gather_6(rows_at, at, num_pairs, to, c_stride, ahead, ahead_step)
        elif rows == 5:
            _gather_5(rows_at, at, num_pairs, to, c_stride, ahead, ahead_step)
        elif rows == 4:
            _gather_4(rows_at, at, num_pairs, to, c_stride, ahead, ahead_step)
        elif rows == 3:
            _gather_3(rows_at, at, num_pairs, to, c_stride, ahead, ahead_step)
        elif rows == 2:
            _gather_2(rows_at, at, num_pairs, to, c_stride, ahead, ahead_step)
        elif rows == 1:
            _gather_1(rows_at, at, num_pairs, to, c_stride, ahead, ahead_step)


def _make_scatter(mr: int, nv: int) -> Any:
    pointers_load = make_pointers_load(mr)
    tile_load_rows = make_tile_load_rows(mr, nv)

    @kernel
    def scatter(
        a: int, a_stride: int, b: int, num_pairs: int, rows_at: int, offset: int, ahead: int,
        ahead_step: int,
    ) -> None:  # fmt: skip
        outlined()
        rows = pointers_load(rows_at)
        tile = tile_load_rows(rows, offset)
        for k in range(num_pairs):
            tile = tile_outer(tile, a + 4 * k, a_stride, b + k * PAIR_BYTES, 64)
            prefetch(ahead + k * ahead_step)
        tile_store_rows(tile, rows, offset)

    return scatter


_scatter_1, _scatter_2, _scatter_3, _scatter_4, _scatter_5, _scatter_6 = (
    _make_scatter(rows, NV) for rows in range(1, 7)
)


@kernel
def accumulate_scattered(
    rows: int, a: int, a_stride: int, panel: int, num_pairs: int, rows_at: int, ahead: int,
    ahead_step: int,
) -> None:  # fmt: skip
    """c += a · panel, for rows of c anywhere in memory.

    rows_at: int64 address of the 64 float32 of every row of c. The chain of steps goes on from what
    is there, so a sum over several products is one chain.
    """
    for j in range(0, 4, NV):
        at = panel + 64 * j
        offset = 64 * j
        if rows == 6:
            _scatter_6(a, a_stride, at, num_pairs, rows_at, offset, ahead, ahead_step)
        elif rows == 5:
            _scatter_5(a, a_stride, at, num_pairs, rows_at, offset, ahead, ahead_step)
        elif rows == 4:
            _scatter_4(a, a_stride, at, num_pairs, rows_at, offset, ahead, ahead_step)
        elif rows == 3:
            _scatter_3(a, a_stride, at, num_pairs, rows_at, offset, ahead, ahead_step)
        elif rows == 2:
            _scatter_2(a, a_stride, at, num_pairs, rows_at, offset, ahead, ahead_step)
        elif rows == 1:
            _scatter_1(a, a_stride, at, num_pairs, rows_at, offset, ahead, ahead_step)
