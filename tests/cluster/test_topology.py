"""Threads go where the process may run, one per physical core, and never beyond its quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ellm_serve.cluster import topology
from ellm_serve.cluster.topology import Cache, Core, HugePages, Machine, parse_cpu_list
from tests.cluster import fake_machine as fake

QUOTA = "sys/fs/cgroup/cpu.max"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-2,5", (0, 1, 2, 5)), ("", ()), ("7", (7,)), ("3,1-2\n", (1, 2, 3)), ("0,0", (0,))],
)
def test_cpu_lists(text: str, expected: tuple[int, ...]) -> None:
    """sysfs writes ranges, single numbers and empty files."""
    assert parse_cpu_list(text) == expected


def test_affinity_decides_not_the_machine(tmp_path: Path) -> None:
    """With affinity {1, 3, 5} on 8 cores three threads run, on exactly those."""
    fake.write(tmp_path, fake.cpus([(cpu,) for cpu in range(8)]) | fake.nodes({0: "0-7"}))
    machine = Machine.discover(tmp_path, {1, 3, 5})
    assert machine.allowed_cores == (1, 3, 5)
    assert len(machine.cores) == 8


def test_one_thread_per_physical_core(tmp_path: Path) -> None:
    """Of two siblings one is used, and it is one that is allowed."""
    fake.write(tmp_path, fake.cpus([(0, 4), (1, 5), (2, 6), (3, 7)]) | fake.nodes({0: "0-7"}))
    machine = Machine.discover(tmp_path, {0, 4, 1, 6})
    assert machine.has_smt
    assert machine.allowed_cores == (0, 1, 6)


def test_cores_without_topology_files(tmp_path: Path) -> None:
    """Where sysfs is hidden every allowed CPU counts as a core on node 0."""
    machine = Machine.discover(tmp_path, {2, 3})
    assert machine.allowed_cores == (2, 3)
    assert machine.cores == (Core((2,), 0, 0), Core((3,), 0, 0))
    assert machine.huge_pages == HugePages("", "")
    assert machine.cpu_model == "unknown CPU"


def test_unknown_package_is_socket_zero(tmp_path: Path) -> None:
    """Some virtual machines write -1."""
    fake.write(tmp_path, fake.cpus([(0,), (1,)], {0: -1, 1: -1}))
    machine = Machine.discover(tmp_path, {0, 1})
    assert machine.num_sockets == 1
    assert {core.socket for core in machine.cores} == {0}


def test_two_sockets_and_a_memory_only_node(tmp_path: Path) -> None:
    """A node without CPUs (a memory expander) is listed and gets no thread."""
    fake.write(
        tmp_path,
        fake.cpus([(0,), (1,), (2,), (3,)], {2: 1, 3: 1})
        | fake.nodes({0: "0-1", 1: "2-3", 2: ""}, memory_kb=2048),
    )
    machine = Machine.discover(tmp_path, {0, 1, 2, 3})
    assert machine.num_sockets == 2
    assert [core.node for core in machine.cores] == [0, 0, 1, 1]
    assert [node.cpus for node in machine.nodes] == [(0, 1), (2, 3), ()]
    assert machine.nodes[2].memory_bytes == 2048 << 10


def test_nodes_sort_by_number(tmp_path: Path) -> None:
    """node10 comes after node2, not after node1."""
    fake.write(tmp_path, fake.cpus([(0,)]) | fake.nodes({10: "", 2: "", 0: "0"}))
    assert [node.index for node in Machine.discover(tmp_path, {0}).nodes] == [0, 2, 10]


@pytest.mark.parametrize(
    ("text", "threads"),
    [
        ("765000 100000", 7),
        ("max 100000", 16),
        ("50000 100000", 1),
        ("200000 100000", 2),
        ("9900000 100000", 16),
    ],
)
def test_quota_v2(tmp_path: Path, text: str, threads: int) -> None:
    """A 7.65-core limit on 16 cores gives 7 threads: one throttled thread stalls all others."""
    files = fake.cpus([(cpu,) for cpu in range(16)]) | fake.cgroup_v2() | {QUOTA: text}
    machine = Machine.discover(fake.write(tmp_path, files), range(16))
    assert len(machine.allowed_cores) == threads


def test_quota_of_a_parent_group(tmp_path: Path) -> None:
    """The limit of a pod lies above its containers' groups; the tightest level counts."""
    files = fake.cpus([(cpu,) for cpu in range(8)]) | fake.cgroup_v2("/pod/box")
    files["sys/fs/cgroup/pod/cpu.max"] = "300000 100000"
    files["sys/fs/cgroup/pod/box/cpu.max"] = "max 100000"
    machine = Machine.discover(fake.write(tmp_path, files), range(8))
    assert machine.quota == 3.0
    assert len(machine.allowed_cores) == 3


