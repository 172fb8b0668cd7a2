"""The engine's side of a group of sockets: spans in, logits out, KV memory kept.

Knows mailboxes and memory but not where the sockets run: in this process (`solo`) or in worker
processes (`cluster`). One socket is a group of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ellm_serve.engine.executor import ExecutorLimits, Span
from ellm_serve.engine.mailbox import Mailbox
from ellm_serve.engine.socket import PART_FLOPS_PER_THREAD
from ellm_serve.engine.threads import BARRIER_TIMEOUT_S, Control
from ellm_serve.errors import ConfigError
from ellm_serve.graph.group_layout import GroupLayout, StepSizes
from ellm_serve.graph.kv_tensor import KVShape, KVTensor
from ellm_serve.graph.tensor import Mode
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.region import Memory
from ellm_serve.model.sharding import ExpertSplit, Shard


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Sizes and places of a group.

    sockets: the cores of each, one pinned thread per core, equally many on every socket.
    num_slots: rows of the KV tensor, and of a decode step. kv_budget_bytes: how much KV may be
    committed, all sockets together.
    """

    sockets: tuple[tuple[int, ...], ...]
    num_slots: int
    sequence_length: int
    prefill_block: int = 2048
    max_logit_rows: int = 32
    kv_budget_bytes: int = 1 << 62
    expert_split: ExpertSplit = ExpertSplit.SLICE
    part_flops_per_thread: float = PART_FLOPS_PER_THREAD
    barrier_timeout_s: float = BARRIER_TIMEOUT_S

    def __post_init__(self) -> None:
        if len({len(cores) for cores in self.sockets}) != 1:
            counts = ", ".join(str(len(cores)) for cores in self.sockets)
            raise ConfigError(f"every socket needs the same number of threads, not {counts}")

    def shard(self, config: ModelConfig, rank: int) -> Shard:
        """What socket `rank` holds."""
        return Shard(config, rank, len(self.sockets), self.expert_split)

    def kv_shape(self, config: ModelConfig) -> KVShape:
        """The slice of the KV tensor that each socket holds."""
        local = self.shard(config, 0).local
        return KVShape(
            self.num_slots, self.sequence_length, local.num_layers, local.num_kv_heads,
            local.head_dim,
        )  # fmt: skip

    def layout(self, config: ModelConfig) -> GroupLayout:
        """The memory that all sockets share."""
        return GroupLayout(
            self.shard(config, 0),
            len(self.sockets[0]),
            StepSizes(Mode.FEW, self.num_slots, self.num_slots),
            StepSizes(Mode.MANY, self.prefill_block, min(self.max_logit_rows, self.prefill_block)),
        )


class SocketGroup:
    """The parts of `Executor` that do not depend on where sockets run."""

    def __init__(
        self, config: ModelConfig, options: GroupOptions, shared: Memory, kv: Sequence[Memory]
    ) -> None:
        self.config = config
        self.options = options
        self.layout = options.layout(config)
        self.shared = shared
        self.control = Control(shared, len(options.sockets), options.barrier_timeout_s)
        budget = options.kv_budget_bytes // len(options.sockets)
        shape = options.kv_shape(config)
        self.kv = [KVTensor(shape, memory, budget) for memory in kv]
        self._mailboxes = {
            mode: [
                Mailbox(shared, self.layout.mailbox_offset(mode, rank), self.layout.mailbox(mode))
                for rank in range(len(options.sockets))
            ]
            for mode in Mode
        }
        self._num_logit_rows = dict.fromkeys(Mode, 0)
        # Views made once: the layout is pure arithmetic, but too much of it for every step.
        self._all_logits = {mode: self._logits_memory(mode) for mode in Mode}

    @property
    def limits(self) -> ExecutorLimits:
        options = self.options
        return ExecutorLimits(
            num_slots=options.num_slots,
            sequence_length=options.sequence_length,
            max_decode_rows=options.num_slots,
            prefill_block=options.prefill_block,
            max_logit_rows=self.layout.many.logit_rows,
            vocab_size=self.config.vocab_size,
        )

    def _write(self, mode: Mode, spans: Sequence[Span]) -> None:
        for mailbox in self._mailboxes[mode]:
            self._num_logit_rows[mode] = mailbox.write(spans)

    def _run(self, mode: Mode, budget_s: float = 0.0) -> None:
        self.control.run(mode, budget_s)

    def _logits_memory(self, mode: Mode) -> NDArray[np.float32]:
        shape = (self.layout.sizes(mode).logit_rows, self.layout.logits_row_bytes // 4)
        rows = self.shared.array(self.layout.logits_offset(mode), shape, np.float32)
        return rows[:, : self.config.vocab_size]

    def _logits(self, mode: Mode) -> NDArray[np.float32]:
        return self._all_logits[mode][: self._num_logit_rows[mode]]

    def decode(self, spans: Sequence[Span]) -> NDArray[np.float32]:
        self._write(Mode.FEW, spans)
        self._run(Mode.FEW)
        return self._logits(Mode.FEW)

    def start_prefill(self, spans: Sequence[Span]) -> None:
        self._write(Mode.MANY, spans)

    def run_prefill(self, budget_s: float) -> NDArray[np.float32] | None:
        self._run(Mode.MANY, budget_s)
        return self._logits(Mode.MANY) if self._mailboxes[Mode.MANY][0].finished else None

    def cancel_prefill(self) -> None:
        # Nothing to undo: the next block starts from its first op, and positions count as valid
        # only when the engine says so.
        self._num_logit_rows[Mode.MANY] = 0

    def commit(self, slot: int, length: int) -> None:
        for tensor in self.kv:
            tensor.commit(slot, length)

    def release(self, slot: int) -> None:
        for tensor in self.kv:
            tensor.release(slot)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self.commit(target, length)
        for tensor in self.kv:
            tensor.copy_prefix(source, target, length)

    def take_times(self, mode: Mode, rank: int = 0) -> NDArray[np.int64]:
        """Cycles per [thread, table row, (busy, waiting)] of a socket since the last call."""
        return self._mailboxes[mode][rank].take_times()
