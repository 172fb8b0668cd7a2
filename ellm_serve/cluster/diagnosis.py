"""What may keep this machine from serving, or from serving well, and the remedy for each.

A pure function of facts: `diagnose` reads nothing, so every finding can be tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from ellm_serve.cluster.memory import Memory
from ellm_serve.cluster.topology import Machine

_MIN_KERNEL = (5, 14)
# tmpfs could not be collapsed into huge pages before.
_COLLAPSE_KERNEL = (6, 1)
_SMALL_SHM_BYTES = 1 << 30
_SMALL_MEMORY_BYTES = 2 << 30


class Level(Enum):
    """How bad a finding is."""

    NOTE = "note"
    PROBLEM = "problem"  # cannot serve


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be, and what to do about it."""

    level: Level
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What `diagnose` judges. `flags` are the CPU's under the names of `isa.REPORTED_FLAGS`."""

    machine: Machine
    memory: Memory
    architecture: str
    kernel_version: tuple[int, int]
    shm_bytes: int
    flags: dict[str, bool]
    variant: str
    forced_variant: str | None
    cache_directory: str
    cache_is_temporary: bool
    num_cached: int


def diagnose(facts: Facts) -> list[Finding]:
    """All findings, problems first."""
    found = [*_platform(facts), *_isa(facts), *_cores(facts), *_pages(facts), *_cache(facts)]
    return sorted(found, key=lambda finding: finding.level is not Level.PROBLEM)


def _note(text: str, remedy: str) -> Finding:
    return Finding(Level.NOTE, text, remedy)


def _platform(facts: Facts) -> Iterator[Finding]:
    if facts.architecture != "x86_64":
        yield Finding(Level.PROBLEM, f"the CPU is {facts.architecture}", "use an x86-64 machine")
    if facts.kernel_version < _MIN_KERNEL:
        major, minor = facts.kernel_version
        yield Finding(
            Level.PROBLEM,
            f"Linux {major}.{minor} cannot commit memory on demand",
            "use Linux 5.14 or newer",
        )
    if facts.memory.available_bytes < _SMALL_MEMORY_BYTES:
        yield _note(
            f"only {facts.memory.available_bytes >> 20} MiB of memory are available",
            "stop other programs or raise the container's memory limit",
        )
    if facts.shm_bytes < _SMALL_SHM_BYTES:
        yield _note(
            f"/dev/shm holds only {facts.shm_bytes >> 20} MiB",
            "enlarge it for engines of several processes: docker run --shm-size=…, or an emptyDir"
            " of medium Memory",
        )


def _isa(facts: Facts) -> Iterator[Finding]:
    if facts.forced_variant:
        yield _note(
            f"the kernel variant is forced by ELLM_ISA={facts.forced_variant}",
            "unset ELLM_ISA to use the best one",
        )
    elif not facts.flags["avx512f"]:
        yield _note(
            f"the CPU lacks avx512f, so the slower {facts.variant} kernels are used",
            "use a CPU with AVX-512 (Zen 4, Skylake-SP or newer)",
        )
    elif not facts.flags["avx512_bf16"]:
        yield _note(
            "the CPU lacks avx512_bf16, so prefill takes about twice the time",
            "use a CPU with bf16 products (Zen 4, Cooper Lake, Sapphire Rapids or newer)",
        )


def _cores(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    usable, open_cores = len(machine.allowed_cores), len(machine.open_cores)
    if usable == 0:
        yield Finding(
            Level.PROBLEM, "affinity and cpuset leave no core", "widen the container's cpuset"
        )
    if machine.quota is not None and usable < open_cores:
        yield _note(
            f"a CPU limit of {machine.quota:g} leaves {usable} of {open_cores} cores",
            "raise the limit, or use a cpuset, which does not throttle",
        )
    if machine.quota is not None and 0 < usable > machine.quota:
        yield _note(
            f"a CPU limit of {machine.quota:g} is less than one core, so steps are throttled",
            "raise the limit to whole cores",
        )
    if open_cores < len(machine.cores):
        yield _note(
            f"affinity or cpuset leaves {open_cores} of {len(machine.cores)} cores",
            "intended if instances share the machine; otherwise widen the cpuset",
        )
    used = {core.node for core in machine.cores if set(core.cpus) & set(machine.allowed_cores)}
    if len(used) > 1:
        yield _note(
            f"the cores lie on NUMA nodes {', '.join(map(str, sorted(used)))}, and memory of"
            " another node is slow",
            "run one instance per node: numactl --cpunodebind=N --membind=N",
        )


def _pages(facts: Facts) -> Iterator[Finding]:
    pages = facts.machine.huge_pages
    if pages.anonymous not in ("always", "madvise"):
        yield _note(
            "transparent huge pages are off, so reading memory is about a third slower",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if pages.shared in ("never", "deny", "") and facts.kernel_version < _COLLAPSE_KERNEL:
        yield _note(
            "shared memory gets no huge pages on this kernel",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, or use Linux 6.1",
        )


def _cache(facts: Facts) -> Iterator[Finding]:
    if facts.cache_is_temporary:
        yield _note(
            "the kernel cache cannot be written, so every start compiles anew (about a minute)",
            "set ELLM_CACHE_DIR to a writable directory",
        )
    elif facts.num_cached == 0:
        yield _note(
            "the kernel cache is empty, so the first start compiles (about a minute)",
            "run ellm-serve warmup",
        )
