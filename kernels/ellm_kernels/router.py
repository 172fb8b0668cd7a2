"""Router: which experts a token goes to, and with what weights.

softmax over all experts in float32, then the k most probable, then (if the model says so) divided
by their sum. A row's experts come out in ascending order, so that whoever adds up their outputs
adds in one order everywhere. The choice is made on the logits, where the softmax cannot have
rounded two of them together; equal logits go to the lower expert.
"""

from __future__ import annotations

import numpy as np

from ellm_kernels.jit import kernel
from ellm_kernels.simd import (
    LANES,
    load_f32,
    load_i32,
    store_f32,
    store_i32,
    vadd,
    vexp2,
    vhmax,
    vload,
    vmax,
    vmul,
    vsplat,
    vsub,
    vsum,
)

_LOG2E = np.float32(1.4426950408889634)


@kernel
def _exp(x: float) -> float:
    return vhmax(vexp2(vsplat(x * _LOG2E)))


@kernel
def _largest(logits: int, num_experts: int) -> float:
    best = vsplat(load_f32(logits))
    whole = num_experts // LANES
    for i in range(whole):
        best = vmax(best, vload(logits + 64 * i))
    for expert in range(whole * LANES, num_experts):
        best = vmax(best, vsplat(load_f32(logits + 4 * expert)))
    return vhmax(best)


@kernel
def _softmax_total(logits: int, num_experts: int, largest: float) -> float:
    """Sum of e^(x - largest)."""
    m, log2e = vsplat(largest), vsplat(_LOG2E)
    lanes = vsplat(np.float32(0))
    whole = num_experts // LANES
    for i in range(whole):
        lanes = vadd(lanes, vexp2(vmul(vsub(vload(logits + 64 * i), m), log2e)))
    total = vsum(lanes)
    for expert in range(whole * LANES, num_experts):
        total += _exp(load_f32(logits + 4 * expert) - largest)
    return total


@kernel
def _choose(logits: int, num_experts: int, k: int, ids: int, best: int) -> None:
    """The k largest logits, descending, lower expert first among equals.

    Any k experts if some are NaN, but always k different ones that exist.
    """
    for expert in range(num_experts):
        x = load_f32(logits + 4 * expert)
        at = min(expert, k)
        if at == k and not x > load_f32(best + 4 * k - 4):
            continue
        at = min(at, k - 1)
        while at > 0 and x > load_f32(best + 4 * at - 4):
            store_f32(best + 4 * at, load_f32(best + 4 * at - 4))
            store_i32(ids + 4 * at, load_i32(ids + 4 * at - 4))
            at -= 1
        store_f32(best + 4 * at, x)
        store_i32(ids + 4 * at, np.int32(expert))


@kernel
def _sort_by_id(k: int, ids: int, values: int) -> None:
    for i in range(1, k):
        expert, value = load_i32(ids + 4 * i), load_f32(values + 4 * i)
        at = i
        while at > 0 and load_i32(ids + 4 * at - 4) > expert:
            store_i32(ids + 4 * at, load_i32(ids + 4 * at - 4))
            store_f32(values + 4 * at, load_f32(values + 4 * at - 4))
            at -= 1
        store_i32(ids + 4 * at, expert)
        store_f32(values + 4 * at, value)


@kernel
def route_row(
    logits: int, num_experts: int, k: int, norm_topk_prob: int, ids: int, weights: int
) -> None:
    """One row; see `route_rows`."""
    largest = _largest(logits, num_experts)
    total = _softmax_total(logits, num_experts, largest)
    _choose(logits, num_experts, k, ids, weights)
    _sort_by_id(k, ids, weights)
    chosen = np.float32(0)
    for i in range(k):
        weight = _exp(load_f32(weights + 4 * i) - largest) / total
        store_f32(weights + 4 * i, weight)
        chosen += weight
    if norm_topk_prob:
        for i in range(k):
            store_f32(weights + 4 * i, load_f32(weights + 4 * i) / chosen)


@kernel
def route_rows(
    logits: int, num_experts: int, k: int, norm_topk_prob: int,
    row_begin: int, row_end: int, ids: int, weights: int,
) -> None:  # fmt: skip
    """Experts and weights of a range of rows.

    logits: float32 [row][num_experts]. ids: int32 [row][k], ascending. weights: float32 [row][k].
    1 <= k <= num_experts.
    """
    for row in range(row_begin, row_end):
        route_row(
            logits + row * num_experts * 4, num_experts, k, norm_topk_prob,
            ids + row * k * 4, weights + row * k * 4,
        )  # fmt: skip
