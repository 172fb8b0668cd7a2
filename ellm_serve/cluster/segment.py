"""Named shared memory: a file in /dev/shm that several processes map, with `Region`'s interface.

A process that dies takes nothing along, so weights and KV outlive a worker. Memory is committed
before it is used: running out is an error then, and never a SIGBUS later. Pages land where the
policy of the range (`numa.bind_memory`) or of the committing thread puts them. Who may remove a
file is `claims`' business.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import stat
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from errno import ENOMEM, ENOSPC
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ellm_serve.closing import Closing
from ellm_serve.cluster.memory import Memory
from ellm_serve.errors import ConfigError, StartupError
from ellm_serve.model.region import HUGE_PAGE, round_up

SHM = Path("/dev/shm")
NAME = re.compile(r"ellm-(?P<group>[A-Za-z0-9_]{1,64})-(?P<part>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})")

# (descriptor, offset, length); raises OSError.
Fallocate: TypeAlias = Callable[[int, int, int], None]

_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25  # Linux 6.1
_KEEP_SIZE_PUNCH_HOLE = 0x03

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def segment_name(group_id: str, part: str) -> str:
    """`ellm-<group id>-<part>`: the file name of one segment of a group."""
    name = f"ellm-{group_id}-{part}"
    _check_name(name)
    return name


class Segment(Closing):
    """A mapped shared-memory file, aligned to huge pages; zeros until written.

    The creator or the group's claim removes the name; `close` (or leaving `with`) only unmaps, and
    not before the last view is gone.
    """

    def __init__(self, path: Path, descriptor: int, size_bytes: int, fallocate: Fallocate) -> None:
        """Takes over the descriptor. Use `create` or `attach`."""
        self.path = path
        self.name = path.name
        self.size_bytes = size_bytes
        self._descriptor = descriptor
        self._fallocate = fallocate
        self._release = weakref.finalize(self, os.close, descriptor)
        # An anonymous map reserves the addresses, and the file is mapped over its aligned part: so
        # the views' base, which unmaps everything when it goes, is Python's own object.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map: mmap.mmap | None = mmap.mmap(-1, size_bytes + HUGE_PAGE, flags=flags)
        raw = np.frombuffer(self._map, np.uint8).ctypes.data
        self.address = round_up(raw, HUGE_PAGE)
        self._shift = self.address - raw
        _map_over(self.address, size_bytes, descriptor)
        # Serves a tmpfs mounted with huge=advise; elsewhere `commit` collapses.
        _libc.madvise(self.address, size_bytes, mmap.MADV_HUGEPAGE)

    @classmethod
    def create(
        cls,
        name: str,
        size: int,
        *,
        committed: bool,
        directory: Path = SHM,
        fallocate: Fallocate = os.posix_fallocate,
    ) -> Self:
        """Makes a new file, rounded up to huge pages; nothing is left behind when this fails.

        `committed` takes all of its memory now, on behalf of the calling thread; otherwise the file
        is sparse and may be larger than the machine's memory.

        Raises:
            MemoryError: there is not enough.
            OSError: the name exists, or the directory refuses.
        """
        _check_name(name)
        path = directory / name
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            segment = cls._sized(path, descriptor, round_up(max(size, 1), HUGE_PAGE), fallocate)
            if committed:
                segment._commit_or_close()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return segment

    @classmethod
    def attach(
        cls, name: str, *, directory: Path = SHM, fallocate: Fallocate = os.posix_fallocate
    ) -> Self:
        """Maps an existing file of this user.

        Raises:
            OSError: it does not exist or cannot be opened.
            StartupError: it is not a segment.
        """
        _check_name(name)
        path = directory / name
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        status = os.fstat(descriptor)
        usable = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not usable or status.st_size == 0 or status.st_size % HUGE_PAGE:
            os.close(descriptor)
            raise StartupError(f"{path} is not a segment of this user; remove it")
        return cls(path, descriptor, status.st_size, fallocate)

    @classmethod
    def _sized(cls, path: Path, descriptor: int, size_bytes: int, fallocate: Fallocate) -> Self:
        try:
            os.ftruncate(descriptor, size_bytes)
        except OSError:
            os.close(descriptor)
            raise
        return cls(path, descriptor, size_bytes, fallocate)

    def _commit_or_close(self) -> None:
        try:
            self.commit(0, self.size_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def committed_bytes(self) -> int:
        """Memory that the file holds now."""
        return os.fstat(self._descriptor).st_blocks * 512

    @property
    def huge_bytes(self) -> int:
        """How much of it this process sees through 2 MiB pages."""
        return sum(_mapped_huge(self.address, self.address + self.size_bytes))

    def commit(self, offset: int, length: int) -> None:
        """Takes memory for a range now, in huge pages where the kernel can.

        Neither this nor `discard` holds the GIL. What was committed before keeps its contents; a
        refusal keeps nothing of what was not.

        Raises:
            MemoryError: there is not enough.
        """
        assert offset >= 0 and offset + length <= self.size_bytes
        holes = list(self._holes(offset, offset + length))
        if not holes:
            return
        try:
            self._refuse_too_much(sum(end - begin for begin, end in holes))
            self._collapse(offset, offset + length)
            self._fallocate(self._descriptor, offset, length)
        except OSError as error:
            for begin, end in holes:
                self.discard(begin, end - begin)
            raise MemoryError(
                f"cannot commit {length} bytes of {self.path}: {error.strerror}"
            ) from error
        # Not required for safety: maps what is still in small pages, as first use would.
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(self.address + begin, offset + length - begin, _MADV_POPULATE_WRITE)

    def discard(self, offset: int, length: int) -> None:
        """Gives a range back; it reads as zeros afterwards, in every process."""
        assert offset >= 0 and offset + length <= self.size_bytes
        if length and _libc.fallocate(self._descriptor, _KEEP_SIZE_PUNCH_HOLE, offset, length):
            raise _last_error(self.path)

    def array(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A view; the mapping lives as long as the segment is open or any view of it lives."""
        assert self._map is not None, "closed"
        count = int(np.prod(shape))
        # The reservation is longer than the segment.
        assert offset >= 0 and offset + count * np.dtype(dtype).itemsize <= self.size_bytes
        view: NDArray[Any] = np.frombuffer(self._map, dtype, count, self._shift + offset).reshape(
            shape
        )
        return view

    def close(self) -> None:
        """Unmaps, once no view is left; the file stays."""
        self._map = None
        self._release()

    def unlink(self) -> None:
        """Removes the name; the memory goes with the last mapping."""
        self.path.unlink(missing_ok=True)

    def _holes(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of a range that hold no memory yet."""
        while begin < end:
            try:
                data = min(os.lseek(self._descriptor, begin, os.SEEK_DATA), end)
            except OSError:  # ENXIO: nothing but a hole up to the end of the file
                data = end
            if begin < data:
                yield begin, data
            begin = data if data == end else os.lseek(self._descriptor, data, os.SEEK_HOLE)

    def _refuse_too_much(self, missing_bytes: int) -> None:
        """Before taking anything: other processes need the space while we try.

        A tmpfs may be as large as the machine's memory, and filling that wakes the OOM killer.
        """
        space = os.fstatvfs(self._descriptor)
        if missing_bytes > space.f_bavail * space.f_frsize:
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        if missing_bytes > Memory.read().available_bytes:
            raise OSError(ENOMEM, os.strerror(ENOMEM))

    def _collapse(self, begin: int, end: int) -> None:
        """Makes huge pages of the whole ones in a range, as far as the kernel does that.

        One small page in each is enough for the kernel to zero a huge one around it: 96 MiB in
        14 ms. Collapsing a range that is all small pages copies them: 60 to 300 ms.
        """
        begin, end = round_up(begin, HUGE_PAGE), end // HUGE_PAGE * HUGE_PAGE
        for offset in range(begin, end, HUGE_PAGE):
            self._fallocate(self._descriptor, offset, mmap.PAGESIZE)
        if begin < end:
            _libc.madvise(self.address + begin, end - begin, _MADV_COLLAPSE)


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a segment name: ellm-<group>-<part>, where a group has letters,"
            " digits and _ (at most 64) and a part also . and - (at most 128)"
        )


def _map_over(address: int, size: int, descriptor: int) -> None:
    """Maps the file over addresses that are reserved."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(address, size, protection, flags, descriptor, 0) != address:
        raise _last_error("mmap")


def _last_error(what: object) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), str(what))


def _mapped_huge(begin: int, end: int) -> Iterator[int]:
    """Bytes in huge pages of each mapping between two addresses of this process."""
    inside = False
    with suppress(OSError), open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            first, _, rest = line.partition(" ")
            if not first.endswith(":"):  # 7f0c00000000-7f0c06000000 rw-s 00000000 …
                low, _, high = first.partition("-")
                inside = int(low, 16) < end and int(high, 16) > begin
            elif inside and first in ("ShmemPmdMapped:", "FilePmdMapped:"):
                yield int(rest.split()[0]) << 10
