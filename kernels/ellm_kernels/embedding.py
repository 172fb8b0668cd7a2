"""Embedding: bf16 rows of the table become float32 rows of the residual stream."""

from __future__ import annotations

from ellm_kernels.jit import kernel
from ellm_kernels.simd import LANES, load_i32, vload_bf16, vstore


@kernel
def embed_rows(
    table: int, token_ids: int, hidden: int, row_begin: int, row_end: int, out: int
) -> None:
    """out[row] = table[token_ids[row]], for a range of rows.

    table: bf16 [vocab][hidden], hidden >= 16. token_ids: int32 [row]. out: float32 [row][hidden].
    """
    for row in range(row_begin, row_end):
        source = table + load_i32(token_ids + 4 * row) * hidden * 2
        target = out + row * hidden * 4
        for i in range(hidden // LANES):
            vstore(target + 64 * i, vload_bf16(source + 32 * i))
        if hidden % LANES:
            at = hidden - LANES  # overlaps the vector before
            vstore(target + 4 * at, vload_bf16(source + 2 * at))
