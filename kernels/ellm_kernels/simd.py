"""Vectors of 16 float32 and register tiles of them, as Numba types.

Everything is emitted as LLVM vector code, so one definition serves every CPU: LLVM splits a
16-lane vector into what the machine has. Only the bf16 product and conversion and the power of two
use instructions of their own where the variant (`isa`) has them.

Addresses are integers. A bf16 is the upper half of a float32, kept in 16 bits. A *pair* is two
neighbouring bf16 along the reduced dimension in one 32-bit word: the unit `vdpbf16ps` consumes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import register_model

from ellm_kernels import isa
from ellm_kernels.jit import intrinsic

LANES = 16
_f32 = ir.FloatType()
_i16 = ir.IntType(16)
_i32 = ir.IntType(32)
_i64 = ir.IntType(64)
_v16f = ir.VectorType(_f32, LANES)
_v16i = ir.VectorType(_i32, LANES)
_v16h = ir.VectorType(_i16, LANES)
_v16b1 = ir.VectorType(ir.IntType(1), LANES)


class _BfloatVector(ir.types.Type):  # type: ignore[misc]
    """`<n x bfloat>`, which llvmlite has no type for."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes

    def __str__(self) -> str:
        return f"<{self.lanes} x bfloat>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BfloatVector) and other.lanes == self.lanes

    def __hash__(self) -> int:
        return hash(("bfloat", self.lanes))


_v32b = _BfloatVector(32)
_v16b = _BfloatVector(16)


class VecType(types.Type):  # type: ignore[misc]
    """16 float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="Vec16f")


class TileType(types.Type):  # type: ignore[misc]
    """mr × nv vectors of float32 accumulators."""

    def __init__(self, mr: int, nv: int) -> None:
        self.mr = mr
        self.nv = nv
        super().__init__(name=f"Tile({mr},{nv})")


@register_model(VecType)
class _VecModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: VecType) -> None:
        super().__init__(dmm, fe_type, _v16f)


@register_model(TileType)
class _TileModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: TileType) -> None:
        super().__init__(dmm, fe_type, ir.ArrayType(_v16f, fe_type.mr * fe_type.nv))


vec16 = VecType()


def _i32c(value: int) -> ir.Constant:
    return ir.Constant(_i32, value)


def _i64c(value: int) -> ir.Constant:
    return ir.Constant(_i64, value)


def _splat_const(value: float) -> ir.Constant:
    return ir.Constant(_v16f, [value] * LANES)


def _declare(b: Any, name: str, result: Any, arguments: list[Any], var_arg: bool = False) -> Any:
    kind = ir.FunctionType(result, arguments, var_arg=var_arg)
    return cgutils.get_or_insert_function(b.module, kind, name)


def _pointer(b: Any, address: Any, kind: Any) -> Any:
    return b.inttoptr(address, kind.as_pointer())


def _broadcast(b: Any, scalar: Any, kind: Any) -> Any:
    undef = ir.Constant(kind, ir.Undefined)
    first = b.insert_element(undef, scalar, _i32c(0))
    return b.shuffle_vector(first, undef, ir.Constant(_v16i, [0] * LANES))


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x · y + z: one rounding where the CPU can, two where LLVM would call a library instead."""
    if not isa.active().fma:
        return b.fadd(b.fmul(x, y), z)
    return b.call(_declare(b, "llvm.fma.v16f32", _v16f, [_v16f] * 3), [x, y, z])


def _emit(build: Callable[..., Any], result: Any, *arguments: Any) -> Any:
    """What an intrinsic returns: its signature and `build(builder, *values)` as its body."""

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        value = build(b, *args)
        return context.get_dummy_value() if result is types.void else value

    return result(*arguments), codegen


# --- vectors ---------------------------------------------------------------------------------


@intrinsic
def vsplat(_ctx: Any, x: Any) -> Any:
    """All lanes equal to the float32 x."""
    return _emit(lambda b, x: _broadcast(b, x, _v16f), vec16, types.float32)


