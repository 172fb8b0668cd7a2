"""Reading a program's table and a step's descriptor."""

from __future__ import annotations

from ellm_kernels.jit import kernel
from ellm_kernels.opcodes import FIRST_ARG
from ellm_kernels.simd import load_f32, load_i64


@kernel
def arg(op: int, index: int) -> int:
    """Argument `index` of an op's row."""
    return load_i64(op + 8 * (FIRST_ARG + index))


@kernel
def arg_f32(op: int, index: int) -> float:
    """The same word holding a float32 in its lower half."""
    return load_f32(op + 8 * (FIRST_ARG + index))


@kernel
def word(step: int, index: int) -> int:
    """Word `index` of a step's descriptor."""
    return load_i64(step + 8 * index)
