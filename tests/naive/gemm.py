"""Packed panels and products over them, as whole-array numpy.

A matrix [outputs, inputs] of bf16 bits becomes `[outputs/64][inputs/2][64][2]`; missing outputs of
the last panel are zero.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def widen(bits: Bits) -> F32:
    """bf16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pack_panels(matrix: Bits) -> Bits:
    """[outputs, inputs] → [panel][pair][64][2]"""
    outputs, inputs = matrix.shape
    panels = -(-outputs // 64)
    filled = np.zeros((panels * 64, inputs), np.uint16)
    filled[:outputs] = matrix
    return np.ascontiguousarray(
        filled.reshape(panels, 64, inputs // 2, 2).transpose(0, 2, 1, 3)
    )  # [panel, pair, output, 2]


def pack_gate_up(gate: Bits, up: Bits) -> Bits:
    """Two matrices [outputs, inputs] → panels of 32 rows of each, [panel][pair][32 + 32][2]"""
    outputs, inputs = gate.shape
    panels = -(-outputs // 32)
    both = np.zeros((2, panels * 32, inputs), np.uint16)
    both[:, :outputs] = gate, up
    rows = both.reshape(2, panels, 32, inputs).transpose(1, 0, 2, 3)  # [panel, which, row, input]
    return pack_panels(rows.reshape(panels * 64, inputs))


def multiply_panel(x: Bits, matrix: Bits) -> F64:
    """[rows, inputs] · [outputs, inputs]ᵀ"""
    return widen(x).astype(np.float64) @ widen(matrix).astype(np.float64).T


def multiply_bound(x: Bits, matrix: Bits) -> F64:
    """Σ |x| · |w|: what rounding errors of a product are measured by."""
    return multiply_panel(magnitude(x), magnitude(matrix))


def magnitude(bits: Bits) -> Bits:
    """|x|: the sign bit off."""
    return bits & np.uint16(0x7FFF)
