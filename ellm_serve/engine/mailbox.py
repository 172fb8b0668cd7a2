"""The mailbox of one socket and mode: a step's descriptor and the arrays it points to.

The engine writes spans, the socket's threads read them. The socket itself writes the addresses
once (`bind`), since only its own mapping of the memory counts for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ellm_kernels import opcodes as oc
from ellm_serve.engine.executor import LogitRows, Span
from ellm_serve.graph.group_layout import SPAN_WORDS, MailboxLayout
from ellm_serve.graph.program import Table
from ellm_serve.graph.tensor import Mode
from ellm_serve.model.region import Memory


class Mailbox:
    """A place in memory with the layout `MailboxLayout`."""

    def __init__(self, memory: Memory, offset: int, layout: MailboxLayout) -> None:
        self._memory = memory
        self._offset = offset
        self._layout = layout
        self.address = memory.address + offset
        self._step = self._view("step", np.int64)
        self._token_ids = self._view("token_ids", np.int32)
        self._slots = self._view("slots", np.int32)
        self._positions = self._view("positions", np.int32)
        self._spans = self._view("spans", np.int64).reshape(-1, SPAN_WORDS)
        self._logit_rows = self._view("logit_rows", np.int32)

    def _view(self, name: str, dtype: type[np.generic]) -> NDArray[Any]:
        offset, size = self._layout.fields()[name]
        count = size // np.dtype(dtype).itemsize
        return self._memory.array(self._offset + offset, (count,), dtype)

    def bind(self, table: Table, table_address: int) -> None:
        """Written by the socket: what its threads need besides the spans; starts from zero."""
        assert table.num_rows <= self._layout.table_rows
        at = {name: self.address + offset for name, (offset, _) in self._layout.fields().items()}
        for name in ("step", "countdown", "times"):
            self._view(name, np.int64)[:] = 0
        fixed = {
            oc.STEP_TABLE: table_address, oc.STEP_NUM_OPS: table.num_rows,
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
            stop = row + len(span.token_ids)
            assert stop <= self._layout.rows, "more rows than a step holds"
            self._token_ids[row:stop] = span.token_ids
            self._slots[row:stop] = span.slot
            self._positions[row:stop] = np.arange(span.start, span.stop)
            self._spans[index] = (span.slot, span.start, row, stop - row)
            match span.logits:
                case LogitRows.LAST:
                    logit_rows.append(stop - 1)
                case LogitRows.ALL:
                    logit_rows += range(row, stop)
                case LogitRows.NONE:
                    pass
            row = stop
        assert len(logit_rows) <= self._layout.logit_rows, "more logit rows than a step holds"
        self._logit_rows[: len(logit_rows)] = logit_rows
        step = {
            oc.STEP_ROWS: row, oc.STEP_LOGIT_ROWS: len(logit_rows), oc.STEP_SPANS: len(spans),
            oc.STEP_CONTEXT: max(span.stop for span in spans),
            oc.STEP_SHARED_SLOTS: int(len({span.slot for span in spans}) < row),
            oc.STEP_OP: 0, oc.STEP_PART: 0,
        }  # fmt: skip
        for word, value in step.items():
            self._step[word] = value
        return len(logit_rows)

    @property
    def finished(self) -> bool:
        """True when the step has run its last op."""
        return bool(self._step[oc.STEP_OP] >= self._step[oc.STEP_NUM_OPS])

    def take_times(self) -> NDArray[np.int64]:
        """Cycles per [thread, table row, (busy, waiting)] since the last call."""
        rows = int(self._step[oc.STEP_NUM_OPS])
        flat = self._view("times", np.int64)[: 2 * rows * self._layout.num_threads]
        times: NDArray[np.int64] = flat.reshape(self._layout.num_threads, rows, 2).copy()
        flat[:] = 0
        return times
