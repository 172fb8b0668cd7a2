"""The worker processes of a group: placed by Ray, watched by process descriptors.

Every worker has a bundle of a placement group on this host. A descriptor becomes readable the
moment a process ends, whatever ended it, and a signal sent through it can hit no other process.
Workers are not restarted by Ray: a new one has to be told where it is, and only the group knows.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ellm_serve.cluster.local_ray import SOCKET_RESOURCE, import_ray
from ellm_serve.cluster.worker import Berth, SocketReport, SocketWorker, WorkerTask
from ellm_serve.errors import StartupError, WorkerDied

logger = logging.getLogger(__name__)

# Of each worker. Ray counts CPUs only to place things, and our threads are pinned.
_NUM_CPUS = 0.1
# All bundles of a group are on one host: they share memory.
STRATEGY = "STRICT_PACK"
_PLACEMENT_TIMEOUT_S = 30.0
_PROCESS_TIMEOUT_S = 120.0
_GRACE_S = 1.0
_LEAVE_TIMEOUT_S = 10.0


def worker_bundle() -> dict[str, float]:
    """What a worker takes of its host."""
    return {"CPU": _NUM_CPUS, SOCKET_RESOURCE: 1}


class Placement:
    """A bundle per socket, all on the host of this process.

    `first_bundle` is socket 0's. A group that is not `ours` stays when this is closed.
    """

    def __init__(self, group: Any, first_bundle: int = 0, ours: bool = False) -> None:
        """Of a group that is there. Use `create` or `inherit`."""
        self.group = group
        self.first_bundle = first_bundle
        self._ours = ours

    @classmethod
    def create(cls, sockets: int) -> Placement:
        """A group of our own.

        Raises:
            StartupError: this host has no room for it.
        """
        ray = import_ray()
        # Ray names every host by its address; the engine's memory is on this one.
        host = f"node:{ray.util.get_node_ip_address()}"
        bundle = worker_bundle() | {host: 0.001}
        group = ray.util.placement_group([bundle] * sockets, strategy=STRATEGY)
        placement = cls(group, ours=True)
        if not group.wait(_PLACEMENT_TIMEOUT_S):
            placement.close()
            raise StartupError(
                f"the Ray cluster has no {sockets} free {SOCKET_RESOURCE} on this host; start it"
                f" with ray start --resources='{{\"{SOCKET_RESOURCE}\": {sockets}}}' or lower"
                " --sockets"
            )
        return placement

    @classmethod
    def inherit(cls) -> Placement:
        """The group that the calling actor is in; the first bundle is the actor's own."""
        group = import_ray().util.get_current_placement_group()
        assert group is not None, "the calling actor has no placement group"
        return cls(group, first_bundle=1)

    def close(self) -> None:
        """Gives the bundles of our own group back."""
        if self._ours:
            import_ray().util.remove_placement_group(self.group)


class Crew:
    """One generation of workers. After the first death all are useless: close it, start another."""

    def __init__(self, placement: Placement, berths: Sequence[Berth]) -> None:
        self._ray = import_ray()
        self._descriptors: list[int] = []
        self._stop_watching: int | None = None
        self.pids: list[int] = []
        remote = self._ray.remote(max_restarts=0, max_task_retries=0)(SocketWorker)
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        self._actors: list[Any] = [
            remote.options(
                num_cpus=_NUM_CPUS,
                resources={SOCKET_RESOURCE: 1},
                scheduling_strategy=strategy(placement.group, placement_group_bundle_index=bundle),
            ).remote(berth)
            for bundle, berth in enumerate(berths, placement.first_bundle)
        ]

    def start(self, task: WorkerTask, timeout_s: float | None) -> list[SocketReport]:
        """Waits until every worker is ready.

        Raises:
            WorkerDied: one has died, or did not get ready in time.
            StartupError: a shard cannot be loaded.
        """
        errors = self._ray.exceptions
        try:
            pids = [actor.pid.remote() for actor in self._actors]
            self.pids = self._ray.get(pids, timeout=_PROCESS_TIMEOUT_S)
            for pid in self.pids:
                self._descriptors.append(os.pidfd_open(pid))
            reports = [actor.start.remote(task) for actor in self._actors]
            return list(self._ray.get(reports, timeout=timeout_s))
        except errors.RayTaskError as error:
            if isinstance(error.cause, StartupError):
                raise error.cause from None
            raise
        except (errors.RayError, ProcessLookupError) as error:
            reason = " ".join(str(error).split())[:300]
            raise WorkerDied(f"a socket worker did not get ready: {reason}") from None

    def watch(self, on_death: Callable[[int], None]) -> None:
        """Calls `on_death`, in a thread of its own, with the rank that dies first; once at most."""
        stopped, self._stop_watching = os.pipe()
        # Descriptors of its own: `close` does not wait for this thread.
        watched = [os.dup(descriptor) for descriptor in self._descriptors]
        threading.Thread(
            target=_watch, args=(stopped, watched, on_death), name="ellm-watch", daemon=True
        ).start()

    def close(self) -> None:
        """Ends all workers, hanging ones too, and waits until they are gone. Twice is fine."""
        if self._stop_watching is not None:
            os.close(self._stop_watching)
            self._stop_watching = None
        # Ray first: it then knows that this was on purpose. It cannot end one that hangs.
        for actor in self._actors:
            self._ray.kill(actor, no_restart=True)
        for descriptor in _alive(self._descriptors, _GRACE_S):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        for _ in _alive(self._descriptors, _LEAVE_TIMEOUT_S):
            logger.error("a socket worker did not end within %.0f s", _LEAVE_TIMEOUT_S)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors, self._actors = [], []


def _watch(stopped: int, processes: Sequence[int], on_death: Callable[[int], None]) -> None:
    """Waits for the end of a process, or for the other end of the pipe `stopped` to close."""
    poll = select.poll()
    for descriptor in (stopped, *processes):
        poll.register(descriptor, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll()}
    for descriptor in (stopped, *processes):
        os.close(descriptor)
    if stopped not in ready:
        on_death(min(rank for rank, process in enumerate(processes) if process in ready))


def _alive(descriptors: Sequence[int], timeout_s: float) -> list[int]:
    """Of these processes, the ones that have not ended within that time."""
    deadline = time.monotonic() + timeout_s
    alive = list(descriptors)
    while alive and (left := deadline - time.monotonic()) > 0:
        ended = select.select(alive, [], [], left)[0]
        alive = [descriptor for descriptor in alive if descriptor not in ended]
    return alive
