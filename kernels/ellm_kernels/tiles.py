"""Sizes and addresses that packing, kernels and memory planning must agree on.

A weight matrix `[N outputs, K inputs]` is packed in panels of 64 outputs,
`[N/64][K/2][64][2]` bf16, the last one filled up with zero columns. Rows of float32 activations are
as long as their padded width, so kernels store whole panels. A panel of the gate and up projections
holds 32 columns of each.
"""

from __future__ import annotations

PANEL = 64
HALF_PANEL = 32
PAIR_BYTES = PANEL * 4


def padded(width: int) -> int:
    """Width rounded up to whole panels."""
    return -(-width // PANEL) * PANEL


def num_panels(outputs: int) -> int:
    """Panels that `outputs` columns take."""
    return -(-outputs // PANEL)


def panel_bytes(inputs: int) -> int:
    """Bytes of one bf16 panel of `inputs` (even) inputs."""
    return inputs // 2 * PAIR_BYTES


def packed_bytes(outputs: int, inputs: int) -> int:
    """Bytes of a packed bf16 matrix."""
    return num_panels(outputs) * panel_bytes(inputs)


def num_up_panels(intermediate: int) -> int:
    """Panels of a gate and up projection."""
    return -(-intermediate // HALF_PANEL)


def packed_up_bytes(intermediate: int, inputs: int) -> int:
    """Bytes of packed gate and up projections."""
    return num_up_panels(intermediate) * panel_bytes(inputs)
