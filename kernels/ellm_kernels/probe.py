"""What this machine can do at best: a plain read loop, and chains of products in registers.

The ceilings that plans and benchmarks are measured against. An entry keeps the calling thread busy
and nothing else, so the caller decides how many threads run and where they are pinned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from ellm_kernels import isa
from ellm_kernels.jit import entry, intrinsic
from ellm_kernels.simd import LANES, TileType, load_i32, make_tile_zero, tile_outer, tile_store

_i32 = ir.IntType(32)
_i64 = ir.IntType(64)
_v16f = ir.VectorType(ir.FloatType(), LANES)
_v16i = ir.VectorType(_i32, LANES)

MR = isa.active().mr
NV = isa.active().nv
# 16 lines of 64 bytes in flight per turn of the loop.
_READ = TileType(1, 16)
READ_BYTES = 64 * _READ.nv
# More chains than the product's latency times its throughput (at most 6 × 2).
_NUM_DOTS = 24
_DOTS = TileType(1, _NUM_DOTS)

# Where LLVM was narrowed to a variant without the instruction, it must not be asked for.
HAS_INT8_DOT = isa.active().name == "avx512_bf16" and "avx512vnni" in isa.host_flags()
# Operations of one iteration; a multiply-add counts as two.
BF16_OPS = MR * NV * LANES * 2 * 2
INT8_OPS = _NUM_DOTS * LANES * 4 * 2 if HAS_INT8_DOT else 0

_read_zero = make_tile_zero(1, _READ.nv)


def _update(b: Any, tile: Any, count: int, change: Any) -> Any:
    """The tile with `change(k, vector k as integers)` in place of every vector."""
    for k in range(count):
        words = change(k, b.bitcast(b.extract_value(tile, k), _v16i))
        tile = b.insert_value(tile, b.bitcast(words, _v16f), k)
    return tile


@intrinsic
def _xor_lines(_ctx: Any, tile: Any, address: Any) -> Any:
    """tile ^= the cache lines at `address`, one per vector."""

    def codegen(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        def change(k: int, words: Any) -> Any:
            at = b.inttoptr(b.add(args[1], ir.Constant(_i64, 64 * k)), _v16i.as_pointer())
            return b.xor(words, b.load(at, align=4))

        return _update(b, args[0], _READ.nv, change)

    return _READ(_READ, types.intp), codegen


@intrinsic
def _xor_words(_ctx: Any, tile: Any) -> Any:
    """All 32-bit words of a tile, folded into one."""

    def codegen(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        total = ir.Constant(_v16i, [0] * LANES)
        for k in range(tile.nv):
            total = b.xor(total, b.bitcast(b.extract_value(args[0], k), _v16i))
        result: Any = ir.Constant(_i32, 0)
        for lane in range(LANES):
            result = b.xor(result, b.extract_element(total, ir.Constant(_i32, lane)))
        return b.zext(result, _i64)

    return types.int64(tile), codegen


def _make_start(tile: TileType) -> Any:
    """A tile whose vectors all differ: equal chains of products would be computed once."""
    count = tile.mr * tile.nv
    values = [ir.Constant(_v16f, [float(k)] * LANES) for k in range(count)]
    start = ir.Constant(ir.ArrayType(_v16f, count), values)

    @intrinsic
    def tile_start(_ctx: Any) -> Any:
        return tile(), lambda _c, _b, _s, _args: start

    return tile_start


_dots_start = _make_start(_DOTS)
_products_start = _make_start(TileType(MR, NV))


@intrinsic
def _add_dots(_ctx: Any, tile: Any, word: Any) -> Any:
    """Every vector of the tile += the int8 dot product of `word` with itself."""

    def codegen(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        kind = ir.FunctionType(_v16i, [_v16i] * 3)
        dot = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.vpdpbusd.512")
        undef = ir.Constant(_v16i, ir.Undefined)
        first = b.insert_element(undef, b.trunc(args[1], _i32), ir.Constant(_i32, 0))
        operand = b.shuffle_vector(first, undef, ir.Constant(_v16i, [0] * LANES))

        return _update(b, args[0], _NUM_DOTS, lambda k, sums: b.call(dot, [sums, operand, operand]))

    return _DOTS(_DOTS, types.int64), codegen


@entry("int64(int64, int64)")
def read_stream(address: int, num_bytes: int) -> int:
    """Reads memory once: the XOR of its 32-bit words, whole multiples of `READ_BYTES` only."""
    tile = _read_zero()
    for offset in range(0, num_bytes - READ_BYTES + 1, READ_BYTES):
        tile = _xor_lines(tile, address + offset)
    return _xor_words(tile)


@entry("float32(int64)")
def bf16_peak(iterations: int) -> float:
    """`BF16_OPS` per iteration: the matrix product's own step, all of it in registers.

    Every product is 1 · 1, so the element returned is 2 · iterations.
    """
    operand = np.full(LANES, 0x3F803F80, np.int32)  # pairs of bf16 1.0
    out = np.empty(MR * NV * LANES, np.float32)
    address = operand.ctypes.data
    tile = _products_start()
    for _ in range(iterations):
        # One operand for all rows and columns: one register each.
        tile = tile_outer(tile, address, 0, address, 0)
    tile_store(tile, out.ctypes.data, NV * LANES * 4)
    return out[0]


@entry("int64(int64)")
def int8_peak(iterations: int) -> int:
    """`INT8_OPS` per iteration; 0 at once where the CPU has no int8 dot product.

    Every dot product is four times 1 · 1, so the element returned is 4 · iterations.
    """
    out = np.zeros(_NUM_DOTS * LANES, np.float32)
    address = out.ctypes.data
    if HAS_INT8_DOT:
        # The compiler cannot know the operand.
        word = 0x01010101 + (iterations >> 62)
        tile = _dots_start()
        for _ in range(iterations):
            tile = _add_dots(tile, word)
        tile_store(tile, address, 0)
    return load_i32(address)
