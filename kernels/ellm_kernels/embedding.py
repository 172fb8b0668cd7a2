"""Embedding: bf16 rows of the table become float32 rows of the residual stream.

A socket may hold a share of the vocabulary only: a row whose token it does not hold is zero, and
the rows of all sockets are added up by the norm that follows.
"""

from __future__ import annotations

import numpy as np

from ellm_kernels.jit import kernel
from ellm_kernels.simd import (
    LANES,
    load_i32,
    load_index,
    store_f32,
    store_i32,
    vload_bf16,
    vsplat,
    vstore,
)
from ellm_kernels.tiles import PAIR_BYTES, PANEL

_ZERO = np.float32(0.0)


@kernel
def _clear_row(out: int, hidden: int) -> None:
    for i in range(hidden // LANES):
        vstore(out + 64 * i, vsplat(_ZERO))
    for i in range(hidden // LANES * LANES, hidden):
        store_f32(out + 4 * i, _ZERO)


@kernel
def embed_rows(
    table: int, token_ids: int, first_token: int, num_tokens: int, hidden: int,
    row_begin: int, row_end: int, out: int,
) -> None:  # fmt: skip
    """out[row] = table[token_ids[row] - first_token], or zeros outside the table.

    table: bf16 [num_tokens][hidden], hidden >= 16. token_ids: int32 [row]. out: float32
    [row][hidden].
    """
    for row in range(row_begin, row_end):
        token = load_index(token_ids + 4 * row) - first_token
        target = out + row * hidden * 4
        if token < 0 or token >= num_tokens:
            _clear_row(target, hidden)
            continue
        source = table + token * hidden * 2
        for i in range(hidden // LANES):
            vstore(target + 64 * i, vload_bf16(source + 32 * i))
        if hidden % LANES:
            at = hidden - LANES  # overlaps the vector before
            vstore(target + 4 * at, vload_bf16(source + 2 * at))


@kernel
def embed_packed_rows(
    panels: int, token_ids: int, first_token: int, num_tokens: int, hidden: int,
    row_begin: int, row_end: int, out: int,
) -> None:  # fmt: skip
    """`embed_rows` from a packed lm_head, for models whose embeddings are tied to it.

    The two bf16 of a word are the upper halves of two float32. 32 cache lines are touched where a
    row-major table touches one, but the table need not be held twice.
    """
    for row in range(row_begin, row_end):
        token = load_index(token_ids + 4 * row) - first_token
        to = out + row * hidden * 4
        if token < 0 or token >= num_tokens:
            _clear_row(to, hidden)
            continue
        at = panels + token // PANEL * (hidden // 2 * PAIR_BYTES) + token % PANEL * 4
        for pair in range(hidden // 2):
            word = load_i32(at + pair * PAIR_BYTES)
            store_i32(to + 8 * pair, word << 16)
            store_i32(to + 8 * pair + 4, word & -65536)
