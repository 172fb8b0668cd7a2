"""The executor of one socket in this process: program, KV tensor and pinned threads together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ellm_serve.engine.executor import ExecutorLimits, Span
from ellm_serve.engine.step_input import StepInput
from ellm_serve.engine.threads import PinnedThreads
from ellm_serve.graph.kv_tensor import KVShape, KVTensor
from ellm_serve.graph.program import Table, lower
from ellm_serve.graph.qwen3 import Bases, build_qwen3
from ellm_serve.graph.rotary import write_rotary_tables
from ellm_serve.graph.tensor import Arena, Mode
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.region import Region
from ellm_serve.model.weights import WeightLayout

# Work between two yield points of a prefill, per thread: 10 ms at 500 GFLOP/s, 40 ms at 120.
PART_FLOPS_PER_THREAD = 5e9


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """Sizes of an executor.

    cores: one pinned thread each. num_slots: rows of the KV tensor, and of a decode step.
    kv_budget_bytes: how much KV may be committed in all.
    """

    cores: tuple[int, ...]
    num_slots: int
    sequence_length: int
    prefill_block: int = 2048
    max_logit_rows: int = 32
    kv_budget_bytes: int = 1 << 62
    part_flops_per_thread: float = PART_FLOPS_PER_THREAD


class _Lane:
    """One mode's arena, table and mailbox."""

    def __init__(self, table: Table, arena: Arena, memory: Region, num_kv_heads: int) -> None:
        self.table = table
        self.arena = arena
        self.memory = memory
        self.input = StepInput(table, arena, num_kv_heads)
        self.num_logit_rows = 0


class SoloExecutor:
    """Implements `Executor` without Ray."""

    def __init__(
        self, config: ModelConfig, layout: WeightLayout, weights: Region, options: ExecutorOptions
    ) -> None:
        self._config = config
        self._weights = weights
        self._options = options
        shape = KVShape(
            options.num_slots, options.sequence_length, config.num_layers, config.num_kv_heads,
            config.head_dim,
        )  # fmt: skip
        self.kv = KVTensor(shape, options.kv_budget_bytes)
        self._rotary, cos, sin = write_rotary_tables(config, options.sequence_length)
        bases = Bases(weights.address, self.kv.address, cos, sin)
        self.ops, self._activations = build_qwen3(config, layout, shape, bases)
        self._few = self._lane(Mode.FEW, options.num_slots, options.num_slots)
        self._many = self._lane(Mode.MANY, options.prefill_block, options.max_logit_rows)
        self.threads = PinnedThreads(options.cores)

    @property
    def limits(self) -> ExecutorLimits:
        options = self._options
        return ExecutorLimits(
            num_slots=options.num_slots,
            sequence_length=options.sequence_length,
            max_decode_rows=options.num_slots,
            prefill_block=options.prefill_block,
            max_logit_rows=min(options.max_logit_rows, options.prefill_block),
            vocab_size=self._config.vocab_size,
        )

    def _lane(self, mode: Mode, rows: int, logit_rows: int) -> _Lane:
        options, threads = self._options, len(self._options.cores)
        length = options.sequence_length
        planned = self._activations.arena(mode, rows, logit_rows, threads, length)
        memory = Region(planned.size_bytes)
        arena = self._activations.arena(mode, rows, logit_rows, threads, length, memory.address)
        table = lower(self.ops, arena, options.part_flops_per_thread * threads)
        return _Lane(table, arena, memory, self._config.num_kv_heads)

    def _logits(self, lane: _Lane) -> NDArray[np.float32]:
        buffer = lane.arena[self._activations.logits]
        width = buffer.row_bytes // 4
        offset = buffer.address - lane.memory.address
        rows = lane.memory.array(offset, (lane.num_logit_rows, width), np.float32)
        return rows[:, : self._config.vocab_size]  # type: ignore[return-value]

    def decode(self, spans: Sequence[Span]) -> NDArray[np.float32]:
        lane = self._few
        lane.num_logit_rows = lane.input.write(spans)
        self.threads.run(lane.input.address)
        return self._logits(lane)

    def start_prefill(self, spans: Sequence[Span]) -> None:
        self._many.num_logit_rows = self._many.input.write(spans)

    def run_prefill(self, budget_s: float) -> NDArray[np.float32] | None:
        self.threads.run(self._many.input.address, budget_s)
        return self._logits(self._many) if self._many.input.finished else None

    def cancel_prefill(self) -> None:
        # Nothing to undo: the next block starts from its first op, and positions count as valid
        # only when the engine says so.
        self._many.num_logit_rows = 0

    def commit(self, slot: int, length: int) -> None:
        self.kv.commit(slot, length)

    def release(self, slot: int) -> None:
        self.kv.release(slot)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self.kv.commit(target, length)
        self.kv.copy_prefix(source, target, length)

    def op_seconds(self, mode: Mode) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds per op since the last call: the busiest thread's work, and the mean wait."""
        lane = self._few if mode is Mode.FEW else self._many
        times = lane.input.take_times() / self.threads.cycles_per_s  # [thread, row, busy/wait]
        busy, waited = np.zeros(len(self.ops)), np.zeros(len(self.ops))
        np.add.at(busy, list(lane.table.op_of_row), times[:, :, 0].max(0))
        np.add.at(waited, list(lane.table.op_of_row), times[:, :, 1].mean(0))
        return busy, waited

    def table(self, mode: Mode) -> Table:
        """The lowered program of a mode."""
        return (self._few if mode is Mode.FEW else self._many).table

    def close(self) -> None:
        self.threads.close()
