"""The mailbox of one mode: a step's descriptor and the arrays it points to, at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ellm_kernels import opcodes as oc
from ellm_serve.engine.executor import LogitRows, Span
from ellm_serve.graph.program import Table
from ellm_serve.graph.tensor import Arena, Mode
from ellm_serve.model.region import Region

_SPAN_WORDS = 4


class StepInput:
    """Writes spans into memory that the pinned threads read."""

    def __init__(self, table: Table, arena: Arena, num_kv_heads: int) -> None:
        self._table = table
        self._arena = arena
        rows, spans = arena.num_rows, arena.num_rows
        sizes = {
            "step": 8 * oc.STEP_WORDS,
            "table": table.words.nbytes,
            "token_ids": 4 * rows,
            "slots": 4 * rows,
            "positions": 4 * rows,
            "spans": 8 * _SPAN_WORDS * spans,
            "logit_rows": 4 * arena.num_logit_rows,
            "times": 16 * arena.num_threads * table.num_rows,
            "countdown": 8 * rows * num_kv_heads,
        }
        offsets: dict[str, int] = {}
        total = 0
        for name, size in sizes.items():
            offsets[name] = total
            total += -(-size // 64) * 64
        self._region = Region(total)
        at = {name: self._region.address + offset for name, offset in offsets.items()}

        def view(name: str, dtype: type[np.generic]) -> NDArray[np.generic]:
            count = sizes[name] // np.dtype(dtype).itemsize
            return self._region.array(offsets[name], (count,), dtype)

        view("table", np.int64)[:] = table.words.reshape(-1)
        self.address = at["step"]
        self._step = view("step", np.int64)
        self._token_ids = view("token_ids", np.int32)
        self._slots = view("slots", np.int32)
        self._positions = view("positions", np.int32)
        self._spans = view("spans", np.int64).reshape(-1, _SPAN_WORDS)
        self._logit_rows = view("logit_rows", np.int32)
        self._times = view("times", np.int64).reshape(arena.num_threads, table.num_rows, 2)
        fixed = {
            oc.STEP_TABLE: at["table"], oc.STEP_NUM_OPS: table.num_rows,
            oc.STEP_DYNAMIC: int(table.mode is Mode.MANY), oc.STEP_TOKEN_IDS: at["token_ids"],
            oc.STEP_ROW_SLOTS: at["slots"], oc.STEP_ROW_POSITIONS: at["positions"],
            oc.STEP_SPAN_TABLE: at["spans"], oc.STEP_LOGIT_ROW_LIST: at["logit_rows"],
            oc.STEP_TIMES: at["times"], oc.STEP_COUNTDOWN: at["countdown"],
        }  # fmt: skip
        for index, value in fixed.items():
            self._step[index] = value

    def write(self, spans: Sequence[Span]) -> int:
        """Sets up a step from its first op on; returns the number of logit rows."""
        row = 0
        logit_rows: list[int] = []
        for index, span in enumerate(spans):
            count = len(span.token_ids)
            stop = row + count
            assert stop <= self._arena.num_rows, "more rows than the arena holds"
            self._token_ids[row:stop] = span.token_ids
            self._slots[row:stop] = span.slot
            self._positions[row:stop] = np.arange(span.start, span.stop)
            self._spans[index] = (span.slot, span.start, row, count)
            match span.logits:
                case LogitRows.LAST:
                    logit_rows.append(stop - 1)
                case LogitRows.ALL:
                    logit_rows += range(row, stop)
                case LogitRows.NONE:
                    pass
            row = stop
        assert len(logit_rows) <= self._arena.num_logit_rows, "more logit rows than the arena holds"
        self._logit_rows[: len(logit_rows)] = logit_rows
        self._step[oc.STEP_ROWS] = row
        self._step[oc.STEP_LOGIT_ROWS] = len(logit_rows)
        self._step[oc.STEP_SPANS] = len(spans)
        self._step[oc.STEP_CONTEXT] = max(span.stop for span in spans)
        slots = {span.slot for span in spans}
        shared = len(slots) < row
        self._step[oc.STEP_SHARED_SLOTS] = int(shared)
        self._step[oc.STEP_OP] = 0
        self._step[oc.STEP_PART] = 0
        return len(logit_rows)

    @property
    def finished(self) -> bool:
        """True when the step has run its last op."""
        return int(self._step[oc.STEP_OP]) >= self._table.num_rows

    def take_times(self) -> NDArray[np.int64]:
        """Cycles per [thread, table row, (busy, waiting)] since the last call."""
        times: NDArray[np.int64] = self._times.astype(np.int64)
        self._times[:] = 0
        return times