@intrinsic
def vload(_ctx: Any, address: Any) -> Any:
    """16 float32 from memory; no alignment needed."""
    return _emit(lambda b, p: b.load(_pointer(b, p, _v16f), align=4), vec16, types.intp)


@intrinsic
def vstore(_ctx: Any, address: Any, x: Any) -> Any:
    """16 float32 to memory."""
    return _emit(
        lambda b, p, x: b.store(x, _pointer(b, p, _v16f), align=4), types.void, types.intp, vec16
    )


@intrinsic
def vadd(_ctx: Any, x: Any, y: Any) -> Any:
    """x + y"""
    return _emit(lambda b, x, y: b.fadd(x, y), vec16, vec16, vec16)


@intrinsic
def vsub(_ctx: Any, x: Any, y: Any) -> Any:
    """x - y"""
    return _emit(lambda b, x, y: b.fsub(x, y), vec16, vec16, vec16)


@intrinsic
def vmul(_ctx: Any, x: Any, y: Any) -> Any:
    """x · y"""
    return _emit(lambda b, x, y: b.fmul(x, y), vec16, vec16, vec16)


@intrinsic
def vdiv(_ctx: Any, x: Any, y: Any) -> Any:
    """x / y"""
    return _emit(lambda b, x, y: b.fdiv(x, y), vec16, vec16, vec16)


@intrinsic
def vfma(_ctx: Any, x: Any, y: Any, z: Any) -> Any:
    """x · y + z, rounded once where the CPU has the instruction."""
    return _emit(_fma, vec16, vec16, vec16, vec16)


def _vmax(b: Any, x: Any, y: Any) -> Any:
    return b.call(_declare(b, "llvm.maxnum.v16f32", _v16f, [_v16f] * 2), [x, y])


@intrinsic
def vmax(_ctx: Any, x: Any, y: Any) -> Any:
    """Lane by lane the larger; a NaN loses."""
    return _emit(_vmax, vec16, vec16, vec16)


