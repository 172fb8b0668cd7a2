"""Attention of decode rows, split over threads at chunk borders.

An item is (row, kv_head, chunk): the pieces of all query heads that share the kv-head, so its keys
and values are read once. All items of a step, in this order, are cut into one contiguous range per
thread, so a single long row occupies every thread. Whoever finishes the last item of a (row,
kv_head) folds its pieces in the order of the chunks. Results equal those of `attend_prefill`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ellm_kernels.atomics import atomic_add, atomic_store
from ellm_kernels.attention_piece import (
    SCORE_STRIDE,
    finish,
    fold,
    piece_bytes,
    piece_stride,
)
from ellm_kernels.attention_stream import stream_chunk
from ellm_kernels.jit import kernel
from ellm_kernels.kv_layout import CHUNK, Heads, KvLayout, chunk_keys
from ellm_kernels.rope import Rotary, StepRows, kv_write, rope_query, rope_scratch_bytes
from ellm_kernels.simd import load_i32

MAX_GROUP = 16  # query heads that may share a kv-head


class DecodeWork(NamedTuple):
    """Memory shared by the threads of one decode attention.

    pieces: `decode_pieces_bytes`. counters: int64 [row][kv_head], zero before and after.
    """

    pieces: int
    counters: int


def decode_scratch_bytes(head_dim: int) -> int:
    """Scratch of one thread: queries, scores, a head being rotated."""
    return MAX_GROUP * (2 * head_dim + SCORE_STRIDE) + rope_scratch_bytes(head_dim)


def decode_pieces_bytes(num_chunks: int, num_heads: int, head_dim: int) -> int:
    """Memory for the pieces of a step whose rows cover `num_chunks` chunks together."""
    return num_chunks * num_heads * piece_bytes(head_dim)


@kernel
def num_row_chunks(rows: StepRows, row: int) -> int:
    """Chunks a row attends to."""
    position: int = load_i32(rows.positions + 4 * row)
    return position // CHUNK + 1


@kernel
def num_decode_items(rows: StepRows, num_kv_heads: int) -> int:
    """Items of a step."""
    total = 0
    for row in range(rows.num_rows):
        total += num_row_chunks(rows, row)
    return total * num_kv_heads


@kernel
def _thread_query(
    qkv_row: int, position: int, kv_head: int, rotary: Rotary, heads: Heads, scratch: int
) -> None:
    """The queries of one (row, kv_head), at the start of scratch."""
    d = heads.head_dim
    group_size = heads.num_heads // heads.num_kv_heads
    spare = scratch + MAX_GROUP * (2 * d + SCORE_STRIDE)
    for head in range(group_size):
        x = qkv_row + (kv_head * group_size + head) * d * 4
        rope_query(x, position, rotary, d, spare, scratch + head * 2 * d)


@kernel
def _merge(first: int, num_chunks: int, group_size: int, head_dim: int, out: int) -> None:
    """Folds the pieces of one (row, kv_head) into its first chunk's and writes the outputs."""
    stride = piece_stride(head_dim)
    for head in range(group_size):
        state = first + head * stride
        for chunk in range(1, num_chunks):
            fold(state, state + chunk * group_size * stride, head_dim)
        finish(state, head_dim, out + head * head_dim * 2)


@kernel
def _attend_row_head(
    row: int, kv_head: int, chunk_begin: int, chunk_end: int, item: int, next_keys: int,
    qkv_row: int, kv_written: int, slot: int, position: int,
    rotary: Rotary, heads: Heads, kv: KvLayout, layer: int, work: DecodeWork, scratch: int,
    out: int,
) -> None:  # fmt: skip
    """Chunks [chunk_begin, chunk_end) of one (row, kv_head); `item` is the index of its chunk 0."""
    d = heads.head_dim
    group_size = heads.num_heads // heads.num_kv_heads
    scores = scratch + MAX_GROUP * 2 * d
    num_chunks = position // CHUNK + 1
    pieces = work.pieces + item * group_size * piece_stride(d)
    _thread_query(qkv_row, position, kv_head, rotary, heads, scratch)
    for chunk in range(chunk_begin, chunk_end):
        if chunk == num_chunks - 1 and not kv_written:
            spare = scores + MAX_GROUP * SCORE_STRIDE
            kv_write(qkv_row, slot, position, 1, kv_head, rotary, heads, kv, layer, spare)
        upcoming = next_keys
        if chunk + 1 < chunk_end:
            upcoming = chunk_keys(kv, slot, chunk + 1, layer, kv_head)
        stream_chunk(
            group_size, scratch, chunk_keys(kv, slot, chunk, layer, kv_head),
            min(CHUNK, position - chunk * CHUNK + 1), d, scores,
            pieces + chunk * group_size * piece_stride(d), upcoming,
        )  # fmt: skip
    counter = work.counters + (row * heads.num_kv_heads + kv_head) * 8
    done = chunk_end - chunk_begin
    if atomic_add(counter, done) + done == num_chunks:
        atomic_store(counter, 0)
        target = out + (row * heads.num_heads + kv_head * group_size) * d * 2
        _merge(pieces, num_chunks, group_size, d, target)


@kernel
def decode_attention(
    thread: int, num_threads: int, qkv: int, row_stride: int, rows: StepRows, kv_written: int,
    rotary: Rotary, heads: Heads, kv: KvLayout, layer: int, work: DecodeWork, scratch: int,
    out: int,
) -> None:  # fmt: skip
    """One thread's share of a step: norm, rotary embedding, KV write and attention.

    qkv: float32 rows, `row_stride` bytes apart. out: bf16 [row][head][head_dim], complete once all
    threads have returned. scratch: `decode_scratch_bytes`, one per thread.
    kv_written: 0 only if every row is a slot of its own: then the thread that reads a row's last
    chunk writes the new key and value just before. Rows of one slot read each other's, so they
    need `kv_write_rows` and a barrier first, and 1 here.
    """
    items = num_decode_items(rows, heads.num_kv_heads)
    begin = items * thread // num_threads
    end = items * (thread + 1) // num_threads
    item = 0
    for row in range(rows.num_rows):
        num_chunks = num_row_chunks(rows, row)
        if item + num_chunks * heads.num_kv_heads <= begin:
            item += num_chunks * heads.num_kv_heads
            continue
        slot = np.int64(load_i32(rows.slots + 4 * row))
        position = np.int64(load_i32(rows.positions + 4 * row))
        for kv_head in range(heads.num_kv_heads):
            if item >= end:
                return
            low, high = max(begin - item, 0), min(end - item, num_chunks)
            if low < high:
                next_keys = 0
                if kv_head + 1 < heads.num_kv_heads and item + num_chunks < end:
                    next_keys = chunk_keys(kv, slot, 0, layer, kv_head + 1)
                _attend_row_head(
                    row, kv_head, low, high, item, next_keys, qkv + row * row_stride,
                    kv_written, slot, position, rotary, heads, kv, layer, work, scratch, out,
                )  # fmt: skip
            item += num_chunks
