"""Atomic operations on 64-bit integers in memory, and the pause of a spin loop.

Ordering: a load acquires, a store releases, an addition does both. So what a thread wrote before
its addition is seen by whoever reads the sum afterwards.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ellm_kernels.jit import intrinsic

_i64 = ir.IntType(64)


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _i64.as_pointer())


@intrinsic
def atomic_add(_ctx: Any, address: Any, amount: Any) -> Any:
    """Adds to the int64 at `address`; returns its value before."""

    def codegen(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", _word(b, args[0]), args[1], "acq_rel")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def atomic_load(_ctx: Any, address: Any) -> Any:
    """The int64 at `address`."""

    def codegen(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.load_atomic(_word(b, args[0]), "acquire", 8)

    return types.int64(types.intp), codegen


@intrinsic
def atomic_store(_ctx: Any, address: Any, value: Any) -> Any:
    """Sets the int64 at `address`."""

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        b.store_atomic(args[1], _word(b, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), codegen


@intrinsic
def cpu_pause(_ctx: Any) -> Any:
    """Tells the core that this is a spin loop."""

    def codegen(context: Any, b: Any, _signature: Any, _args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen
