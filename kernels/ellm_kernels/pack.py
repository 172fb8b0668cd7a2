"""Rows of a checkpoint into panels, and single values into the formats kernels read.

Packing is a transpose of 32-bit words (bf16 pairs): word k of output n goes to `[n/64][k][n%64]`.
"""

from __future__ import annotations

from ellm_kernels.jit import entry, kernel
from ellm_kernels.simd import load_i32, load_index, store_i32
from ellm_kernels.tiles import PAIR_BYTES, PANEL

# Words of one row moved before the next row's turn: 16 words are one cache line of the source, and
# the 16 destination lines they fall into stay in the first-level cache for all 64 rows.
_RUN = 16


@entry("void(int64, int64, int64, int64, int64, int64, int64)")
def pack_panels(
    source: int, row_bytes: int, outputs: int, inputs: int, out: int, width: int, column: int
) -> None:
    """source bf16 [outputs, inputs] (`row_bytes` from row to row) → panels at `out`.

    Every panel takes `width` outputs, from its column `column` on: 64 and 0 for a whole matrix, 32
    and 0 or 32 for gate and up, which share panels. Columns of the last panel that no output is
    left for become zero. `inputs` must be even.
    """
    pairs = inputs // 2
    for panel in range((outputs + width - 1) // width):
        first = panel * width
        count = min(width, outputs - first)
        at = out + panel * pairs * PAIR_BYTES + 4 * column
        for k in range(0, pairs, _RUN):
            end = min(k + _RUN, pairs)
            for n in range(count):
                row = source + (first + n) * row_bytes
                for word in range(k, end):
                    store_i32(at + word * PAIR_BYTES + 4 * n, load_i32(row + 4 * word))
            for n in range(count, width):
                for word in range(k, end):
                    store_i32(at + word * PAIR_BYTES + 4 * n, 0)


@kernel
def embed_packed_rows(
    panels: int, token_ids: int, hidden: int, row_begin: int, row_end: int, out: int
) -> None:
    """`embed_rows` from a packed lm_head, for models whose embeddings are tied to it.

    The two bf16 of a word are the upper halves of two float32. 32 cache lines are touched where a
    row-major table touches one, but the table need not be held twice.
    """
    for row in range(row_begin, row_end):
        token = load_index(token_ids + 4 * row)
        at = panels + token // PANEL * (hidden // 2 * PAIR_BYTES) + token % PANEL * 4
        to = out + row * hidden * 4
        for pair in range(hidden // 2):
            word = load_i32(at + pair * PAIR_BYTES)
            store_i32(to + 8 * pair, word << 16)
            store_i32(to + 8 * pair + 4, word & -65536)
