"""Available memory is what the tightest of machine and control groups leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from ellm_serve.cluster.memory import Memory
from tests.cluster import fake_machine as fake

GIB = 1 << 30
MACHINE = fake.meminfo(total_kb=16 << 20, available_kb=12 << 20)
OWN = "sys/fs/cgroup/pod/box"


def test_without_control_groups(tmp_path: Path) -> None:
    """MemAvailable, not MemFree: page cache can be dropped."""
    assert Memory.read(fake.write(tmp_path, MACHINE)) == Memory(16 * GIB, 12 * GIB, None)


def test_limit_v2_counts_file_cache_as_available(tmp_path: Path) -> None:
    """A checkpoint that was just read fills the group's cache; that must not refuse a start."""
    files = MACHINE | fake.cgroup_v2("/pod/box")
    files |= {
        f"{OWN}/memory.max": str(8 * GIB),
        f"{OWN}/memory.current": str(7 * GIB),
        f"{OWN}/memory.stat": f"anon {GIB}\ninactive_file {4 * GIB}\nactive_file {GIB}\nshmem 5",
    }
    assert Memory.read(fake.write(tmp_path, files)) == Memory(16 * GIB, 6 * GIB, 8 * GIB)


def test_shared_memory_is_not_reclaimable(tmp_path: Path) -> None:
    """`file` counts tmpfs pages, which nothing can drop; it must not be used."""
    files = MACHINE | fake.cgroup_v2("/pod/box")
    files |= {
        f"{OWN}/memory.max": str(8 * GIB),
        f"{OWN}/memory.current": str(7 * GIB),
        f"{OWN}/memory.stat": f"file {6 * GIB}\nshmem {6 * GIB}\ninactive_file 0\nactive_file 0",
    }
    assert Memory.read(fake.write(tmp_path, files)).available_bytes == GIB


@pytest.mark.parametrize("name", ["memory.max", "memory.high"])
def test_limit_of_a_parent(tmp_path: Path, name: str) -> None:
    """A pod's limit lies above its containers; `high` stalls a process and so counts as well."""
    files = MACHINE | fake.cgroup_v2("/pod/box")
    files |= {
        f"{OWN}/memory.max": "max",
        f"sys/fs/cgroup/pod/{name}": str(4 * GIB),
        "sys/fs/cgroup/pod/memory.current": str(GIB),
    }
    assert Memory.read(fake.write(tmp_path, files)) == Memory(16 * GIB, 3 * GIB, 4 * GIB)


def test_machine_may_be_tighter_than_the_limit(tmp_path: Path) -> None:
    """A limit above what the machine has left does not create memory."""
    files = MACHINE | fake.cgroup_v2("/")
    files |= {
        "sys/fs/cgroup/memory.max": str(64 * GIB),
        "sys/fs/cgroup/memory.current": "0",
    }
    assert Memory.read(fake.write(tmp_path, files)).available_bytes == 12 * GIB


def test_group_over_its_limit(tmp_path: Path) -> None:
    """Never negative."""
    files = MACHINE | fake.cgroup_v2("/")
    files |= {"sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.current": "2000"}
    assert Memory.read(fake.write(tmp_path, files)).available_bytes == 0


def test_limit_v1(tmp_path: Path) -> None:
    """Version 1 has other names and counts children only in the `total_` fields."""
    files = MACHINE | fake.cgroup_v1("memory", "/docker/abc", "/docker/abc")
    group = "sys/fs/cgroup/memory"
    files |= {
        f"{group}/memory.limit_in_bytes": str(8 * GIB),
        f"{group}/memory.usage_in_bytes": str(5 * GIB),
        f"{group}/memory.stat": (
            f"inactive_file 0\nactive_file 0\ntotal_inactive_file {2 * GIB}\ntotal_active_file 0"
        ),
    }
    assert Memory.read(fake.write(tmp_path, files)) == Memory(16 * GIB, 5 * GIB, 8 * GIB)


def test_unlimited_v1(tmp_path: Path) -> None:
    """A number just below 2^63 means no limit."""
    files = MACHINE | fake.cgroup_v1("memory", "/")
    files |= {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
    }
    assert Memory.read(fake.write(tmp_path, files)) == Memory(16 * GIB, 12 * GIB, None)


def test_this_machine() -> None:
    """Real files parse."""
    memory = Memory.read()
    assert 0 < memory.available_bytes <= memory.total_bytes
