"""Experts: rows grouped by expert, gate/up with SiLU, and down with the weighted sum.

A *group* says which rows each expert computes. It is an int32 array

    [0] number of active experts, [16 …] their ids, then per active expert the begin of its rows
    (one more entry than experts), then per assignment the row, then per assignment the weight (f32)

with room for `num_experts` experts. A dense MLP is one expert that takes every row with weight 1.
Assignments of an expert are ordered by row, experts by id; sums run in that order, so no result
depends on which thread computed what.
"""

from __future__ import annotations

import numpy as np

from ellm_kernels.jit import kernel
from ellm_kernels.micro import MR, accumulate_scattered, multiply_gathered
from ellm_kernels.simd import (
    load_f32,
    load_i32,
    load_index,
    prefetch,
    store_f32,
    store_i32,
    store_i64,
    vadd,
    vdiv,
    vexp2,
    vload,
    vmul,
    vsplat,
    vstore,
    vstore_bf16,
)
from ellm_kernels.tiles import PAIR_BYTES, PANEL

_HEADER = 16
_LOG2E = np.float32(1.4426950408889634)
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
TILE_BYTES = MR * PANEL * 4
# What experts need per thread: a result tile, or the row addresses of two.
SCRATCH_BYTES = TILE_BYTES + 128


def group_bytes(num_experts: int, num_assignments: int) -> int:
    """Bytes of a group."""
    return 4 * (_HEADER + 2 * num_experts + 1 + 2 * num_assignments)


@kernel
def _begins(group: int, num_experts: int) -> int:
    return group + 4 * (_HEADER + num_experts)


@kernel
def _rows(group: int, num_experts: int) -> int:
    return group + 4 * (_HEADER + 2 * num_experts + 1)


@kernel
def num_active(group: int) -> int:
    """Experts that have at least one row."""
    return load_index(group)


@kernel
def group_all(group: int, rows: int) -> None:
    """The group of a dense MLP: one expert, all rows, weight 1."""
    store_i32(group, min(rows, 1))
    store_i32(group + 4 * _HEADER, 0)
    begins = _begins(group, 1)
    store_i32(begins, 0)
    store_i32(begins + 4, rows)
    at = _rows(group, 1)
    for row in range(rows):
        store_i32(at + 4 * row, row)
        store_f32(at + 4 * (rows + row), _ONE)