def _tree(b: Any, x: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Folds 16 lanes in a fixed order: halves, quarters, …; every machine sums alike."""
    undef = ir.Constant(_v16f, ir.Undefined)
    for width in (8, 4, 2, 1):
        order = ir.Constant(_v16i, [lane ^ width for lane in range(LANES)])
        x = combine(b, x, b.shuffle_vector(x, undef, order))
    return b.extract_element(x, _i32c(0))


@intrinsic
def vsum(_ctx: Any, x: Any) -> Any:
    """Sum of the lanes, in a fixed order."""
    return _emit(lambda b, x: _tree(b, x, lambda b, p, q: b.fadd(p, q)), types.float32, vec16)


@intrinsic
def vhmax(_ctx: Any, x: Any) -> Any:
    """Largest lane."""
    return _emit(lambda b, x: _tree(b, x, _vmax), types.float32, vec16)


@intrinsic
def vload_bf16(_ctx: Any, address: Any) -> Any:
    """16 bf16 from memory, widened."""

    def build(b: Any, p: Any) -> Any:
        half = b.load(_pointer(b, p, _v16h), align=2)
        wide = b.shl(b.zext(half, _v16i), ir.Constant(_v16i, [16] * LANES))
        return b.bitcast(wide, _v16f)

    return _emit(build, vec16, types.intp)


def _round_to_bf16(b: Any, x: Any) -> Any:
    """16 float32 to 16 bf16 bits, nearest even; a NaN stays one."""
    if isa.active().bf16_dot:
        convert = _declare(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", _v16b, [_v16f])
        return b.bitcast(b.call(convert, [x]), _v16h)
    bits = b.bitcast(x, _v16i)
    odd = b.and_(b.lshr(bits, ir.Constant(_v16i, [16] * LANES)), ir.Constant(_v16i, [1] * LANES))
    rounded = b.add(b.add(bits, ir.Constant(_v16i, [0x7FFF] * LANES)), odd)
    quiet = b.or_(bits, ir.Constant(_v16i, [0x400000] * LANES))
    kept = b.select(b.fcmp_unordered("uno", x, x), quiet, rounded)
    return b.trunc(b.lshr(kept, ir.Constant(_v16i, [16] * LANES)), _v16h)


@intrinsic
def vstore_bf16(_ctx: Any, address: Any, x: Any) -> Any:
    """Rounds to 16 bf16 and stores them."""

    def build(b: Any, p: Any, x: Any) -> None:
        b.store(_round_to_bf16(b, x), _pointer(b, p, _v16h), align=2)

    return _emit(build, types.void, types.intp, vec16)


def _scale_by_power(b: Any, x: Any, k: Any) -> Any:
    """x · 2^k for whole-numbered k in [-126, 127]."""
    if isa.active().scalef:
        arguments = [_v16f, _v16f, _v16f, _i16, _i32]
        scale = _declare(b, "llvm.x86.avx512.mask.scalef.ps.512", _v16f, arguments)
        return b.call(scale, [x, k, _splat_const(0.0), ir.Constant(_i16, -1), _i32c(4)])
    exponent = b.add(b.fptosi(k, _v16i), ir.Constant(_v16i, [127] * LANES))
    power = b.bitcast(b.shl(exponent, ir.Constant(_v16i, [23] * LANES)), _v16f)
    return b.fmul(x, power)


# 2^f on [-1/2, 1/2] with a constant term of exactly 1: coefficients from an iteratively reweighted
# least-squares fit of the relative error, which ends at 9.1e-8 before rounding to float32.
_EXP2 = (0.0013264727, 0.009671513, 0.055507336, 0.24022242, 0.693147, 1.0)


@intrinsic
def vexp2(_ctx: Any, x: Any) -> Any:
    """2^x; below -120 (and for -inf) it is 0, above 127 it is 2^127."""

    def build(b: Any, x: Any) -> Any:
        nearest = _declare(b, "llvm.roundeven.v16f32", _v16f, [_v16f])
        lowest = _declare(b, "llvm.minnum.v16f32", _v16f, [_v16f] * 2)
        gone = b.fcmp_ordered("<", x, _splat_const(-120.0))
        x = b.call(lowest, [_vmax(b, x, _splat_const(-120.0)), _splat_const(127.0)])
        k = b.call(nearest, [x])
        f = b.fsub(x, k)
        y = _splat_const(_EXP2[0])
        for coefficient in _EXP2[1:]:
            y = _fma(b, y, f, _splat_const(coefficient))
        return b.select(gone, _splat_const(0.0), _scale_by_power(b, y, k))

    return _emit(build, vec16, vec16)


@intrinsic
def vkeep(_ctx: Any, x: Any, n: Any, other: Any) -> Any:
    """Lanes below n keep x, the rest take `other`."""

    def build(b: Any, x: Any, n: Any, other: Any) -> Any:
        lanes = ir.Constant(_v16i, list(range(LANES)))
        limit = _broadcast(b, b.trunc(n, _i32), _v16i)
        return b.select(b.icmp_signed("<", lanes, limit), x, other)

    return _emit(build, vec16, vec16, types.intp, vec16)


# --- scalars and memory ------------------------------------------------------------------------


def _scalar_access(kind: Any, result: Any) -> tuple[Any, Any]:
    @intrinsic
    def load(_ctx: Any, address: Any) -> Any:
        return _emit(lambda b, p: b.load(_pointer(b, p, kind)), result, types.intp)

    @intrinsic
    def store(_ctx: Any, address: Any, x: Any) -> Any:
        return _emit(
            lambda b, p, x: b.store(x, _pointer(b, p, kind)), types.void, types.intp, result
        )

    return load, store


load_f32, store_f32 = _scalar_access(_f32, types.float32)
load_i32, store_i32 = _scalar_access(_i32, types.int32)
load_i64, store_i64 = _scalar_access(_i64, types.int64)
load_u16, store_u16 = _scalar_access(_i16, types.uint16)


@intrinsic
def load_index(_ctx: Any, address: Any) -> Any:
    """An int32 in memory, as int64."""
    return _emit(lambda b, p: b.sext(b.load(_pointer(b, p, _i32)), _i64), types.int64, types.intp)


@intrinsic
def prefetch(_ctx: Any, address: Any) -> Any:
    """Asks for the cache line at `address` to be brought into the second-level cache."""

    def build(b: Any, p: Any) -> None:
        i8p = ir.IntType(8).as_pointer()
        fetch = _declare(b, "llvm.prefetch.p0", ir.VoidType(), [i8p, _i32, _i32, _i32])
        b.call(fetch, [_pointer(b, p, ir.IntType(8)), _i32c(0), _i32c(2), _i32c(1)])

    return _emit(build, types.void, types.intp)


# --- register tiles ----------------------------------------------------------------------------


def make_tile_zero(mr: int, nv: int) -> Any:
    """The function that gives an all-zero tile of mr rows × nv vectors."""
    tile = TileType(mr, nv)
    zeros = ir.Constant(ir.ArrayType(_v16f, mr * nv), [_splat_const(0.0)] * (mr * nv))

    @intrinsic
    def tile_zero(_ctx: Any) -> Any:
        return _emit(lambda b: zeros, tile)

    return tile_zero


def _widen_pair(b: Any, words: Any) -> tuple[Any, Any]:
    """Low and high bf16 of each 32-bit word, as two float32 vectors."""
    low = b.bitcast(b.shl(words, ir.Constant(_v16i, [16] * LANES)), _v16f)
    mask = ir.Constant(_v16i, [0xFFFF0000 - (1 << 32)] * LANES)
    return low, b.bitcast(b.and_(words, mask), _v16f)


def _dot_pair(b: Any, acc: Any, row: Any, panel: Any) -> Any:
    """acc + the two products of each lane's pair; operands as `_operand` made them."""
    if isa.active().bf16_dot:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return b.call(_declare(b, name, _v16f, [_v16f, _v32b, _v32b]), [acc, row, panel])
    # The order of the hardware instruction: the upper product first.
    return _fma(b, row[0], panel[0], _fma(b, row[1], panel[1], acc))


def _operand(b: Any, words: Any) -> Any:
    return b.bitcast(words, _v32b) if isa.active().bf16_dot else _widen_pair(b, words)


def _outer(b: Any, tile: TileType, t: Any, at: list[Any], panel: Any, vec_stride: Any) -> Any:
    """t + (the pair at each address) × (the pairs of nv column vectors)."""
    columns = []
    for j in range(tile.nv):
        column = b.add(panel, b.mul(vec_stride, _i64c(j)))
        columns.append(_operand(b, b.load(_pointer(b, column, _v16i), align=4)))
    for i in range(tile.mr):
        row = _operand(b, _broadcast(b, b.load(_pointer(b, at[i], _i32), align=2), _v16i))
        for j in range(tile.nv):
            k = i * tile.nv + j
            t = b.insert_value(t, _dot_pair(b, b.extract_value(t, k), row, columns[j]), k)
    return t


@intrinsic
def tile_outer(_ctx: Any, tile: Any, a: Any, a_stride: Any, panel: Any, vec_stride: Any) -> Any:
    """tile += (one pair of each row) × (one pair of each column).

    Row i's pair is the 32-bit word at `a + i·a_stride`; vector j of the columns' pairs starts at
    `panel + j·vec_stride` (16 words). Strides in bytes.
    """

    def build(b: Any, t: Any, a: Any, a_stride: Any, panel: Any, vec_stride: Any) -> Any:
        at = [b.add(a, b.mul(a_stride, _i64c(i))) for i in range(tile.mr)]
        return _outer(b, tile, t, at, panel, vec_stride)

    return _emit(build, tile, tile, types.intp, types.intp, types.intp, types.intp)


@intrinsic
def tile_store(_ctx: Any, tile: Any, c: Any, c_stride: Any) -> Any:
    """Writes the tile as float32: vector j of row i at `c + i·c_stride + 64·j` (bytes)."""

    def build(b: Any, t: Any, c: Any, c_stride: Any) -> None:
        for i in range(tile.mr):
            for j in range(tile.nv):
                at = b.add(b.add(c, b.mul(c_stride, _i64c(i))), _i64c(64 * j))
                b.store(b.extract_value(t, i * tile.nv + j), _pointer(b, at, _v16f), align=4)

    return _emit(build, types.void, tile, types.intp, types.intp)


class PointersType(types.Type):  # type: ignore[misc]
    """Addresses of the rows of a tile that do not lie at a constant distance."""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__(name=f"Pointers({count})")


@register_model(PointersType)
class _PointersModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: PointersType) -> None:
        super().__init__(dmm, fe_type, ir.ArrayType(_i64, fe_type.count))


