"""Causal attention of a prefill block: tiles of query rows against chunks of keys and values.

The query heads that share a kv-head are rows of one tile, so a chunk is read once for all of them:
row f of a span is token f // group_size, query head f % group_size. A unit of work is one
(kv_head, tile); units are independent, the caller hands them out. Pieces are those of
`attention_piece`, hence equal to decode's.
"""

from __future__ import annotations

from ellm_kernels.attention_piece import (
    OUT_OFFSET,
    SCORE_STRIDE,
    finish,
    fold,
    piece_bytes,
    piece_stride,
    probabilities,
    visible,
)
from ellm_kernels.jit import kernel
from ellm_kernels.kv_layout import CHUNK, GROUP, Heads, KvLayout, chunk_keys, chunk_values
from ellm_kernels.micro import MR, NV, multiply_block
from ellm_kernels.simd import LANES, load_i32, store_i32

# A chunk of keys and values (256 KiB at head_dim 128) and a tile share the second-level cache. 48
# to 192 rows run equally fast on one core; more rows ask less of memory when all cores run.
TILE_ROWS = 96


def attention_scratch_bytes(head_dim: int) -> int:
    """Scratch of one thread for `attend_prefill`: queries, scores, pieces, running states."""
    return TILE_ROWS * (2 * head_dim + SCORE_STRIDE + 2 * piece_bytes(head_dim))


@kernel
def num_tiles(num_tokens: int, group_size: int) -> int:
    """Tiles of one kv-head."""
    return (num_tokens * group_size + TILE_ROWS - 1) // TILE_ROWS


@kernel
def num_prefill_units(num_tokens: int, heads: Heads) -> int:
    """Units of work of a span."""
    return num_tiles(num_tokens, heads.num_heads // heads.num_kv_heads) * heads.num_kv_heads


@kernel
def copy_words(source: int, num_words: int, target: int) -> None:
    """Copies 32-bit words."""
    for i in range(num_words):
        store_i32(target + 4 * i, load_i32(source + 4 * i))


@kernel
def _scores(num_rows: int, q: int, keys: int, num_groups: int, head_dim: int, scores: int) -> None:
    """Scores of `num_groups` × 16 keys; a strip of keys stays in the first-level cache."""
    q_stride = 2 * head_dim
    group_bytes = GROUP * head_dim * 2
    group = 0
    while group < num_groups:
        width = min(NV, num_groups - group)
        row = 0
        while row < num_rows:
            multiply_block(
                min(MR, num_rows - row), width, q + row * q_stride, q_stride,
                keys + group * group_bytes, group_bytes, 64, head_dim // 2,
                scores + row * SCORE_STRIDE + group * 64, SCORE_STRIDE, q, 0,
            )  # fmt: skip
            row += MR
        group += width


@kernel
def _attend_chunk(
    num_rows: int, q: int, keys: int, first: int, group_size: int, head_dim: int,
    scores: int, pieces: int,
) -> None:  # fmt: skip
    """The pieces of `num_rows` queries and one chunk.

    q: bf16 [num_rows][head_dim]. Row r sees `visible(first, r, group_size)` positions.
    """
    values = chunk_values(keys, head_dim)
    limit = visible(first, num_rows - 1, group_size)
    num_groups = (limit + GROUP - 1) // GROUP
    _scores(num_rows, q, keys, num_groups, head_dim, scores)
    stride = piece_stride(head_dim)
    for row in range(num_rows):
        sees = visible(first, row, group_size)
        at = scores + row * SCORE_STRIDE
        probabilities(at, sees, num_groups, pieces + row * stride, at, 0)
    row = 0
    while row < num_rows:
        multiply_block(
            min(MR, num_rows - row), head_dim // LANES, scores + row * SCORE_STRIDE, SCORE_STRIDE,
            values, 64, head_dim * 4, (limit + 1) // 2,
            pieces + row * stride + OUT_OFFSET, stride, q, 0,
        )  # fmt: skip
        row += MR


@kernel
def _row_offset(row: int, kv_head: int, heads: Heads) -> int:
    """Byte offset in q and out of flat row `row` of a kv-head."""
    group_size = heads.num_heads // heads.num_kv_heads
    head = kv_head * group_size + row % group_size
    return (row // group_size * heads.num_heads + head) * heads.head_dim * 2


@kernel
def _attend_tile(
    q: int, heads: Heads, kv: KvLayout, layer: int, slot: int, start: int, kv_head: int,
    begin: int, end: int, scratch: int, out: int,
) -> None:  # fmt: skip
    """Flat rows [begin, end) of one kv-head."""
    d = heads.head_dim
    group_size = heads.num_heads // heads.num_kv_heads
    stride = piece_stride(d)
    scores = scratch + TILE_ROWS * 2 * d
    pieces = scores + TILE_ROWS * SCORE_STRIDE
    states = pieces + TILE_ROWS * stride
    for row in range(begin, end):
        copy_words(q + _row_offset(row, kv_head, heads), d // 2, scratch + (row - begin) * 2 * d)
    last_position = start + (end - 1) // group_size
    for chunk in range(last_position // CHUNK + 1):
        # Rows whose position lies before the chunk see nothing of it.
        first = (start - chunk * CHUNK) * group_size + begin
        skip = max(0, -first)
        _attend_chunk(
            end - begin - skip, scratch + skip * 2 * d,
            chunk_keys(kv, slot, chunk, layer, kv_head), first + skip, group_size, d,
            scores, states if chunk == 0 else pieces,
        )  # fmt: skip
        if chunk > 0:
            for row in range(end - begin - skip):
                fold(states + (skip + row) * stride, pieces + row * stride, d)
    for row in range(begin, end):
        finish(states + (row - begin) * stride, d, out + _row_offset(row, kv_head, heads))


@kernel
def attend_prefill(
    q: int, heads: Heads, kv: KvLayout, layer: int, slot: int, start: int, num_tokens: int,
    unit_begin: int, unit_end: int, scratch: int, out: int,
) -> None:  # fmt: skip
    """Units [unit_begin, unit_end) of the span `start … start + num_tokens - 1` of a slot.

    q, out: bf16 [token][head][head_dim], addresses of the span's first row. The span's own keys and
    values are in the KV tensor already. scratch: `attention_scratch_bytes`, one per thread.
    Units run through the tiles of one kv-head, the longest first, before the next kv-head.
    """
    group_size = heads.num_heads // heads.num_kv_heads
    tiles = num_tiles(num_tokens, group_size)
    for unit in range(unit_begin, unit_end):
        tile = tiles - 1 - unit % tiles
        begin = tile * TILE_ROWS
        _attend_tile(
            q, heads, kv, layer, slot, start, unit // tiles, begin,
            min(begin + TILE_ROWS, num_tokens * group_size), scratch, out,
        )  # fmt: skip
