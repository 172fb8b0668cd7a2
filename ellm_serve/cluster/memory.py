"""How much memory this process can still take: the machine's and its control groups' limits.

The page cache counts as available: the kernel drops it when memory is asked for, and a checkpoint
that was just read fills it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ellm_serve.cluster.cgroup import Cgroup, read_text

# Version 1 writes "no limit" as a number just below 2^63.
_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `limit_bytes` is the tightest control group's limit, None without one."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None = None

    @classmethod
    def read(cls, root: Path = Path("/")) -> Memory:
        machine = _meminfo(root)
        available = machine.get("MemAvailable", machine["MemFree"])
        cgroup = Cgroup.find("memory", root)
        limits = _limits(cgroup) if cgroup else []
        room = [limit - used for limit, used in limits]
        return cls(
            machine["MemTotal"],
            max(0, min([available, *room])),
            min((limit for limit, _ in limits), default=None),
        )


def _meminfo(root: Path) -> dict[str, int]:
    """Fields of /proc/meminfo in bytes."""
    fields = {}
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        fields[name] = int(number) << (10 if unit == "kB" else 0)
    return fields


def _limits(cgroup: Cgroup) -> list[tuple[int, int]]:
    """(limit, bytes used that cannot be reclaimed) of every level with a limit."""
    # `memory.high` does not kill, but it slows a process down until nothing works.
    v2 = cgroup.version == 2
    names = ("memory.max", "memory.high") if v2 else ("memory.limit_in_bytes",)
    usage = "memory.current" if v2 else "memory.usage_in_bytes"
    limits = []
    for name in names:
        for directory, text in cgroup.values(name):
            if text == "max" or int(text) >= _UNLIMITED:
                continue
            used = int(read_text(directory / usage) or 0)
            limits.append((int(text), max(0, used - _file_cache(directory))))
    return limits


def _file_cache(directory: Path) -> int:
    """Bytes of file pages that can be dropped; shared memory is not among them."""
    text = read_text(directory / "memory.stat") or ""
    stat = dict(line.split(" ", 1) for line in text.splitlines())
    # Version 1 counts a group's children only in the `total_` fields.
    prefix = "total_" if "total_inactive_file" in stat else ""
    return sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
