"""Which NUMA node memory comes from: Linux system calls, without libnuma.

Containers often forbid them (EPERM unless CAP_SYS_NICE). Then there is one warning and memory comes
from where the thread that touches it first runs, which is right as long as threads are pinned
before they touch anything. A policy here is a preference: a full node means slower memory, where a
binding would mean the OOM killer.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from errno import EINVAL, ENOSYS, EPERM
from functools import cache
from typing import TypeAlias

logger = logging.getLogger(__name__)

# Number and arguments → result; raises OSError.
SystemCall: TypeAlias = Callable[..., int]

# x86-64.
_MBIND, _SET_MEMPOLICY, _GET_MEMPOLICY, _MOVE_PAGES = 237, 238, 239, 279
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_MPOL_MF_MOVE = 2
_MAX_NODES = 1024
# EINVAL: the node is outside the control group's cpuset.mems, or offline.
_REFUSALS = (EPERM, ENOSYS, EINVAL)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def linux_call(number: int, *arguments: object) -> int:
    """One system call of this thread."""
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def prefer_node(node: int | None, *, call: SystemCall = linux_call) -> bool:
    """New pages of the calling thread, and of threads it starts, come from `node`.

    None goes back to the node the thread runs on. False if the kernel refused (first touch then
    decides).
    """
    if node is None:
        arguments: Sequence[object] = (ctypes.c_int(_MPOL_DEFAULT), None, ctypes.c_ulong(0))
    else:
        arguments = (ctypes.c_int(_MPOL_PREFERRED), _mask(node), _mask_bits())
    return _attempt(call, "set_mempolicy", _SET_MEMPOLICY, arguments)


def bind_memory(address: int, length: int, node: int, *, call: SystemCall = linux_call) -> bool:
    """Pages of a range come from `node`, and those that exist move there.

    The policy of a `Segment` holds for every process that maps it. False if the kernel refused
    (first touch then decides).
    """
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    arguments = (
        ctypes.c_void_p(begin),
        ctypes.c_ulong(address + length - begin),
        ctypes.c_int(_MPOL_PREFERRED),
        _mask(node),
        _mask_bits(),
        ctypes.c_uint(_MPOL_MF_MOVE),
    )
    return _attempt(call, "mbind", _MBIND, arguments)


def preferred_node(*, call: SystemCall = linux_call) -> int | None:
    """What `prefer_node` set for the calling thread; None if nothing is set or known."""
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * (_MAX_NODES // 64))()
    arguments = (ctypes.byref(mode), mask, ctypes.c_ulong(_MAX_NODES), None, ctypes.c_ulong(0))
    if not _attempt(call, "get_mempolicy", _GET_MEMPOLICY, arguments):
        return None
    nodes = [node for node in range(_MAX_NODES) if mask[node // 64] >> node % 64 & 1]
    return nodes[0] if mode.value == _MPOL_PREFERRED and nodes else None


def pages_on_node(
    address: int, length: int, node: int, samples: int = 256, *, call: SystemCall = linux_call
) -> float | None:
    """The share of a range's pages that lie on `node`, from evenly spread samples.

    Counts pages that this process has touched; None where there are none, or the kernel does not
    tell.
    """
    first = address // mmap.PAGESIZE
    num_pages = -(-(address + length) // mmap.PAGESIZE) - first
    count = min(samples, num_pages)
    if count <= 0:
        return None
    chosen = [(first + index * num_pages // count) * mmap.PAGESIZE for index in range(count)]
    status = (ctypes.c_int * count)(*[-1] * count)
    arguments = (
        ctypes.c_int(0),  # this process
        ctypes.c_ulong(count),
        (ctypes.c_void_p * count)(*chosen),
        None,  # no target nodes: a query
        status,
        ctypes.c_int(0),
    )
    if not _attempt(call, "move_pages", _MOVE_PAGES, arguments):
        return None
    known = [found for found in status if found >= 0]
    return known.count(node) / len(known) if known else None


def _mask(node: int) -> ctypes.Array[ctypes.c_ulong]:
    assert 0 <= node < _MAX_NODES
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    return mask


def _mask_bits() -> ctypes.c_ulong:
    return ctypes.c_ulong(_MAX_NODES + 1)  # the kernel reads one bit less than it is told


def _attempt(call: SystemCall, name: str, number: int, arguments: Sequence[object]) -> bool:
    try:
        call(number, *arguments)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        _warn_once(name, error.errno)
        return False
    return True


@cache
def _warn_once(name: str, code: int) -> None:
    remedy = "the node is outside cpuset.mems" if code == EINVAL else "CAP_SYS_NICE would allow it"
    logger.warning(
        "%s is refused (%s; %s): memory comes from where it is touched first",
        name,
        os.strerror(code),
        remedy,
    )
