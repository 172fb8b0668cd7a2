"""The memory that the engine and all sockets see: control block, mailboxes, exchanges, logits.

Pure arithmetic from the model and the sizes, so every process computes the same offsets. Addresses
differ from process to process and are never written where another one reads them, except for the
words of a socket's own descriptors, which only that socket follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from ellm_kernels import opcodes as oc
from ellm_kernels.control import control_bytes
from ellm_kernels.tiles import padded
from ellm_serve.graph.qwen3 import Exchanges
from ellm_serve.graph.tensor import Exchange, Mode
from ellm_serve.model.region import round_up
from ellm_serve.model.sharding import Shard

_LINE = 64
_PAGE = 4096
# Rows of a program's table per layer, and outside of layers: more than any model of ours has.
_ROWS_PER_LAYER, _ROWS_BESIDE = 16, 8
SPAN_WORDS = 4


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What one mode's steps hold at most."""

    mode: Mode
    rows: int
    logit_rows: int


@dataclass(frozen=True, slots=True)
class MailboxLayout:
    """Offsets in one socket's mailbox of one mode."""

    rows: int
    logit_rows: int
    num_threads: int
    table_rows: int
    num_kv_heads: int

    def fields(self) -> dict[str, tuple[int, int]]:
        """(offset, bytes) by name."""
        sizes = {
            "step": 8 * oc.STEP_WORDS,
            "token_ids": 4 * self.rows,
            "slots": 4 * self.rows,
            "positions": 4 * self.rows,
            "spans": 8 * SPAN_WORDS * self.rows,
            "logit_rows": 4 * self.logit_rows,
            "countdown": 8 * self.rows * self.num_kv_heads,
            "times": 16 * self.num_threads * self.table_rows,
        }
        offset, fields = 0, {}
        for name, size in sizes.items():
            fields[name] = (offset, size)
            offset += round_up(size, _LINE)
        return fields

    @property
    def size_bytes(self) -> int:
        offset, size = self.fields()["times"]
        return round_up(offset + size, _PAGE)


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Offsets in the shared memory of a group of sockets. `shard` is any socket's."""

    shard: Shard
    num_threads: int
    few: StepSizes
    many: StepSizes

    def sizes(self, mode: Mode) -> StepSizes:
        return self.few if mode is Mode.FEW else self.many

    def mailbox(self, mode: Mode) -> MailboxLayout:
        """Every socket's mailbox looks alike."""
        sizes, config = self.sizes(mode), self.shard.local
        table_rows = _ROWS_PER_LAYER * config.num_layers + _ROWS_BESIDE
        return MailboxLayout(
            sizes.rows, sizes.logit_rows, self.num_threads, table_rows, config.num_kv_heads
        )

    def _offsets(self) -> dict[tuple[str, Mode], int]:
        count, hidden = self.shard.count, self.shard.whole.hidden_size
        offset = round_up(control_bytes(count), _PAGE)
        offsets: dict[tuple[str, Mode], int] = {}
        for mode in Mode:
            sizes = self.sizes(mode)
            delta = count * round_up(sizes.rows * padded(hidden) * 4, _PAGE)
            parts = {
                "mailbox": count * self.mailbox(mode).size_bytes,
                "attention": delta,
                "mlp": delta,
                "logits": round_up(sizes.logit_rows * self.logits_row_bytes, _PAGE),
            }
            for name, size in parts.items():
                offsets[name, mode] = offset
                offset += size
        offsets["end", Mode.FEW] = offset
        return offsets

    @property
    def size_bytes(self) -> int:
        return self._offsets()["end", Mode.FEW]

    @property
    def logits_row_bytes(self) -> int:
        """Distance of two rows of logits, which all sockets write side by side."""
        return 4 * self.shard.vocabulary_width * self.shard.count

    def mailbox_offset(self, mode: Mode, rank: int) -> int:
        return self._offsets()["mailbox", mode] + rank * self.mailbox(mode).size_bytes

    def logits_offset(self, mode: Mode) -> int:
        return self._offsets()["logits", mode]

    def exchanges(self, mode: Mode, rank: int, base: int) -> Exchanges:
        """Where shared tensors lie for a process that sees the memory at `base`."""
        offsets, count = self._offsets(), self.shard.count
        rows = self.sizes(mode).rows
        stride = round_up(rows * padded(self.shard.whole.hidden_size) * 4, _PAGE)
        columns = 4 * self.shard.vocabulary_width
        return Exchanges(
            Exchange(base + offsets["attention", mode], stride, rank, count),
            Exchange(base + offsets["mlp", mode], stride, rank, count),
            Exchange(base + offsets["logits", mode], columns, rank, count),
        )
