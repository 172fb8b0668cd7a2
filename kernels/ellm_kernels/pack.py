"""Rows of a checkpoint into panels, and single values into the formats kernels read.

Packing is a transpose of 32-bit words (bf16 pairs): word k of output n goes to `[n/64][k][n%64]`.
"""

from __future__ import annotations

from ellm_kernels.jit import entry
from ellm_kernels.simd import load_i32, store_i32
from ellm_kernels.tiles import PAIR_BYTES

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
