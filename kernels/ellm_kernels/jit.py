"""The one door to Numba.

`@kernel` marks a function that other kernels call; it is compiled as part of its callers.
`@entry(signature)` marks a function that Python calls; only entries are cached on disk, each with
everything it calls linked in.

Numba's own cache does not notice an edit in a callee that lives in another file, so the cache
directory's name carries a hash of all kernel sources, the versions of Numba, llvmlite and Python,
the CPU and the variant. Concurrent writers corrupt it, so `compile_all` holds a file lock while it
compiles and everybody else waits; an entry that cannot be loaded is thrown away and rebuilt.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError  # the exception alone: numba's cache files are pickles
from typing import Any

import llvmlite
import numba
import numba.extending

from ellm_kernels import isa

# No fast-math flag at all: reassociation or contraction may come out differently where one kernel
# is inlined twice, and equal inputs must give equal bits whatever the path. Speed comes from the
# explicit vector operations of `simd`, which name every fused multiply-add.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}

_entries: list[tuple[Any, str]] = []
# What `compile_all` has done in this process.
_ready: set[Any] = set()


def kernel(function: Callable[..., Any]) -> Any:
    """A function called by other kernels. No signature, no cache: callers link it in."""
    isa.active()
    return numba.njit(**_OPTIONS)(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function whose body is LLVM code; kernels call it without its first parameter."""
    return numba.extending.intrinsic(function)


def _add_noinline(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
    builder.function.attributes.add("noinline")
    return context.get_dummy_value()


@intrinsic
def outlined(_context: Any) -> Any:
    """Called in a kernel, keeps LLVM from copying that kernel into its callers.

    For the large ones: the micro-kernels are called from a dozen places, and compiling a copy of
    their unrolled bodies at each of them took most of the time.
    """
    return numba.types.void(), _add_noinline


def entry(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """A function called from Python with exactly this signature, cached on disk."""

    def decorate(function: Callable[..., Any]) -> Any:
        isa.active()
        numba.config.CACHE_DIR = str(cache_dir())
        dispatcher = numba.njit(cache=True, **_OPTIONS)(function)
        _entries.append((dispatcher, signature))
        return dispatcher

    return decorate


@functools.cache
def source_hash() -> str:
    """Sixteen hex digits that change when any kernel could compile to something else."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    chosen = isa.active()
    for part in (
        numba.__version__,
        llvmlite.__version__,
        sys.version,
        isa.host_cpu_name(),
        ",".join(sorted(isa.host_flags())),
        chosen.name,
    ):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def cache_dir() -> Path:
    """Where compiled entries of this source, CPU and variant live; made if it can be.

    `ELLM_CACHE_DIR` or else the user's cache directory; a temporary directory if that is
    read-only.
    """
    root = os.environ.get("ELLM_CACHE_DIR")
    base = Path(root) if root else _user_cache() / "ellm-serve"
    path = base / f"kernels-{isa.active().name}-{source_hash()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="ellm-kernels-"))
        atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _user_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home) if home else Path.home() / ".cache"


@dataclass(frozen=True)
class CompileReport:
    """What `compile_all` did."""

    hits: int
    misses: int
    rebuilt: int
    seconds: float
    directory: Path

    def __str__(self) -> str:
        rebuilt = f", {self.rebuilt} corrupt rebuilt" if self.rebuilt else ""
        return (
            f"kernels: {self.hits} from cache, {self.misses} compiled{rebuilt}"
            f" in {self.seconds:.1f} s ({self.directory})"
        )


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with open(directory / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def compile_all() -> CompileReport:
    """Loads or compiles every entry. One process compiles, the others wait and then load."""
    start = time.perf_counter()
    directory = cache_dir()
    rebuilt = 0
    with _locked(directory):
        for dispatcher, signature in _entries:
            if dispatcher not in _ready:
                rebuilt += _load_or_compile(dispatcher, signature, directory)
                _ready.add(dispatcher)
    # From here on an argument of another type is an error and not a compilation in mid-request.
    for dispatcher, _ in _entries:
        dispatcher.disable_compile()
    hits = sum(sum(d.stats.cache_hits.values()) for d, _ in _entries)
    misses = sum(sum(d.stats.cache_misses.values()) for d, _ in _entries)
    return CompileReport(hits, misses, rebuilt, time.perf_counter() - start, directory)


# A truncated or half-written index or object file: numba raises whatever unpickling it hit.
_UNREADABLE = (
    EOFError, OSError, ValueError, LookupError, RuntimeError, AttributeError, TypeError,
    ImportError, UnpicklingError,
)  # fmt: skip


def _load_or_compile(dispatcher: Any, signature: str, directory: Path) -> int:
    """Compiles one entry; returns 1 if a corrupt cache had to be cleared first."""
    try:
        dispatcher.compile(signature)
    except _UNREADABLE:
        for path in directory.glob("**/*.nb[ci]"):
            path.unlink(missing_ok=True)
        dispatcher.compile(signature)
        return 1
    return 0
