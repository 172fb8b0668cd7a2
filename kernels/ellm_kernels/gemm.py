"""Linear layers over packed panels: many rows (prefill) and few rows (decode) alike.

An item is one panel times one run of rows, so any thread may take any item; a result is always one
chain over k and depends on nothing but its own row.
"""

from __future__ import annotations

from ellm_kernels.jit import kernel
from ellm_kernels.micro import MR, multiply_block
from ellm_kernels.tiles import PAIR_BYTES

# Up to this many rows a panel is read faster than it is used, and the next panel is fetched
# meanwhile; above, the rows are the larger stream.
STREAM_ROWS = 96


@kernel
def multiply_panel(
    rows: int, x: int, x_stride: int, panel: int, num_pairs: int, out: int, out_stride: int,
    next_panel: int,
) -> None:  # fmt: skip
    """out[rows, 64] = x[rows, 2·num_pairs] · panel.

    x: bf16; out: float32; strides in bytes. next_panel: memory to fetch meanwhile, or 0.
    """
    num_blocks = (rows + MR - 1) // MR
    if num_blocks == 0:
        return
    stream = rows <= STREAM_ROWS
    share = num_pairs * PAIR_BYTES // num_blocks
    begin = 0
    for block in range(num_blocks):
        # Blocks as even as possible: 8 rows are 4 + 4, not 6 + 2.
        end = rows * (block + 1) // num_blocks
        a = x + begin * x_stride
        if num_blocks == 1:
            # The core's own look-ahead is enough, and a second stream beside this one costs a
            # fifth of the bandwidth: "fetch" what is being read.
            ahead, ahead_step = panel, PAIR_BYTES
        elif stream and next_panel != 0:
            ahead = next_panel + block * share
            ahead_step = min(share // num_pairs, 64)
        else:
            ahead = x + end * x_stride
            ahead_step = (end - begin) * x_stride // num_pairs
        if end == rows and not stream:
            ahead_step = 0
        multiply_block(
            end - begin, 4, a, x_stride, panel, 64, PAIR_BYTES, num_pairs,
            out + begin * out_stride, out_stride, ahead, ahead_step,
        )  # fmt: skip
        begin = end
