"""Which cores form which socket of a group: real sockets, NUMA nodes, or disjoint sets of cores.

Every socket gets the same number of threads. More sockets than the machine has are *virtual*: the
allowed cores are cut into as many sets, and with fewer cores than sockets they share cores, which
computes the same but slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ellm_serve.cluster.topology import Core, Machine
from ellm_serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SocketPlace:
    """Where one socket computes: a logical CPU per thread.

    `node`: where its memory should come from; None leaves that to first touch.
    """

    cores: tuple[int, ...]
    node: int | None = None


def choose_sockets(
    machine: Machine,
    count: int | None = None,
    threads: int | None = None,
    housekeeping_cores: int = 0,
) -> tuple[SocketPlace, ...]:
    """`count` sockets (None: all the machine has) with `threads` threads in all (None: every core).

    `housekeeping_cores` stay free of compute threads.

    Raises:
        ConfigError: there are too few cores, or threads cannot be shared out evenly.
    """
    groups = _groups(machine, count)
    count = count or len(groups)
    groups = _without(groups, housekeeping_cores)
    cores = [core for group in groups for core in group]
    available = len(cores) if machine.quota is None else max(1, int(machine.quota))
    each = _threads_each(count, threads, min(available, len(cores)))
    if len(groups) == count:
        smallest = min(len(group) for group in groups)
        if threads is not None and each > smallest:
            raise ConfigError(
                f"threads {threads} needs {each} cores on each of {count} sockets, and one of them"
                f" has {smallest}; lower --threads"
            )
        chosen = [group[: min(each, smallest)] for group in groups]
    else:
        dealt = [cores[index % len(cores)] for index in range(count * each)]
        chosen = [dealt[rank * each : (rank + 1) * each] for rank in range(count)]
    several = len(machine.nodes) > 1
    return tuple(_place(machine, group, several) for group in chosen)


def _groups(machine: Machine, count: int | None) -> list[list[Core]]:
    """Open cores by socket, or by NUMA node if there are as many nodes as wanted sockets."""
    by_socket = _grouped(machine.open_cores, lambda core: core.socket)
    by_node = _grouped(machine.open_cores, lambda core: core.node)
    if count is not None and len(by_socket) != count == len(by_node):
        return by_node
    # The largest first, so that one of two sockets is the better one.
    return sorted(by_socket, key=len, reverse=True)[:count]


def _grouped(cores: Sequence[Core], key: Callable[[Core], int]) -> list[list[Core]]:
    groups: dict[int, list[Core]] = {}
    for core in cores:
        groups.setdefault(key(core), []).append(core)
    return [groups[index] for index in sorted(groups)]


def _without(groups: list[list[Core]], count: int) -> list[list[Core]]:
    """Takes cores away, always from the largest group."""
    if count >= sum(len(group) for group in groups):
        raise ConfigError(
            f"housekeeping_cores {count} leaves no core for computing"
            f" ({sum(len(group) for group in groups)} are allowed)"
        )
    for _ in range(count):
        max(groups, key=len).pop(0)
    return [group for group in groups if group]


def _threads_each(count: int, threads: int | None, available: int) -> int:
    if threads is None:
        return max(1, available // count)
    if threads % count:
        raise ConfigError(f"threads {threads} cannot be shared out evenly over {count} sockets")
    if threads > max(available, count):
        raise ConfigError(
            f"threads {threads} is more than the {available} cores this process may use"
            " (see ellm-serve doctor); lower --threads or widen the cpuset or CPU limit"
        )
    return threads // count


def _place(machine: Machine, cores: Sequence[Core], several_nodes: bool) -> SocketPlace:
    nodes = {core.node for core in cores}
    return SocketPlace(
        tuple(min(machine.allowed_cpus & set(core.cpus)) for core in cores),
        nodes.pop() if several_nodes and len(nodes) == 1 else None,
    )
