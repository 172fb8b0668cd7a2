"""The pieces of one chunk for few queries: decode's form of `attention_piece`.

Bound by memory: every key and value comes from far away and is used once. The two products are
narrow (two vectors of columns) and tall (all query heads of a kv-head), so each line is read once,
and with every pair they ask for the lines that are wanted 128 KiB later: the values while scores
are computed, the next chunk's keys while outputs are. The hardware's own prefetchers do not follow
the interleaved order.
"""

from __future__ import annotations

from typing import Any

from ellm_kernels import isa
from ellm_kernels.attention_piece import (
    OUT_OFFSET,
    SCORE_STRIDE,
    piece_stride,
    probabilities,
)
from ellm_kernels.jit import kernel
from ellm_kernels.kv_layout import GROUP, chunk_values
from ellm_kernels.micro import MR, multiply_block
from ellm_kernels.simd import LANES, make_tile_zero, prefetch, tile_outer, tile_store

# 8 × 2 accumulators where there are 32 registers of 16 lanes.
_ROWS = 8 if isa.active().nv > 1 else isa.active().mr
_VECS = 2 if isa.active().nv > 1 else 1


def _make_stream(rows: int, vecs: int) -> Any:
    tile_zero = make_tile_zero(rows, vecs)

    @kernel
    def stream(
        _rows: int, a: int, a_stride: int, b: int, vec_stride: int, pair_stride: int,
        num_pairs: int, c: int, c_stride: int, ahead: int, step: int,
    ) -> None:  # fmt: skip
        tile = tile_zero()
        for k in range(num_pairs):
            tile = tile_outer(tile, a + 4 * k, a_stride, b + k * pair_stride, vec_stride)
            prefetch(ahead + k * step)
            if vecs > 1:
                prefetch(ahead + k * step + 64)
        tile_store(tile, c, c_stride)

    return stream


def _make_stream_rows(rows: int, vecs: int) -> Any:
    """`stream` for any number of rows up to `rows`."""
    all_rows = _make_stream(rows, vecs)
    if rows == 1:
        return all_rows
    fewer = _make_stream_rows(rows - 1, vecs)

    @kernel
    def stream_rows(
        num_rows: int, a: int, a_stride: int, b: int, vec_stride: int, pair_stride: int,
        num_pairs: int, c: int, c_stride: int, ahead: int, step: int,
    ) -> None:  # fmt: skip
        if num_rows >= rows:
            all_rows(
                num_rows, a, a_stride, b, vec_stride, pair_stride, num_pairs, c, c_stride,
                ahead, step,
            )  # fmt: skip
        else:
            fewer(
                num_rows, a, a_stride, b, vec_stride, pair_stride, num_pairs, c, c_stride,
                ahead, step,
            )  # fmt: skip

    return stream_rows


_stream_rows = _make_stream_rows(_ROWS, _VECS)


@kernel
def _product(
    num_rows: int, num_vecs: int, a: int, a_stride: int, b: int, vec_stride: int,
    pair_stride: int, num_pairs: int, c: int, c_stride: int, ahead: int,
) -> None:  # fmt: skip
    """c = a · b as in `multiply_block`, for any number of rows.

    ahead: start of memory wanted next, or 0; the first rows ask for as many bytes as b has.
    """
    j = 0
    while j + _VECS <= num_vecs:
        row = 0
        while row < num_rows:
            wanted, step = a, 0  # an address that costs nothing
            if ahead and row == 0:
                wanted, step = ahead + j * num_pairs * 64, 64 * _VECS
            _stream_rows(
                num_rows - row, a + row * a_stride, a_stride, b + j * vec_stride, vec_stride,
                pair_stride, num_pairs, c + row * c_stride + 64 * j, c_stride, wanted, step,
            )  # fmt: skip
            row += _ROWS
        j += _VECS
    row = 0
    while row < num_rows and j < num_vecs:
        multiply_block(
            min(MR, num_rows - row), num_vecs - j, a + row * a_stride, a_stride,
            b + j * vec_stride, vec_stride, pair_stride, num_pairs,
            c + row * c_stride + 64 * j, c_stride, a, 0,
        )  # fmt: skip
        row += MR


@kernel
def stream_chunk(
    num_rows: int, q: int, keys: int, num_visible: int, head_dim: int, scores: int, pieces: int,
    next_keys: int,
) -> None:  # fmt: skip
    """The pieces of queries at one position and one chunk, of which they see `num_visible` keys.

    q: bf16 [num_rows][head_dim]. scores: scratch, SCORE_STRIDE per row. next_keys: the chunk that
    will be wanted next, or 0.
    """
    values = chunk_values(keys, head_dim)
    num_groups = (num_visible + GROUP - 1) // GROUP
    stride = piece_stride(head_dim)
    _product(
        num_rows, num_groups, q, 2 * head_dim, keys, GROUP * head_dim * 2, 64, head_dim // 2,
        scores, SCORE_STRIDE, values,
    )  # fmt: skip
    upcoming = next_keys
    for row in range(num_rows):
        at = scores + row * SCORE_STRIDE
        wanted, step = (upcoming, 128) if upcoming else (at, 0)
        probabilities(at, num_visible, num_groups, pieces + row * stride, wanted, step)
        if upcoming:
            upcoming += num_visible // 32 * 128
    _product(
        num_rows, head_dim // LANES, scores, SCORE_STRIDE, values, 64, head_dim * 4,
        (num_visible + 1) // 2, pieces + OUT_OFFSET, stride, upcoming,
    )  # fmt: skip
