"""Atomic words, the spin hint, the cycle counter and the futex, straight from LLVM and the kernel.

Words are 64 bits and naturally aligned. Loads acquire, stores release, additions do both.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_i64 = ir.IntType(64)
_SYS_SCHED_YIELD = 24
_SYS_FUTEX = 202
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1


def _word(b: Any, address: Any) -> Any:
    return b.inttoptr(address, _i64.as_pointer())


@intrinsic
def atomic_add(_ctx: Any, address: Any, value: Any) -> Any:
    """Adds to the word and returns what it was before."""

    def codegen(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        return b.atomic_rmw("add", _word(b, args[0]), args[1], "acq_rel")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def atomic_load(_ctx: Any, address: Any) -> Any:
    """The word, with everything its writer wrote before it."""

    def codegen(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        return b.load_atomic(_word(b, args[0]), "acquire", 8)

    return types.int64(types.intp), codegen


@intrinsic
def atomic_store(_ctx: Any, address: Any, value: Any) -> Any:
    """Sets the word and publishes everything written before it."""

    def codegen(c: Any, b: Any, _s: Any, args: Any) -> Any:
        b.store_atomic(args[1], _word(b, args[0]), "release", 8)
        return c.get_dummy_value()

    return types.void(types.intp, types.int64), codegen


@intrinsic
def cpu_pause(_ctx: Any) -> Any:
    """Tells the core that this is a spin loop."""

    def codegen(c: Any, b: Any, _s: Any, _args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        return c.get_dummy_value()

    return types.void(), codegen


@intrinsic
def cycles(_ctx: Any) -> Any:
    """The time-stamp counter; it ticks at a constant rate on every CPU we run on."""

    def codegen(_c: Any, b: Any, _s: Any, _args: Any) -> Any:
        kind = ir.FunctionType(_i64, [])
        name = "llvm.readcyclecounter"
        return b.call(cgutils.get_or_insert_function(b.module, kind, name), [])

    return types.int64(), codegen


def _syscall(b: Any, *arguments: Any) -> Any:
    """libc's `syscall`, a symbol every process on Linux has."""
    kind = ir.FunctionType(_i64, [_i64], var_arg=True)
    return b.call(cgutils.get_or_insert_function(b.module, kind, "syscall"), list(arguments))


def _const(value: int) -> ir.Constant:
    return ir.Constant(_i64, value)


@intrinsic
def futex_wait(_ctx: Any, address: Any, expected: Any, timespec: Any) -> Any:
    """Sleeps while the low 32 bits at `address` equal `expected`; `timespec`: address of the limit
    (two int64: seconds, nanoseconds). Wakes early at will; the caller looks again."""

    def codegen(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        return _syscall(b, _const(_SYS_FUTEX), args[0], _const(_FUTEX_WAIT), args[1], args[2],
                        _const(0), _const(0))  # fmt: skip

    return types.int64(types.intp, types.int64, types.intp), codegen


@intrinsic
def futex_wake(_ctx: Any, address: Any) -> Any:
    """Wakes everybody who sleeps on the word."""

    def codegen(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        return _syscall(b, _const(_SYS_FUTEX), args[0], _const(_FUTEX_WAKE), _const(0x7FFFFFFF),
                        _const(0), _const(0), _const(0))  # fmt: skip

    return types.int64(types.intp), codegen


@intrinsic
def sched_yield(_ctx: Any) -> Any:
    """Lets another thread of this core run."""

    def codegen(_c: Any, b: Any, _s: Any, _args: Any) -> Any:
        return _syscall(b, _const(_SYS_SCHED_YIELD))

    return types.int64(), codegen
