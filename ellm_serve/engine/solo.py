"""The executor in this process: every socket's threads side by side, without Ray."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ellm_serve.engine.group import GroupOptions, SocketGroup
from ellm_serve.engine.socket import Socket
from ellm_serve.graph.ops import Op
from ellm_serve.graph.program import Table
from ellm_serve.graph.tensor import Mode
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.region import Memory, Region


class SoloExecutor(SocketGroup):
    """Implements `Executor`. `weights`: the packed shard of every socket."""

    def __init__(
        self, config: ModelConfig, weights: Sequence[Memory], options: GroupOptions
    ) -> None:
        count = len(options.sockets)
        kv = [Region(options.kv_shape(config).size_bytes) for _ in range(count)]
        super().__init__(config, options, Region(options.layout(config).size_bytes), kv)
        self.sockets = [
            Socket(
                options.shard(config, rank), cores, options.kv_shape(config), weights[rank],
                kv[rank], self.shared, self.layout, options.part_flops_per_thread,
            )
            for rank, cores in enumerate(options.sockets)
        ]  # fmt: skip
        for socket in self.sockets:
            socket.start()

    @property
    def ops(self) -> Sequence[Op]:
        """The program of socket 0."""
        return self.sockets[0].ops

    def table(self, mode: Mode) -> Table:
        """The lowered program of socket 0."""
        return self.sockets[0].tables[mode]

    def op_seconds(self, mode: Mode) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds per op since the last call: the busiest thread's work, and the mean wait."""
        seconds = [
            self.take_times(mode, rank) / self.control.cycles_per_s
            for rank in range(len(self.sockets))
        ]
        times = np.concatenate(seconds)  # [thread, row, busy/wait]
        busy, waited = np.zeros(len(self.ops)), np.zeros(len(self.ops))
        op_of_row = list(self.table(mode).op_of_row)
        np.add.at(busy, op_of_row, times[:, :, 0].max(0))
        np.add.at(waited, op_of_row, times[:, :, 1].mean(0))
        return busy, waited

    def close(self) -> None:
        self.control.stop()
        for socket in self.sockets:
            socket.join()
