"""The worker process of one socket: pins itself, packs its shard, and lets its threads compute.

Nothing that computes is imported at the top: the process is pinned first. A worker owns no memory
that matters: weights, keys and values lie in segments of its group, so whoever comes after it goes
on where it stood. It leaves by itself when nobody claims the group any more.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ellm_serve.cluster.claims import is_claimed
from ellm_serve.cluster.numa import bind_memory, pages_on_node, prefer_node
from ellm_serve.cluster.segment import Segment, segment_name
from ellm_serve.cluster.sockets import SocketPlace
from ellm_serve.errors import MemoryPlanError, StartupError

if TYPE_CHECKING:
    from ellm_serve.engine.group import GroupOptions
    from ellm_serve.engine.socket import Socket
    from ellm_serve.model.config import ModelConfig
    from ellm_serve.model.region import Memory

logger = logging.getLogger(__name__)

_ORPHAN_CHECK_S = 1.0
# What the self-check reads per thread: far more than caches hold, or else it measures those.
_READ_BYTES = 256 << 20
_MIN_READ_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Berth:
    """Which socket of which group a worker is. Plain values: needs no import that computes."""

    group_id: str
    directory: str
    rank: int
    place: SocketPlace


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """What to compute. `pack`: the weights segment is empty yet. `measure`: time for a check."""

    model_dir: str
    config: ModelConfig
    options: GroupOptions
    pack: bool
    measure: bool


@dataclass(frozen=True, slots=True)
class SocketReport:
    """How one socket started.

    local_share: of the shard's pages on the socket's own node; None where that is not known or
    there is one node only. huge_bytes: of the shard, in huge pages. bytes_per_s: read bandwidth of
    its threads. The last two are 0 if not measured.
    """

    rank: int
    cores: tuple[int, ...]
    node: int | None
    shard_bytes: int
    packed: bool
    seconds: float
    local_share: float | None
    huge_bytes: int
    bytes_per_s: float
    decode_bytes: float

    @property
    def decode_ceiling(self) -> float:
        """Tokens per second of a single sequence that the bandwidth allows; 0.0 if unknown."""
        return self.bytes_per_s / self.decode_bytes


class SocketWorker:
    """Becomes a Ray actor. Methods are called in the order of the text."""

    def __init__(self, berth: Berth) -> None:
        self._berth = berth
        self._directory = Path(berth.directory)
        self._socket: Socket | None = None
        self._pin()
        threading.Thread(target=self._leave_when_orphaned, daemon=True).start()

    def _pin(self) -> None:
        """Of the calling thread and those it starts; Ray calls from more than one."""
        os.sched_setaffinity(0, self._berth.place.cores)
        if self._berth.place.node is not None:
            prefer_node(self._berth.place.node)

    def _leave_when_orphaned(self) -> None:
        while is_claimed(self._berth.group_id, directory=self._directory):
            time.sleep(_ORPHAN_CHECK_S)
        # Not sys.exit: threads in compiled code would not let the process end.
        os._exit(1)

    def pid(self) -> int:
        """So that the engine can watch the process itself."""
        return os.getpid()

    def start(self, task: WorkerTask) -> SocketReport:
        """Attaches, packs if need be, and lets the threads wait for steps.

        Raises:
            StartupError: the shard cannot be loaded.
        """
        self._pin()
        from ellm_kernels import load_entries
        from ellm_kernels.jit import compile_all
        from ellm_serve.engine.socket import Socket
        from ellm_serve.model.weights import WeightLayout

        began = time.perf_counter()
        load_entries()
        compile_all()
        rank, options = self._berth.rank, task.options
        shard = options.shard(task.config, rank)
        weights = self._attach(f"weights-{rank}")
        if task.pack:
            self._pack(task, weights)
        self._socket = Socket(
            shard, self._berth.place.cores, options.kv_shape(task.config), weights,
            self._attach(f"kv-{rank}"), self._attach("shared"), options.layout(task.config),
            options.part_flops_per_thread,
        )  # fmt: skip
        size = WeightLayout.from_shard(shard).size_bytes
        report = self._report(task, self._socket, weights, size, began)
        self._socket.start()
        return report

    def _attach(self, part: str) -> Segment:
        name = segment_name(self._berth.group_id, part)
        try:
            return Segment.attach(name, directory=self._directory)
        except OSError as error:
            raise StartupError(f"{name} cannot be attached: {error.strerror}") from error

    def _pack(self, task: WorkerTask, weights: Segment) -> None:
        from ellm_serve.model.checkpoint import Checkpoint
        from ellm_serve.model.packing import load_weights
        from ellm_serve.model.weights import WeightLayout

        place = self._berth.place
        if place.node is not None:
            bind_memory(weights.address, weights.size_bytes, place.node)
        try:
            weights.commit(0, weights.size_bytes)
        except MemoryError as error:
            raise MemoryPlanError(str(error)) from None
        shard = task.options.shard(task.config, self._berth.rank)
        layout = WeightLayout.from_shard(shard)
        checkpoint = Checkpoint.open(Path(task.model_dir))
        load_weights(shard, checkpoint, layout, weights, len(place.cores))

    def _report(
        self, task: WorkerTask, socket: Socket, weights: Segment, size: int, began: float
    ) -> SocketReport:
        from ellm_serve.graph.ops import Load

        place = self._berth.place
        seconds = time.perf_counter() - began
        # First: pages that were not touched yet have no place.
        speed = _read_speed(weights, size, place.cores) if task.measure else 0.0
        share = None
        if task.measure and place.node is not None:
            share = pages_on_node(weights.address, size, place.node)
        return SocketReport(
            rank=self._berth.rank,
            cores=place.cores,
            node=place.node,
            shard_bytes=size,
            packed=task.pack,
            seconds=seconds,
            local_share=share,
            huge_bytes=weights.huge_bytes if task.measure else 0,
            bytes_per_s=speed,
            decode_bytes=sum(op.bytes(Load(1, 1, 1)) for op in socket.ops),
        )


def _read_speed(weights: Memory, size: int, cores: tuple[int, ...]) -> float:
    """Bytes per second that the socket's threads read from its shard, all at once."""
    from ellm_kernels.probe import read_stream
    from ellm_serve.cluster.probe import best_seconds, measure_bandwidth

    share = min(size // len(cores), _READ_BYTES) // 4096 * 4096
    if share < _MIN_READ_BYTES:
        return measure_bandwidth(cores, _MIN_READ_BYTES)
    begin = weights.address
    best = best_seconds(cores, lambda index: read_stream(begin + index * share, share))
    return share * len(cores) / best