@pytest.mark.parametrize("mount_root", ["/", "/docker/abc"])
def test_quota_v1(tmp_path: Path, mount_root: str) -> None:
    """Version 1; inside a container the group's path is the host's and the mount shows its end."""
    files = fake.cpus([(cpu,) for cpu in range(4)])
    files |= fake.cgroup_v1("cpu", "/docker/abc", mount_root)
    own = "sys/fs/cgroup/cpu" + ("/docker/abc" if mount_root == "/" else "")
    files |= {f"{own}/cpu.cfs_quota_us": "250000", f"{own}/cpu.cfs_period_us": "100000"}
    machine = Machine.discover(fake.write(tmp_path, files), range(4))
    assert machine.quota == 2.5
    assert len(machine.allowed_cores) == 2


def test_unlimited_v1(tmp_path: Path) -> None:
    """-1 means no limit."""
    files = fake.cpus([(0,), (1,)]) | fake.cgroup_v1("cpu", "/")
    files["sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "-1"
    machine = Machine.discover(fake.write(tmp_path, files), {0, 1})
    assert machine.quota is None
    assert machine.allowed_cores == (0, 1)


def test_quota_is_spent_on_one_node(tmp_path: Path) -> None:
    """Three threads on 2 + 4 cores go to the node that can hold them all."""
    files = fake.cpus([(cpu,) for cpu in range(6)]) | fake.nodes({0: "0-1", 1: "2-5"})
    files |= fake.cgroup_v2() | {QUOTA: "300000 100000"}
    machine = Machine.discover(fake.write(tmp_path, files), range(6))
    assert machine.allowed_cores == (2, 3, 4)


def test_cpuset_spanning_two_nodes(tmp_path: Path) -> None:
    """Affinity may be wider than the cpuset; only their intersection counts."""
    files = fake.cpus([(cpu,) for cpu in range(8)]) | fake.nodes({0: "0-3", 1: "4-7"})
    files |= fake.cgroup_v2("/box") | {"sys/fs/cgroup/box/cpuset.cpus.effective": "3-5"}
    machine = Machine.discover(fake.write(tmp_path, files), range(5))
    assert machine.allowed_cores == (3, 4)


def test_disjoint_cpusets_share_no_core(tmp_path: Path) -> None:
    """Two instances on one host keep apart, siblings included."""
    files = fake.cpus([(0, 4), (1, 5), (2, 6), (3, 7)]) | fake.cgroup_v2("/box")
    taken = []
    for name, cpus in (("a", "0-1,4-5"), ("b", "2-3,6-7")):
        limits = {"sys/fs/cgroup/box/cpuset.cpus.effective": cpus}
        machine = Machine.discover(fake.write(tmp_path / name, files | limits), range(8))
        taken.append(set(machine.allowed_cores))
    assert taken == [{0, 1}, {2, 3}]


def test_caches_and_huge_pages(tmp_path: Path) -> None:
    """Data and unified caches by level; the bracketed word is the chosen one."""
    cache = f"{fake.THREADS}/cpu0/cache"
    files = fake.cpus([(0,), (1,)])
    for index, (level, kind, size, shared) in enumerate(
        [(1, "Instruction", "32K", "0"), (3, "Unified", "32M", "0-1"), (1, "Data", "48K", "0")]
    ):
        files |= {
            f"{cache}/index{index}/level": str(level),
            f"{cache}/index{index}/type": kind,
            f"{cache}/index{index}/size": size,
            f"{cache}/index{index}/shared_cpu_list": shared,
        }
    huge = "sys/kernel/mm/transparent_hugepage"
    files |= {f"{huge}/enabled": "always [madvise] never", f"{huge}/shmem_enabled": "[never] deny"}
    files["proc/cpuinfo"] = "processor\t: 0\nmodel name\t: Some CPU 9000\n"
    machine = Machine.discover(fake.write(tmp_path, files), {0, 1})
    assert machine.caches == (Cache(1, 48 << 10, 1), Cache(3, 32 << 20, 2))
    assert machine.huge_pages == HugePages("madvise", "never")
    assert machine.cpu_model == "Some CPU 9000"


def test_this_machine() -> None:
    """On the machine the test runs on, every core may really be pinned to."""
    cores = topology.allowed_cores()
    assert cores
    assert set(cores) <= os.sched_getaffinity(0)
