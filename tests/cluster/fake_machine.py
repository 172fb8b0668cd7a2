"""Writes the files of /proc and /sys that describe a machine, below a directory of a test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

THREADS = "sys/devices/system/cpu"
NODES = "sys/devices/system/node"


def write(root: Path, files: Mapping[str, str]) -> Path:
    """Writes text files by their path below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def cpus(
    siblings: list[tuple[int, ...]], sockets: Mapping[int, int] | None = None
) -> dict[str, str]:
    """One physical core per tuple of logical CPUs; `sockets` maps a logical CPU to its package."""
    files: dict[str, str] = {}
    every = sorted(cpu for core in siblings for cpu in core)
    files[f"{THREADS}/online"] = ",".join(map(str, every))
    for core in siblings:
        for cpu in core:
            topology = f"{THREADS}/cpu{cpu}/topology"
            files[f"{topology}/core_cpus_list"] = ",".join(map(str, core))
            files[f"{topology}/physical_package_id"] = str((sockets or {}).get(cpu, 0))
    return files


def nodes(lists: Mapping[int, str], memory_kb: int = 1024) -> dict[str, str]:
    """NUMA nodes by their CPU lists."""
    files: dict[str, str] = {}
    for node, cpu_list in lists.items():
        files[f"{NODES}/node{node}/cpulist"] = cpu_list
        files[f"{NODES}/node{node}/meminfo"] = f"Node {node} MemTotal: {memory_kb} kB"
    return files


def cgroup_v2(path: str = "/", mount_root: str = "/") -> dict[str, str]:
    """A unified hierarchy mounted where systemd mounts it."""
    return {
        "proc/self/cgroup": f"0::{path}",
        "proc/self/mountinfo": (
            f"30 23 0:26 {mount_root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
        ),
    }


def cgroup_v1(controller: str, path: str, mount_root: str = "/") -> dict[str, str]:
    """One controller of the old kind; the unified hierarchy beside it limits nothing."""
    return {
        "proc/self/cgroup": f"4:{controller}:{path}\n0::/",
        "proc/self/mountinfo": (
            f"41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
            f"35 31 0:32 {mount_root} /sys/fs/cgroup/{controller} rw - cgroup cgroup"
            f" rw,{controller}"
        ),
    }


def meminfo(total_kb: int, available_kb: int) -> dict[str, str]:
    """The machine's memory."""
    return {
        "proc/meminfo": (
            f"MemTotal:       {total_kb} kB\nMemFree:        1 kB\n"
            f"MemAvailable:   {available_kb} kB\nHugePages_Total:       0"
        )
    }
