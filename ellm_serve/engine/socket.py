"""One socket's part of a model: its program, its arenas and its pinned threads.

Works on memory it is given: its weights, its slice of the KV tensor, and what all sockets share.
The same in this process and in a worker process.
"""

from __future__ import annotations

import numpy as np

from ellm_serve.engine.mailbox import Mailbox
from ellm_serve.engine.threads import Team
from ellm_serve.graph.group_layout import GroupLayout
from ellm_serve.graph.kv_tensor import KVShape
from ellm_serve.graph.program import Table, lower
from ellm_serve.graph.qwen3 import Bases, build_qwen3
from ellm_serve.graph.rotary import write_rotary_tables
from ellm_serve.graph.tensor import Mode
from ellm_serve.model.region import Memory, Region
from ellm_serve.model.sharding import Shard
from ellm_serve.model.weights import WeightLayout

# Work between two yield points of a prefill, per thread: 10 ms at 500 GFLOP/s, 40 ms at 120.
PART_FLOPS_PER_THREAD = 5e9


class Socket:
    """Builds everything, binds the mailboxes and lets the threads wait for steps."""

    def __init__(
        self,
        shard: Shard,
        cores: tuple[int, ...],
        kv_shape: KVShape,
        weights: Memory,
        kv: Memory,
        shared: Memory,
        group: GroupLayout,
        part_flops_per_thread: float = PART_FLOPS_PER_THREAD,
    ) -> None:
        self._memory = [weights, kv, shared]  # kept alive as long as threads may touch it
        rotary, cos, sin = write_rotary_tables(shard.whole, kv_shape.sequence_length)
        self._memory.append(rotary)
        bases = Bases(weights.address, kv.address, cos, sin)
        layout = WeightLayout.from_shard(shard)
        self.ops, activations = build_qwen3(shard, layout, kv_shape, bases)
        self._team = Team(shared, shard.rank, cores)
        self.tables: dict[Mode, Table] = {}
        part_flops = part_flops_per_thread * len(cores)
        for mode in Mode:
            sizes = group.sizes(mode)
            dims = (mode, sizes.rows, sizes.logit_rows, len(cores), kv_shape.sequence_length)
            memory = Region(activations.arena(*dims).size_bytes)
            exchanges = group.exchanges(mode, shard.rank, shared.address)
            arena = activations.arena(*dims, memory.address, exchanges)
            self.tables[mode] = table = lower(self.ops, arena, part_flops)
            words = Region(table.words.nbytes)
            words.array(0, table.words.shape, np.int64)[:] = table.words
            offset = group.mailbox_offset(mode, shard.rank)
            mailbox = Mailbox(shared, offset, group.mailbox(mode))
            mailbox.bind(table, words.address)
            self._team.set_lane(mode, mailbox.address)
            self._memory += [memory, words]

    def start(self) -> None:
        """Lets the threads wait for steps."""
        self._team.start()

    def join(self) -> None:
        """Waits for the threads to leave."""
        self._team.join()