def make_pointers_load(count: int) -> Any:
    """The function that reads `count` row addresses from int64 memory."""
    pointers = PointersType(count)

    @intrinsic
    def pointers_load(_ctx: Any, address: Any) -> Any:
        def build(b: Any, p: Any) -> Any:
            value: Any = ir.Constant(ir.ArrayType(_i64, count), ir.Undefined)
            for i in range(count):
                word = b.load(_pointer(b, b.add(p, _i64c(8 * i)), _i64))
                value = b.insert_value(value, word, i)
            return value

        return _emit(build, pointers, types.intp)

    return pointers_load


def make_tile_load_rows(mr: int, nv: int) -> Any:
    """The function that reads a tile whose row i starts at `rows[i] + offset`."""
    tile = TileType(mr, nv)
    pointers = PointersType(mr)

    @intrinsic
    def tile_load_rows(_ctx: Any, rows: Any, offset: Any) -> Any:
        def build(b: Any, rows: Any, offset: Any) -> Any:
            value: Any = ir.Constant(ir.ArrayType(_v16f, mr * nv), ir.Undefined)
            for i in range(mr):
                start = b.add(b.extract_value(rows, i), offset)
                for j in range(nv):
                    at = _pointer(b, b.add(start, _i64c(64 * j)), _v16f)
                    value = b.insert_value(value, b.load(at, align=4), i * nv + j)
            return value

        return _emit(build, tile, pointers, types.intp)

    return tile_load_rows


@intrinsic
def tile_store_rows(_ctx: Any, tile: Any, rows: Any, offset: Any) -> Any:
    """Writes row i of the tile to `rows[i] + offset`."""

    def build(b: Any, t: Any, rows: Any, offset: Any) -> None:
        for i in range(tile.mr):
            start = b.add(b.extract_value(rows, i), offset)
            for j in range(tile.nv):
                at = _pointer(b, b.add(start, _i64c(64 * j)), _v16f)
                b.store(b.extract_value(t, i * tile.nv + j), at, align=4)

    return _emit(build, types.void, tile, rows, types.intp)


@intrinsic
def tile_outer_rows(
    _ctx: Any, tile: Any, rows: Any, offset: Any, panel: Any, vec_stride: Any
) -> Any:
    """`tile_outer` whose row i has its pair at `rows[i] + offset`."""

    def build(b: Any, t: Any, rows: Any, offset: Any, panel: Any, vec_stride: Any) -> Any:
        at = [b.add(b.extract_value(rows, i), offset) for i in range(tile.mr)]
        return _outer(b, tile, t, at, panel, vec_stride)

    return _emit(build, tile, tile, rows, types.intp, types.intp, types.intp)
