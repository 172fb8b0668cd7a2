"""The canonical piece of attention, which prefill and decode both compute.

Positions are cut into chunks of 512 at fixed absolute coordinates. For a query at position t, the
piece of chunk c covers the keys of that chunk at positions <= t (scores s are exponents of two):

    m = max s     p = 2^(s - m)     l = sum p     o = sum bf16(p) · v

l sums the unrounded p, lane by lane in the order of the positions, then over the lanes in a fixed
order. o is one chain over pairs of positions. Positions beyond t contribute exact zeros, so loops
may stop anywhere beyond t; hence a piece depends on nothing but its query and its chunk. Pieces are
folded in the order of the chunks.

A piece in memory is m and l, each repeated over a vector, then o: float32 [16 + 16 + head_dim].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ellm_kernels.jit import kernel
from ellm_kernels.kv_layout import CHUNK, GROUP, chunk_values
from ellm_kernels.micro import MR, NV, multiply_block
from ellm_kernels.simd import (
    LANES,
    prefetch,
    vadd,
    vdiv,
    vexp2,
    vfma,
    vhmax,
    vkeep,
    vload,
    vmax,
    vmul,
    vsplat,
    vstore,
    vstore_bf16,
    vsub,
    vsum,
)

_OUT = 2 * 64  # bytes before o
# One row of scores; its probabilities overwrite it from the left. The extra line keeps the rows of
# a tile from falling into the same sets of the first-level cache.
SCORE_STRIDE = CHUNK * 4 + 64
_FIRST = np.float32(-np.inf)


def piece_bytes(head_dim: int) -> int:
    """Bytes of one piece."""
    return _OUT + head_dim * 4


@kernel
def piece_stride(head_dim: int) -> int:
    """`piece_bytes` for kernels."""
    return _OUT + head_dim * 4


@kernel
def _scores(
    num_rows: int, q: int, keys: int, num_groups: int, head_dim: int, scores: int, ahead: int
) -> None:
    """Scores of `num_groups` × 16 keys, a strip of keys at a time so that it stays close by.

    ahead: memory wanted next (512 keys' worth), asked for at the speed of the product.
    """
    q_stride = 2 * head_dim
    group_bytes = GROUP * head_dim * 2
    group = 0
    while group < num_groups:
        width = min(NV, num_groups - group)
        if ahead:
            prefetch_range(ahead + group * group_bytes, width * group_bytes)
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
def prefetch_range(address: int, size: int) -> None:
    """Asks for `size` bytes to be brought into the second-level cache."""
    for line in range(size // 64):
        prefetch(address + 64 * line)


@kernel
def _group(scores: int, group: int, limit: int) -> Any:
    """Scores of one group of 16 positions; -inf at `limit` and beyond."""
    s = vload(scores + 64 * group)
    if group * GROUP + GROUP > limit:
        s = vkeep(s, limit - group * GROUP, vsplat(_FIRST))
    return s


@kernel
def _row_max(scores: int, limit: int) -> float:
    a, b = vsplat(_FIRST), vsplat(_FIRST)
    whole = limit // GROUP
    group = 0
    while group + 2 <= whole:
        a = vmax(a, vload(scores + 64 * group))
        b = vmax(b, vload(scores + 64 * group + 64))
        group += 2
    while group * GROUP < limit:
        a = vmax(a, _group(scores, group, limit))
        group += 1
    return vhmax(vmax(a, b))


@kernel
def _probabilities(scores: int, limit: int, num_groups: int, piece: int) -> None:
    """Turns one row of scores into bf16 probabilities in place; sets m and l of the piece."""
    m = vsplat(_row_max(scores, limit))
    even, odd = vsplat(np.float32(0)), vsplat(np.float32(0))
    whole = limit // (2 * GROUP)
    for pair in range(whole):
        s, t = vload(scores + 128 * pair), vload(scores + 128 * pair + 64)
        p, q = vexp2(vsub(s, m)), vexp2(vsub(t, m))
        even, odd = vadd(even, p), vadd(odd, q)
        vstore_bf16(scores + 64 * pair, p)
        vstore_bf16(scores + 64 * pair + 32, q)
    group = 2 * whole
    if group * GROUP < limit:
        p = vexp2(vsub(_group(scores, group, limit), m))
        even = vadd(even, p)
        vstore_bf16(scores + 32 * group, p)
        group += 1
    if group * GROUP < limit:
        p = vexp2(vsub(_group(scores, group, limit), m))
        odd = vadd(odd, p)
        vstore_bf16(scores + 32 * group, p)
        group += 1
    while group < num_groups:
        vstore_bf16(scores + 32 * group, vsplat(np.float32(0)))
        group += 1
    vstore(piece, m)
    vstore(piece + 64, vsplat(vsum(vadd(even, odd))))


@kernel
def attend_chunk(
    num_rows: int, q: int, keys: int, first: int, group_size: int, head_dim: int,
    scores: int, pieces: int, ahead: int, next_keys: int,
) -> None:  # fmt: skip
    """The pieces of `num_rows` queries and one chunk.

    q: bf16 [num_rows][head_dim]. Row r sees the first `(first + r) // group_size + 1` positions of
    the chunk (all 512 if that is more). scores: scratch of SCORE_STRIDE per row. ahead: 1 if the
    chunk comes from far away and is used once: then values are fetched while scores are computed,
    and `next_keys` (if not 0) while the outputs are.
    """
    values = chunk_values(keys, head_dim)
    limit = min(CHUNK, (first + num_rows - 1) // group_size + 1)
    num_groups = (limit + GROUP - 1) // GROUP
    _scores(num_rows, q, keys, num_groups, head_dim, scores, values if ahead else 0)
    stride = piece_stride(head_dim)
    for row in range(num_rows):
        sees = min(CHUNK, (first + row) // group_size + 1)
        _probabilities(scores + row * SCORE_STRIDE, sees, num_groups, pieces + row * stride)
    row = 0
    while row < num_rows:
        if next_keys:
            prefetch_range(next_keys, CHUNK * head_dim * 2)
        multiply_block(
            min(MR, num_rows - row), head_dim // LANES, scores + row * SCORE_STRIDE, SCORE_STRIDE,
            values, 64, head_dim * 4, (limit + 1) // 2, pieces + row * stride + _OUT, stride, q, 0,
        )  # fmt: skip
        row += MR


@kernel
def fold(state: int, piece: int, head_dim: int) -> None:
    """state = state followed by piece."""
    m_old, m_new = vload(state), vload(piece)
    m = vmax(m_old, m_new)
    a, b = vexp2(vsub(m_old, m)), vexp2(vsub(m_new, m))
    vstore(state, m)
    for i in range(64, _OUT + head_dim * 4, 64):
        vstore(state + i, vfma(vload(state + i), a, vmul(vload(piece + i), b)))


@kernel
def finish(state: int, head_dim: int, out: int) -> None:
    """out = o / l, rounded to bf16."""
    total = vload(state + 64)
    for i in range(head_dim // LANES):
        # A product with a zero probability may turn -0 into +0; adding 0 makes them one.
        o = vadd(vdiv(vload(state + _OUT + 64 * i), total), vsplat(np.float32(0)))
        vstore_bf16(out + 32 * i, o)
