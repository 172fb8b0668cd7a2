"""RMSNorm of float32 rows: x / sqrt(mean(x²) + eps) · weight.

The squares are summed in four vectors of 16 lanes which are folded in a fixed order, so a row gives
the same bits wherever it is computed. A row whose length is no multiple of 16 ends with a vector
that overlaps the one before it; hence every dim is at least 16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ellm_kernels.jit import kernel
from ellm_kernels.simd import (
    LANES,
    vadd,
    vfma,
    vkeep,
    vload,
    vmul,
    vsplat,
    vstore,
    vstore_bf16,
    vsum,
)


@kernel
def inverse_rms(x: int, eps: float, dim: int) -> float:
    """1 / sqrt(mean(x²) + eps) of one row."""
    zero = vsplat(np.float32(0))
    a, b, c, d = zero, zero, zero, zero
    whole = dim // LANES
    i = 0
    while i + 4 <= whole:
        at = x + 64 * i
        v0, v1, v2, v3 = vload(at), vload(at + 64), vload(at + 128), vload(at + 192)
        a, b, c, d = vfma(v0, v0, a), vfma(v1, v1, b), vfma(v2, v2, c), vfma(v3, v3, d)
        i += 4
    while i < whole:
        v0 = vload(x + 64 * i)
        a = vfma(v0, v0, a)
        i += 1
    if dim % LANES:
        v0 = vkeep(zero, LANES - dim % LANES, vload(x + 4 * (dim - LANES)))
        b = vfma(v0, v0, b)
    total = vsum(vadd(vadd(a, b), vadd(c, d)))
    return np.float32(1) / np.sqrt(total / np.float32(dim) + eps)


@kernel
def add_row(x: int, delta: int, dim: int) -> None:
    """x += delta, float32."""
    for i in range(dim // LANES):
        vstore(x + 64 * i, vadd(vload(x + 64 * i), vload(delta + 64 * i)))
    if dim % LANES:
        at = 4 * (dim - LANES)
        old = vload(x + at)
        # The lanes this vector shares with the one before have had their addition.
        vstore(x + at, vkeep(old, LANES - dim % LANES, vadd(old, vload(delta + at))))


@kernel
def copy_row(x: int, source: int, dim: int) -> None:
    """x = source, float32."""
    for i in range(dim // LANES):
        vstore(x + 64 * i, vload(source + 64 * i))
    if dim % LANES:
        at = 4 * (dim - LANES)
        vstore(x + at, vload(source + at))


@kernel
def _scaled(x: int, weight: int, scale: float, at: int) -> Any:
    return vmul(vmul(vload(x + at), vsplat(scale)), vload(weight + at))


@kernel
def scale_row(x: int, weight: int, scale: float, dim: int, out: int) -> None:
    """out = x · scale · weight, float32."""
    for i in range(dim // LANES):
        vstore(out + 64 * i, _scaled(x, weight, scale, 64 * i))
    if dim % LANES:
        at = 4 * (dim - LANES)
        vstore(out + at, _scaled(x, weight, scale, at))


@kernel
def scale_row_bf16(x: int, weight: int, scale: float, dim: int, out: int) -> None:
    """out = x · scale · weight, rounded to bf16."""
    for i in range(dim // LANES):
        vstore_bf16(out + 32 * i, _scaled(x, weight, scale, 64 * i))
    if dim % LANES:
        at = dim - LANES
        vstore_bf16(out + 2 * at, _scaled(x, weight, scale, 4 * at))


@kernel
def rms_norm_rows(
    residual: int, delta: int, delta_stride: int, num_deltas: int, fresh: int,
    weight: int, eps: float, dim: int, row_begin: int, row_end: int, out: int,
) -> None:  # fmt: skip
    """residual += every delta; out = RMSNorm(residual), for a range of rows.

    residual, delta: float32 [row][dim]; delta i lies `delta_stride` bytes behind delta i-1 and is
    socket i's share of a sum: every socket adds them in this order. fresh: 1 if what was in the
    residual does not count. weight: float32 [dim]. eps: float32. out: bf16 [row][dim].
    """
    for row in range(row_begin, row_end):
        x = residual + row * dim * 4
        for i in range(num_deltas):
            share = delta + i * delta_stride + row * dim * 4
            if fresh and i == 0:
                copy_row(x, share, dim)
            else:
                add_row(x, share, dim)
        scale_row_bf16(x, weight, inverse_rms(x, eps, dim), dim, out + row * dim * 2)
