"""The seam between the engine and whatever computes: spans of tokens in, rows of logits out.

The engine owns slots, positions and lengths; an executor owns memory and arithmetic and decides
nothing. Position p of a slot is valid once it was computed, and a later write replaces it. Results
are bit-equal however a prompt is cut into spans and blocks. Everything in a span was validated
before it gets here: nothing below checks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class LogitRows(Enum):
    """Which rows of a span return logits."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens to compute now, at contiguous positions of one slot from `start` on."""

    slot: int
    start: int
    token_ids: tuple[int, ...]
    logits: LogitRows

    @property
    def stop(self) -> int:
        """The position after the last one."""
        return self.start + len(self.token_ids)

    @property
    def num_logit_rows(self) -> int:
        """Rows of logits this span returns."""
        match self.logits:
            case LogitRows.NONE:
                return 0
            case LogitRows.LAST:
                return 1
            case LogitRows.ALL:
                return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """What one call may ask for."""

    num_slots: int
    sequence_length: int
    max_decode_rows: int
    prefill_block: int
    max_logit_rows: int
    vocab_size: int


class Executor(Protocol):
    """Computes spans. All calls come from the engine's loop thread."""

    @property
    def limits(self) -> ExecutorLimits:
        """Fixed for the executor's life."""
        ...

    def decode(self, spans: Sequence[Span]) -> NDArray[np.float32]:
        """Computes at most `max_decode_rows` tokens; may run while a prefill block is in flight.

        Returns logits [sum of logit rows, vocab] in span order, then row order: a view that is
        valid until the next `decode`.

        Raises:
            WorkerDied: nothing can be computed any more.
            EngineError: this step is lost, the next one may work.
        """
        ...

    def start_prefill(self, spans: Sequence[Span]) -> None:
        """Sets up one block of at most `prefill_block` tokens in all. At most one is in flight."""
        ...

    def run_prefill(self, budget_s: float) -> NDArray[np.float32] | None:
        """Works on the block for about `budget_s`.

        None: stopped at a yield point, call again. Otherwise the block's logits, in a buffer of
        their own that is valid until the next block ends.

        Raises:
            EngineError: the block failed; it is in flight until `cancel_prefill` is called.
        """
        ...

    def cancel_prefill(self) -> None:
        """Drops the block in flight; the positions it covered are not valid."""
        ...

    def commit(self, slot: int, length: int) -> None:
        """Makes sure that positions [0, length) have memory.

        Raises:
            KVExhausted: there is none left.
        """
        ...

    def release(self, slot: int) -> None:
        """Gives the slot's memory back; none of its positions is valid afterwards."""
        ...

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copies the KV rows of positions [0, length) from one slot to another."""
        ...

    def close(self) -> None:
        """Stops threads and gives memory back."""
        ...
