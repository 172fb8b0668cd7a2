"""Cores to sockets: equal, disjoint while there are enough, and none that is not ours."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from ellm_serve.cluster.sockets import choose_sockets
from ellm_serve.cluster.topology import Machine
from ellm_serve.errors import ConfigError
from tests.cluster import fake_machine as fake


def two_sockets(root: Path, affinity: Iterable[int] = range(16)) -> Machine:
    """Two packages of two NUMA nodes with two cores of two threads each."""
    cores = [(cpu, cpu + 8) for cpu in range(8)]
    package = {cpu: cpu % 8 // 4 for cpu in range(16)}
    lists = {node: f"{2 * node}-{2 * node + 1},{2 * node + 8}-{2 * node + 9}" for node in range(4)}
    return Machine.discover(
        fake.write(root, fake.cpus(cores, package) | fake.nodes(lists)), affinity
    )


def one_socket(root: Path, cores: int) -> Machine:
    """One package, one node."""
    files = fake.cpus([(cpu,) for cpu in range(cores)]) | fake.nodes({0: f"0-{cores - 1}"})
    return Machine.discover(fake.write(root, files), range(cores))


def chosen(machine: Machine, *arguments: int | None) -> list[tuple[int, ...]]:
    return [place.cores for place in choose_sockets(machine, *arguments)]


def test_real_sockets(tmp_path: Path) -> None:
    """One thread per physical core; a socket of several nodes leaves its memory to first touch."""
    places = choose_sockets(two_sockets(tmp_path))
    assert [place.cores for place in places] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [place.node for place in places] == [None, None]


def test_numa_nodes_count_as_sockets(tmp_path: Path) -> None:
    """Four sockets on a machine of two packages with two nodes each: memory stays on its node."""
    places = choose_sockets(two_sockets(tmp_path), 4)
    assert [place.cores for place in places] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [place.node for place in places] == [0, 1, 2, 3]


def test_fewer_than_there_are(tmp_path: Path) -> None:
    """One of two sockets is used, and a part of its cores if told so."""
    machine = two_sockets(tmp_path)
    assert chosen(machine, 1) == [(0, 1, 2, 3)]
    assert chosen(machine, 2, 4) == [(0, 1), (4, 5)]


def test_virtual_sockets_are_disjoint(tmp_path: Path) -> None:
    """A small machine stands in for a large one."""
    assert chosen(one_socket(tmp_path, 4), 2) == [(0, 1), (2, 3)]
    assert chosen(one_socket(tmp_path, 5), 2) == [(0, 1), (2, 3)]


def test_more_sockets_than_cores_share(tmp_path: Path) -> None:
    """One thread each, dealt out in turn."""
    machine = one_socket(tmp_path, 2)
    assert chosen(machine, 4) == chosen(machine, 4, 4) == [(0,), (1,), (0,), (1,)]


def test_equal_thread_counts(tmp_path: Path) -> None:
    """Where affinity leaves 3 + 4 cores, both take 3: the barrier waits for the slower one."""
    machine = two_sockets(tmp_path, set(range(16)) - {1, 9})
    assert [len(cores) for cores in chosen(machine, 2)] == [3, 3]


def test_housekeeping_cores_stay_free(tmp_path: Path) -> None:
    """They are taken where most is left, and threads stay equal."""
    machine = two_sockets(tmp_path)
    assert chosen(machine, 2, None, 2) == [(1, 2, 3), (5, 6, 7)]
    assert chosen(one_socket(tmp_path / "one", 2), 1, None, 1) == [(1,)]


def test_sibling_of_a_core_that_is_not_allowed(tmp_path: Path) -> None:
    """The other hardware thread stands for the core."""
    machine = two_sockets(tmp_path, {8, 1, 4, 5})
    assert chosen(machine, 2) == [(8, 1), (4, 5)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 3), "threads 3 cannot be shared out evenly over 2 sockets"),
        ((2, 10), "threads 10 is more than the 8 cores"),
        ((2, None, 8), "housekeeping_cores 8 leaves no core"),
    ],
)
def test_refusals(tmp_path: Path, arguments: tuple[int, ...], message: str) -> None:
    """With the numbers."""
    with pytest.raises(ConfigError, match=message):
        choose_sockets(two_sockets(tmp_path), *arguments)
