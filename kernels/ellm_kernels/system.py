"""The cycle counter and the two system calls a pinned thread makes: futex and sched_yield."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ellm_kernels.jit import intrinsic

_i64 = ir.IntType(64)
_SYS_SCHED_YIELD = 24
_SYS_FUTEX = 202
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYBODY = 0x7FFFFFFF


@intrinsic
def cycles(_ctx: Any) -> Any:
    """The time-stamp counter; it ticks at a constant rate on every CPU we run on."""

    def codegen(_c: Any, b: Any, _s: Any, _args: Any) -> Any:
        kind = ir.FunctionType(_i64, [])
        return b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.readcyclecounter"), [])

    return types.int64(), codegen


def _syscall(b: Any, *arguments: Any) -> Any:
    """libc's `syscall`, a symbol every Linux process has; always with all seven words."""
    words = [ir.Constant(_i64, a) if isinstance(a, int) else a for a in arguments]
    words += [ir.Constant(_i64, 0)] * (7 - len(words))
    kind = ir.FunctionType(_i64, [_i64], var_arg=True)
    return b.call(cgutils.get_or_insert_function(b.module, kind, "syscall"), words)


@intrinsic
def futex_wait(_ctx: Any, address: Any, expected: Any, timespec: Any) -> Any:
    """Sleeps while the low 32 bits at `address` equal `expected`, or until the time limit.

    timespec: address of two int64, seconds and nanoseconds. Also wakes for no reason: look again.
    """

    def codegen(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        return _syscall(b, _SYS_FUTEX, args[0], _FUTEX_WAIT, args[1], args[2])

    return types.int64(types.intp, types.int64, types.intp), codegen


@intrinsic
def futex_wake(_ctx: Any, address: Any) -> Any:
    """Wakes everybody who sleeps on the word."""

    def codegen(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        return _syscall(b, _SYS_FUTEX, args[0], _FUTEX_WAKE, _EVERYBODY)

    return types.int64(types.intp), codegen


@intrinsic
def sched_yield(_ctx: Any) -> Any:
    """Lets another thread of this core run."""

    def codegen(_c: Any, b: Any, _s: Any, _args: Any) -> Any:
        return _syscall(b, _SYS_SCHED_YIELD)

    return types.int64(), codegen