@kernel
def group_experts(
    ids: int, weights: int, rows: int, top_k: int, first_expert: int, num_experts: int, group: int,
    counts: int, first: int, last: int,
) -> None:  # fmt: skip
    """Groups the assignments of experts first … last-1; several threads may share the experts.

    ids: int32 [rows, top_k]; weights: float32 [rows, top_k]; counts: scratch int32 [num_experts].
    Expert i of the group is id `first_expert` + i; assignments to ids outside are somebody else's.
    Everybody counts all assignments (cheap), so nobody waits for anybody's counts.
    """
    total = rows * top_k
    for expert in range(num_experts):
        store_i32(counts + 4 * expert, 0)
    for i in range(total):
        expert = load_index(ids + 4 * i) - first_expert
        if 0 <= expert < num_experts:
            at = counts + 4 * expert
            store_i32(at, load_i32(at) + 1)
    begins = _begins(group, num_experts)
    active = 0
    begin = 0
    for expert in range(num_experts):
        count = load_index(counts + 4 * expert)
        # From here on `counts` says where the expert's next assignment goes.
        store_i32(counts + 4 * expert, begin)
        if count > 0:
            if first <= expert < last:
                store_i32(group + 4 * (_HEADER + active), expert)
                store_i32(begins + 4 * active, begin)
            active += 1
            begin += count
    if last == num_experts:
        store_i32(group, active)
        store_i32(begins + 4 * active, begin)
    rows_at = _rows(group, num_experts)
    for i in range(total):
        expert = load_index(ids + 4 * i) - first_expert
        if first <= expert < last:
            to = load_index(counts + 4 * expert)
            store_i32(counts + 4 * expert, to + 1)
            store_i32(rows_at + 4 * to, i // top_k)
            store_f32(rows_at + 4 * (total + to), load_f32(weights + 4 * i))


@kernel
def _silu_mul(tile: int, rows: int, weights: int, out: int, out_stride: int) -> None:
    """out[rows, 32] bf16 = weight · gate / (1 + e^-gate) · up.

    A tile row is 32 gates, then 32 ups; weights: float32, one per row.
    """
    for row in range(rows):
        weight = vsplat(load_f32(weights + 4 * row))
        for j in range(2):
            at = tile + row * PANEL * 4 + 64 * j
            g = vload(at)
            sigmoid = vdiv(g, vadd(vsplat(_ONE), vexp2(vmul(g, vsplat(-_LOG2E)))))
            to = out + row * out_stride + 32 * j
            vstore_bf16(to, vmul(vmul(sigmoid, vload(at + 128)), weight))


@kernel
def experts_up(
    x: int, x_stride: int, w: int, num_pairs: int, panels: int, num_experts: int, group: int,
    total: int, panel_run: int, row_run: int, row_runs: int, begin: int, end: int, hidden: int,
    hidden_stride: int, scratch: int,
) -> None:  # fmt: skip
    """hidden[assignment] = weight · SiLU(gate(x[row])) · up(x[row]) for items begin … end-1.

    The routing weight goes in here, in float32, so that the down projections only have to be added.

    w: per expert `panels` panels of 2·num_pairs inputs, each with 32 columns of gate and the same
    32 of up: one panel at a time in the second-level cache leaves room for the next one.
    An item is one active expert × `panel_run` panels × `row_run` of its rows, numbered with rows
    fastest (`row_runs` runs each, of which those past the expert's last row are empty).
    """
    runs = (panels + panel_run - 1) // panel_run
    panel_bytes = num_pairs * PAIR_BYTES
    begins = _begins(group, num_experts)
    rows_at = _rows(group, num_experts)
    pointers = scratch + TILE_BYTES
    for item in range(begin, end):
        active = item // (runs * row_runs)
        run = item // row_runs % runs
        first = load_index(begins + 4 * active)
        stop = load_index(begins + 4 * active + 4)
        first += item % row_runs * row_run
        stop = min(stop, first + row_run)
        if first >= stop:
            continue
        expert = load_index(group + 4 * (_HEADER + active))
        blocks = (stop - first + MR - 1) // MR
        # While a panel's rows are computed the next panel is fetched.
        step = min(panel_bytes // blocks // num_pairs, 64)
        for panel in range(run * panel_run, min(panels, (run + 1) * panel_run)):
            at = w + (expert * panels + panel) * panel_bytes
            low = first
            for block in range(blocks):
                high = first + (stop - first) * (block + 1) // blocks
                rows = high - low
                for i in range(rows):
                    row = load_index(rows_at + 4 * (low + i))
                    store_i64(pointers + 8 * i, x + row * x_stride)
                ahead = at + panel_bytes + block * (panel_bytes // blocks)
                multiply_gathered(rows, pointers, at, num_pairs, scratch, PANEL * 4, ahead, step)
                weights = rows_at + 4 * (total + low)
                to = hidden + low * hidden_stride + panel * PANEL
                _silu_mul(scratch, rows, weights, to, hidden_stride)
                low = high


@kernel
def _row_addresses(rows_at: int, first: int, stop: int, out: int, out_stride: int, to: int) -> None:
    """Where the rows of assignments first … stop-1 are added to; fetches those 64 float32."""
    for i in range(stop - first):
        row = out + load_index(rows_at + 4 * (first + i)) * out_stride
        store_i64(to + 8 * i, row)
        for line in range(4):
            prefetch(row + 64 * line)


@kernel
def experts_down(
    hidden: int, hidden_stride: int, w: int, num_pairs: int, panels: int, num_experts: int,
    group: int, rows: int, begin: int, end: int, out: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    """out[rows, panels begin … end-1] = Σ over experts in order of down(hidden).

    w: per expert `panels` panels of 2·num_pairs inputs. out: float32, overwritten. One thread owns
    these columns for all rows, so the sum needs no atomics and is one chain in the order of the
    experts, kept in registers while an expert adds to it.
    """
    panel_bytes = num_pairs * PAIR_BYTES
    begins = _begins(group, num_experts)
    rows_at = _rows(group, num_experts)
    for row in range(rows):
        for at in range(begin * 256, end * 256, 64):
            vstore(out + row * out_stride + at, vsplat(_ZERO))
    last_active = num_active(group) - 1
    for active in range(last_active + 1):
        expert = load_index(group + 4 * (_HEADER + active))
        upcoming = load_index(group + 4 * (_HEADER + min(active + 1, last_active)))
        first = load_index(begins + 4 * active)
        count = load_index(begins + 4 * active + 4) - first
        blocks = (count + MR - 1) // MR
        step = min(panel_bytes // blocks // num_pairs, 64)
        for panel in range(begin, end):
            at = w + (expert * panels + panel) * panel_bytes
            # The panel that comes next: the following one, or the next expert's first.
            following = at + panel_bytes
            if panel + 1 == end:
                following = w + (upcoming * panels + begin) * panel_bytes
            columns = out + panel * PANEL * 4
            low = first
            high = first + count // blocks
            here, there = scratch, scratch + 64
            _row_addresses(rows_at, low, high, columns, out_stride, here)
            for block in range(blocks):
                # The next block's rows of out travel while this block is computed.
                beyond = first + count * min(block + 2, blocks) // blocks
                _row_addresses(rows_at, high, beyond, columns, out_stride, there)
                accumulate_scattered(
                    high - low, hidden + low * hidden_stride, hidden_stride, at, num_pairs, here,
                    following + block * (panel_bytes // blocks), step,
                )  # fmt: skip
                low, high = high, beyond
                here, there = there, here
