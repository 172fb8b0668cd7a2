"""The executor whose sockets are worker processes: the same steps, and it survives its workers.

Weights, keys and values lie in segments of this process, so when a worker dies or hangs the group
gets new workers, which attach to what is there, and the interrupted step runs again from its first
op. Whoever calls notices nothing but the time it took.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ellm_serve.cluster.crew import Crew, Placement
from ellm_serve.cluster.group_memory import GroupMemory
from ellm_serve.cluster.local_ray import RaySession
from ellm_serve.cluster.sockets import SocketPlace
from ellm_serve.cluster.worker import Berth, SocketReport, WorkerTask
from ellm_serve.engine.executor import Span
from ellm_serve.engine.group import GroupOptions, SocketGroup
from ellm_serve.errors import StartupError, WorkerDied
from ellm_serve.graph.tensor import Mode
from ellm_serve.model.config import ModelConfig

logger = logging.getLogger(__name__)

# No thread shows a sign of life for this long: somebody hangs. The slowest step so far counts too.
HANG_S = 5.0
_HANG_FACTOR = 10.0
# Deaths in one step until it is given up: a step that kills its workers would do so for ever.
MAX_DEATHS = 5
# For workers that only attach.
_REBUILD_TIMEOUT_S = 120.0
_LOCAL_SHARE = 0.98


class WorkerGroup(SocketGroup):
    """Implements `Executor`. Takes over the memory and the Ray session, and closes both.

    reports: how each socket started. num_rebuilds, last_rebuild_s: how often workers were replaced,
    and how long it took the last time. lost_at: when the last loss was noticed (`time.monotonic`).
    """

    def __init__(
        self,
        model_dir: Path,
        config: ModelConfig,
        options: GroupOptions,
        places: Sequence[SocketPlace],
        memory: GroupMemory,
        session: RaySession,
        hang_s: float = HANG_S,
        placement: Placement | None = None,
    ) -> None:
        """`placement`: bundles to use; None: a placement group of its own."""
        super().__init__(config, options, memory.shared, memory.kv)
        self._model_dir = model_dir
        self._memory = memory
        self._session = session
        self._hang_s = hang_s
        self._slowest_decode_s = 0.0
        self._spans: dict[Mode, Sequence[Span]] = {}
        self._deaths = dict.fromkeys(Mode, 0)
        self.num_rebuilds = 0
        self.last_rebuild_s = self.lost_at = 0.0
        group_id, directory = memory.claim.group_id, str(memory.claim.directory)
        self._berths = [
            Berth(group_id, directory, rank, place) for rank, place in enumerate(places)
        ]
        # Held by whoever computes, and by the watching thread while it replaces idle workers.
        self._computing = threading.Lock()
        # Held for moments: a late watcher must not abort the next generation's steps.
        self._changing = threading.Lock()
        self._crew: Crew | None = None
        self._placement: Placement | None = placement or Placement.create(len(places))
        try:
            self.reports = self._start_crew(timeout_s=None, measure=True)
        except BaseException:
            self._placement.close()
            raise
        memory.weights_packed()
        for report in self.reports:
            _log(report)

    @property
    def pids(self) -> Sequence[int]:
        """Of the workers, by rank; empty while they are being replaced."""
        crew = self._crew
        return () if crew is None else tuple(crew.pids)

    @property
    def decode_ceiling(self) -> float:
        """Tokens per second of one sequence that the slowest socket's bandwidth allows."""
        return min(report.decode_ceiling for report in self.reports)

    # --- workers -----------------------------------------------------------------------------

    def _start_crew(self, timeout_s: float | None, measure: bool) -> list[SocketReport]:
        assert self._placement is not None
        task = WorkerTask(
            str(self._model_dir), self.config, self.options, not self._memory.packed, measure
        )
        crew = Crew(self._placement, self._berths)
        try:
            reports = crew.start(task, timeout_s)
        except BaseException:
            crew.close()
            raise
        self._crew = crew
        crew.watch(partial(self._on_death, crew))
        return reports

    def _on_death(self, crew: Crew, rank: int) -> None:
        """In the watching thread: stops the running step, or replaces workers that were idle."""
        with self._changing:
            if crew is not self._crew:
                return
            self.lost_at = time.monotonic()
            logger.warning("the worker of socket %d has died", rank)
            self.control.abort()
        with self._computing:
            if crew is self._crew:
                self._drop_crew()
                try:
                    self._replace_crew()
                except WorkerDied as error:
                    logger.error("%s; the next step tries again", error)

    def _drop_crew(self) -> None:
        with self._changing:
            crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()

    def _replace_crew(self) -> None:
        """New workers attach to weights, keys and values; all steps are set up again.

        Raises:
            WorkerDied: they did not get ready.
        """
        start = time.monotonic()
        self.control.reset()
        try:
            self._start_crew(_REBUILD_TIMEOUT_S, measure=False)
        except StartupError as error:
            raise WorkerDied(f"a socket worker cannot be replaced: {error}") from error
        # The new workers have cleared the mailboxes; a block that had yielded starts again too.
        for mode, spans in self._spans.items():
            super()._write(mode, spans)
        self.num_rebuilds += 1
        self.last_rebuild_s = time.monotonic() - start
        logger.warning("socket workers replaced in %.1f s", self.last_rebuild_s)

    # --- steps -------------------------------------------------------------------------------

    def _write(self, mode: Mode, spans: Sequence[Span]) -> None:
        self._spans[mode] = spans
        super()._write(mode, spans)

    def _run(self, mode: Mode, budget_s: float = 0.0) -> None:
        """Runs the step; with new workers, and from its first op, as often as workers die."""
        while not self._attempt(mode, budget_s):
            pass
        if self._mailboxes[mode][0].finished:
            self._deaths[mode] = 0

    def _attempt(self, mode: Mode, budget_s: float) -> bool:
        start = time.monotonic()
        silence_s = max(self._hang_s, _HANG_FACTOR * self._slowest_decode_s)
        try:
            if self._crew is None:
                self._replace_crew()
            self.control.run(mode, budget_s, silence_s)
        except WorkerDied as error:
            self._deaths[mode] += 1
            if self._deaths[mode] > MAX_DEATHS:
                raise WorkerDied(f"socket workers keep dying: {error}") from error
            logger.warning("a step is run again: %s", error)
            self._drop_crew()
            return False
        if mode is Mode.FEW:
            self._slowest_decode_s = max(self._slowest_decode_s, time.monotonic() - start)
        return True

    def decode(self, spans: Sequence[Span]) -> NDArray[np.float32]:
        with self._computing:
            return super().decode(spans)

    def start_prefill(self, spans: Sequence[Span]) -> None:
        with self._computing:
            super().start_prefill(spans)

    def run_prefill(self, budget_s: float) -> NDArray[np.float32] | None:
        with self._computing:
            logits = super().run_prefill(budget_s)
            if logits is not None:
                del self._spans[Mode.MANY]
            return logits

    def cancel_prefill(self) -> None:
        with self._computing:
            self._spans.pop(Mode.MANY, None)
            super().cancel_prefill()

    def close(self) -> None:
        """Leaves no process, no bundle and no segment behind, except weights to be kept."""
        with self._computing:
            if self._placement is None:
                return
            self.control.stop()
            self._drop_crew()
            self._placement.close()
            self._placement = None
            self._memory.close()
            self._session.close()


def _log(report: SocketReport) -> None:
    how = "packed" if report.packed else "found in shared memory"
    logger.info(
        "socket %d: %d threads, %.2f GB %s (%.0f %% in huge pages), ready in %.1f s;"
        " reads %.1f GB/s, at most %.0f tokens/s",
        report.rank, len(report.cores), report.shard_bytes / 1e9, how,
        100 * min(1.0, report.huge_bytes / report.shard_bytes), report.seconds,
        report.bytes_per_s / 1e9, report.decode_ceiling,
    )  # fmt: skip
    if report.local_share is not None and report.local_share < _LOCAL_SHARE:
        logger.warning(
            "socket %d: only %.0f %% of its weights lie on node %s: the node was full, or the"
            " system does not allow to choose (see ellm-serve doctor)",
            report.rank, 100 * report.local_share, report.node,
        )  # fmt: skip
