"""From the qkv product to attention's operands: per-head RMSNorm, rotary embedding, KV write.

Input is a float32 row [q heads | k heads | v heads], each head_dim wide. Queries leave as bf16 rows
that already carry softmax_scale · log2(e), so scores are exponents of two; keys and values go
straight to their place in the KV tensor. Every head is computed alone: any split of rows and heads
gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ellm_kernels.jit import kernel
from ellm_kernels.kv_layout import (
    CHUNK,
    Heads,
    KvLayout,
    chunk_keys,
    chunk_values,
    key_pair,
    value_dim,
)
from ellm_kernels.norm import inverse_rms, scale_row
from ellm_kernels.simd import (
    LANES,
    load_f32,
    load_i32,
    load_u16,
    store_f32,
    store_i32,
    store_u16,
    vadd,
    vload,
    vmul,
    vsplat,
    vstore,
    vstore_bf16,
    vsub,
)


class Rotary(NamedTuple):
    """What turns a head of the qkv product into an operand.

    q_weight, k_weight: float32 [head_dim], weights of the per-head norms.
    cos, sin: float32 [max_position][head_dim/2].
    eps: float32. q_scale: float32, softmax_scale · log2(e).
    """

    q_weight: int
    k_weight: int
    cos: int
    sin: int
    eps: float
    q_scale: float


class StepRows(NamedTuple):
    """The rows of a step: int32 [num_rows] each. Rows of one span are neighbours, ascending."""

    num_rows: int
    slots: int
    positions: int


def rope_scratch_bytes(head_dim: int) -> int:
    """Scratch of one thread: a head as float32, then as bf16."""
    return head_dim * 4 + head_dim * 2


@kernel
def rotate_half(x: int, cos: int, sin: int, head_dim: int) -> None:
    """Rotates dims i and i + head_dim/2 of a float32 head by angle i, in place."""
    half = head_dim // 2
    i = 0
    while i + LANES <= half:
        low, high = x + 4 * i, x + 4 * (i + half)
        c, s, p, q = vload(cos + 4 * i), vload(sin + 4 * i), vload(low), vload(high)
        vstore(low, vsub(vmul(p, c), vmul(q, s)))
        vstore(high, vadd(vmul(q, c), vmul(p, s)))
        i += LANES
    while i < half:
        low, high = x + 4 * i, x + 4 * (i + half)
        cs, sn, ps, qs = load_f32(cos + 4 * i), load_f32(sin + 4 * i), load_f32(low), load_f32(high)
        store_f32(low, ps * cs - qs * sn)
        store_f32(high, qs * cs + ps * sn)
        i += 1


@kernel
def _norm_rotate(
    x: int, weight: int, position: int, rotary: Rotary, head_dim: int, out: int
) -> None:
    """out = rope(RMSNorm(x)), one float32 head."""
    table = position * (head_dim // 2) * 4
    scale_row(x, weight, inverse_rms(x, rotary.eps, head_dim), head_dim, out)
    rotate_half(out, rotary.cos + table, rotary.sin + table, head_dim)


@kernel
def rope_query(
    x: int, position: int, rotary: Rotary, head_dim: int, scratch: int, out: int
) -> None:
    """One query head: float32 in the qkv row → bf16 operand of the score product."""
    _norm_rotate(x, rotary.q_weight, position, rotary, head_dim, scratch)
    scale = vsplat(rotary.q_scale)
    for i in range(head_dim // LANES):
        vstore_bf16(out + 32 * i, vmul(vload(scratch + 64 * i), scale))


@kernel
def _to_bf16(x: int, head_dim: int, out: int) -> None:
    for i in range(head_dim // LANES):
        vstore_bf16(out + 32 * i, vload(x + 64 * i))


@kernel
def _write_key(
    x: int, position: int, rotary: Rotary, head_dim: int, keys: int, scratch: int
) -> None:
    rounded = scratch + 4 * head_dim
    _norm_rotate(x, rotary.k_weight, position, rotary, head_dim, scratch)
    _to_bf16(scratch, head_dim, rounded)
    target = key_pair(keys, head_dim, position % CHUNK)
    for pair in range(head_dim // 2):
        store_i32(target + 64 * pair, load_i32(rounded + 4 * pair))


@kernel
def _write_value(
    x: int, position: int, last: int, head_dim: int, values: int, scratch: int
) -> None:
    _to_bf16(x, head_dim, scratch)
    target = value_dim(values, head_dim, position % CHUNK)
    if last and position % 2 == 0:
        # Attention reads positions in pairs, the partner times probability 0: it must be finite.
        for dim in range(head_dim):
            store_i32(target + 4 * dim, np.int32(load_u16(scratch + 2 * dim)))
    else:
        for dim in range(head_dim):
            store_u16(target + 4 * dim, load_u16(scratch + 2 * dim))


@kernel
def kv_write(
    qkv_row: int, slot: int, position: int, last: int, kv_head: int,
    rotary: Rotary, heads: Heads, kv: KvLayout, layer: int, scratch: int,
) -> None:  # fmt: skip
    """Writes the key and the value of one (row, kv_head).

    last: 1 if no later position of the slot is written in this step; then an even position also
    zeroes its right neighbour's value. Otherwise the neighbour belongs to whoever writes it.
    """
    d = heads.head_dim
    keys = chunk_keys(kv, slot, position // CHUNK, layer, kv_head)
    key_row = qkv_row + (heads.num_heads + kv_head) * d * 4
    _write_key(key_row, position, rotary, d, keys, scratch)
    value_row = key_row + heads.num_kv_heads * d * 4
    _write_value(value_row, position, last, d, chunk_values(keys, d), scratch)


@kernel
def ends_span(rows: StepRows, row: int) -> int:
    """1 if the next row is not the next position of the same slot."""
    if row + 1 >= rows.num_rows:
        return 1
    same = load_i32(rows.slots + 4 * row) == load_i32(rows.slots + 4 * row + 4)
    here = load_i32(rows.positions + 4 * row)
    return 0 if same and load_i32(rows.positions + 4 * row + 4) == here + 1 else 1


@kernel
def q_rows(
    qkv: int, row_stride: int, rows: StepRows, row_begin: int, row_end: int,
    head_begin: int, head_end: int, rotary: Rotary, heads: Heads, scratch: int, out: int,
) -> None:  # fmt: skip
    """Queries of a range of rows and query heads.

    qkv: float32 rows, `row_stride` bytes apart. scratch: `rope_scratch_bytes`, one per thread.
    out: bf16 [row][head][head_dim].
    """
    d = heads.head_dim
    for row in range(row_begin, row_end):
        position = np.int64(load_i32(rows.positions + 4 * row))
        for head in range(head_begin, head_end):
            x = qkv + row * row_stride + head * d * 4
            target = out + (row * heads.num_heads + head) * d * 2
            rope_query(x, position, rotary, d, scratch, target)


@kernel
def kv_write_rows(
    qkv: int, row_stride: int, rows: StepRows, row_begin: int, row_end: int,
    head_begin: int, head_end: int, rotary: Rotary, heads: Heads,
    kv: KvLayout, layer: int, scratch: int,
) -> None:  # fmt: skip
    """Keys and values of a range of rows and kv-heads, written to the KV tensor."""
    for row in range(row_begin, row_end):
        slot = np.int64(load_i32(rows.slots + 4 * row))
        position = np.int64(load_i32(rows.positions + 4 * row))
        last = ends_span(rows, row)
        for kv_head in range(head_begin, head_end):
            kv_write(
                qkv + row * row_stride, slot, position, last, kv_head,
                rotary, heads, kv, layer, scratch,
            )  # fmt: skip
