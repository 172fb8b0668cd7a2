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
from ellm_kernels.kv_layout import CHUNK, GROUP
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

OUT_OFFSET = 2 * 64  # bytes of a piece before o
# One row of scores; its probabilities overwrite it from the left. The extra line keeps the rows of
# a tile from falling into the same sets of the first-level cache.
SCORE_STRIDE = CHUNK * 4 + 64
_FIRST = np.float32(-np.inf)


def piece_bytes(head_dim: int) -> int:
    """Bytes of one piece."""
    return OUT_OFFSET + head_dim * 4


@kernel
def piece_stride(head_dim: int) -> int:
    """`piece_bytes` for kernels."""
    return OUT_OFFSET + head_dim * 4


@kernel
def visible(first: int, row: int, group_size: int) -> int:
    """Positions of a chunk that a row of a tile sees, rows being tokens × query heads."""
    return min(CHUNK, (first + row) // group_size + 1)


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
def probabilities(
    scores: int, limit: int, num_groups: int, piece: int, ahead: int, step: int
) -> None:
    """Turns one row of scores into bf16 probabilities in place; sets m and l of the piece.

    ahead: memory wanted soon; `step` bytes (at most 128) are asked for with every 32 positions.
    """
    m = vsplat(_row_max(scores, limit))
    even, odd = vsplat(np.float32(0)), vsplat(np.float32(0))
    whole = limit // (2 * GROUP)
    for pair in range(whole):
        s, t = vload(scores + 128 * pair), vload(scores + 128 * pair + 64)
        p, q = vexp2(vsub(s, m)), vexp2(vsub(t, m))
        even, odd = vadd(even, p), vadd(odd, q)
        prefetch(ahead + pair * step)
        prefetch(ahead + pair * step + step // 2)
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
def fold(state: int, piece: int, head_dim: int) -> None:
    """state = state followed by piece."""
    m_old, m_new = vload(state), vload(piece)
    m = vmax(m_old, m_new)
    a, b = vexp2(vsub(m_old, m)), vexp2(vsub(m_new, m))
    vstore(state, m)
    for i in range(64, OUT_OFFSET + head_dim * 4, 64):
        vstore(state + i, vfma(vload(state + i), a, vmul(vload(piece + i), b)))


@kernel
def finish(state: int, head_dim: int, out: int) -> None:
    """out = o / l, rounded to bf16."""
    total = vload(state + 64)
    for i in range(head_dim // LANES):
        # A product with a zero probability may turn -0 into +0; adding 0 makes them one.
        o = vadd(vdiv(vload(state + OUT_OFFSET + 64 * i), total), vsplat(np.float32(0)))
        vstore_bf16(out + 32 * i, o)
