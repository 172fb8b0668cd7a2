"""Sockets, NUMA nodes, cores and caches of this machine, and which of them the process may use.

A compute thread takes one physical core, so the thread count is the number of physical cores that
affinity, cpuset and CPU quota leave: never that of visible or logical CPUs, because one thread that
is throttled stalls all the others at the next barrier.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ellm_serve.cluster.cgroup import Cgroup, read_text

_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"
_HUGE = "sys/kernel/mm/transparent_hugepage"


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: its logical CPUs, and where it sits."""

    cpus: tuple[int, ...]
    socket: int
    node: int


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node; `cpus` is empty for one that has memory only."""

    index: int
    cpus: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Cache:
    """A data or unified cache as CPU 0 sees it."""

    level: int
    size_bytes: int
    num_cpus: int


@dataclass(frozen=True, slots=True)
class HugePages:
    """The chosen word of each setting (`always`, `madvise`, `never` …), "" where unknown."""

    anonymous: str
    shared: str


@dataclass(frozen=True)
class Machine:
    """Everything that sysfs tells, and the limits of this process.

    `allowed_cpus` are logical CPUs after affinity and cpuset. `quota` is in CPUs, None without one.
    """

    cpu_model: str
    cores: tuple[Core, ...]
    nodes: tuple[Node, ...]
    caches: tuple[Cache, ...]
    huge_pages: HugePages
    allowed_cpus: frozenset[int]
    quota: float | None

    @classmethod
    def discover(cls, root: Path = Path("/"), affinity: Iterable[int] | None = None) -> Machine:
        """Reads `root`/sys and `root`/proc; `affinity` defaults to the calling thread's."""
        online = parse_cpu_list(read_text(root / _CPUS / "online") or "")
        bound = frozenset(os.sched_getaffinity(0) if affinity is None else affinity)
        nodes = _nodes(root, online or tuple(sorted(bound)))
        return cls(
            cpu_model=cpu_model(root),
            cores=_cores(root, online or tuple(sorted(bound)), nodes),
            nodes=nodes,
            caches=_caches(root),
            huge_pages=HugePages(_chosen(root, "enabled"), _chosen(root, "shmem_enabled")),
            allowed_cpus=bound & (_cpuset(root) or bound),
            quota=_quota(root),
        )

    @property
    def num_sockets(self) -> int:
        return len({core.socket for core in self.cores})

    @property
    def has_smt(self) -> bool:
        """Whether some core runs several threads."""
        return any(len(core.cpus) > 1 for core in self.cores)

    @cached_property
    def open_cores(self) -> tuple[Core, ...]:
        """Physical cores of which at least one logical CPU is allowed, whatever the quota."""
        return tuple(core for core in self.cores if self.allowed_cpus & set(core.cpus))

    @cached_property
    def allowed_cores(self) -> tuple[int, ...]:
        """One logical CPU for every compute thread.

        A quota is rounded down (at least 1) and spent on as few NUMA nodes as possible.
        """
        per_node = Counter(core.node for core in self.open_cores)
        ordered = sorted(self.open_cores, key=lambda core: (-per_node[core.node], core.node))
        count = len(ordered) if self.quota is None else max(1, int(self.quota))
        return tuple(sorted(min(self.allowed_cpus & set(core.cpus)) for core in ordered[:count]))


def allowed_cores() -> tuple[int, ...]:
    """The cores that compute threads of this process are pinned to."""
    return Machine.discover().allowed_cores


def cpu_model(root: Path = Path("/")) -> str:
    """The CPU's own name."""
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "unknown CPU"


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """`0-2,5` → (0, 1, 2, 5)"""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def _nodes(root: Path, online: tuple[int, ...]) -> tuple[Node, ...]:
    directories = sorted(
        (root / _NODES).glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))
    )
    nodes = tuple(
        Node(
            int(directory.name.removeprefix("node")),
            parse_cpu_list(read_text(directory / "cpulist") or ""),
            _node_memory(directory),
        )
        for directory in directories
    )
    return nodes or (Node(0, online, 0),)


def _node_memory(directory: Path) -> int:
    for line in (read_text(directory / "meminfo") or "").splitlines():
        words = line.split()  # Node 0 MemTotal: 1024 kB
        if "MemTotal:" in words:
            return int(words[-2]) << 10
    return 0


def _cores(root: Path, online: tuple[int, ...], nodes: tuple[Node, ...]) -> tuple[Core, ...]:
    node_of = {cpu: node.index for node in nodes for cpu in node.cpus}
    found: dict[tuple[int, ...], Core] = {}
    for cpu in online:
        topology = root / _CPUS / f"cpu{cpu}/topology"
        siblings = parse_cpu_list(
            read_text(topology / "core_cpus_list")
            or read_text(topology / "thread_siblings_list")
            or str(cpu)
        )
        if siblings not in found:
            socket = int(read_text(topology / "physical_package_id") or 0)
            # Some virtual machines say -1 for "unknown".
            found[siblings] = Core(siblings, max(socket, 0), node_of.get(cpu, 0))
    return tuple(found.values())


def _caches(root: Path) -> tuple[Cache, ...]:
    caches = []
    for directory in sorted((root / _CPUS / "cpu0/cache").glob("index[0-9]*")):
        size = read_text(directory / "size")
        if size and read_text(directory / "type") in ("Data", "Unified"):
            shared = parse_cpu_list(read_text(directory / "shared_cpu_list") or "0")
            level = int(read_text(directory / "level") or 0)
            caches.append(Cache(level, _size_bytes(size), len(shared)))
    return tuple(sorted(caches, key=lambda cache: cache.level))


def _size_bytes(text: str) -> int:
    """`48K` → 49152"""
    shift = {"K": 10, "M": 20, "G": 30}.get(text[-1], 0)
    return int(text.rstrip("KMG")) << shift


def _chosen(root: Path, name: str) -> str:
    """`always [madvise] never` → madvise"""
    text = read_text(root / _HUGE / name) or ""
    return text.partition("[")[2].partition("]")[0]


def _cpuset(root: Path) -> frozenset[int]:
    """CPUs the control group allows; empty where it says nothing."""
    cgroup = Cgroup.find("cpuset", root)
    if cgroup is None:
        return frozenset()
    effective = "cpuset.cpus.effective" if cgroup.version == 2 else "cpuset.effective_cpus"
    for name in (effective, "cpuset.cpus"):
        # The nearest level is the tightest; an empty file inherits.
        for _, text in cgroup.values(name):
            if text:
                return frozenset(parse_cpu_list(text))
    return frozenset()


def _quota(root: Path) -> float | None:
    """CPU time per time of the tightest level, in CPUs."""
    cgroup = Cgroup.find("cpu", root)
    if cgroup is None:
        return None
    quotas = []
    if cgroup.version == 2:
        pairs = [text.split() for _, text in cgroup.values("cpu.max")]
    else:
        pairs = [
            [text, read_text(directory / "cpu.cfs_period_us") or "100000"]
            for directory, text in cgroup.values("cpu.cfs_quota_us")
        ]
    for quota, period in pairs:
        if quota != "max" and int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)
