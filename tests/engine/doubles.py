"""Executors without a model: logits are a pure function of the tokens a slot really holds.

Each keeps its own model of the KV contents. An entry remembers its token and the hash of everything
before it, so computing on another prompt's rows gives other logits, and reading a position that was
never computed, was overwritten underneath, or is still in flight raises.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ellm_serve.engine.engine import Engine
from ellm_serve.engine.executor import ExecutorLimits, LogitRows, Span
from ellm_serve.errors import EngineError, KVExhausted
from ellm_serve.request import FinishReason, GenerateRequest, TokenDelta, TokenLogprobs

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One computed position: its token and the hash of all tokens up to it."""

    token: int
    chain: bytes


def extend(chain: bytes, token: int) -> bytes:
    """The hash of a prefix with one more token."""
    return hashlib.blake2b(chain + token.to_bytes(4, "little"), digest_size=8).digest()


class InvalidRead(AssertionError):
    """The engine used KV rows that do not hold what it believes."""


class ExecutorDouble:
    """Does what an executor does, on a table of hashes.

    segments: how many `run_prefill` calls a block takes, in turn.
    capacity: positions that may be committed over all slots.
    before: called before each step with "decode" or "prefill" and its spans; may raise or block.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        *,
        segments: Iterable[int] = (1,),
        capacity: int | None = None,
        before: Callable[[str, Sequence[Span]], None] | None = None,
    ) -> None:
        self.limits = limits
        self.capacity = capacity
        self.before = before
        self.closed = False
        self.num_computed = 0
        self.calls: list[tuple[str, tuple[Span, ...]]] = []
        self.committed = [0] * limits.num_slots
        self._segments = itertools.cycle(segments)
        self._kv: list[dict[int, Entry]] = [{} for _ in range(limits.num_slots)]
        self._block: tuple[Span, ...] | None = None
        self._left = 0
        # What was returned is a view; it is spoilt when the seam says it is no longer valid.
        self._decode_view = np.empty(0, np.float32)
        self._prefill_view = np.empty(0, np.float32)

    def logits_after(self, chain: bytes, prefix: Prefix) -> NDArray[np.float32]:
        """The model."""
        raise NotImplementedError

    # --- the seam ----------------------------------------------------------------------------

    def decode(self, spans: Sequence[Span]) -> NDArray[np.float32]:
        assert 0 < len(spans) <= self.limits.max_decode_rows
        assert all(len(span.token_ids) == 1 for span in spans)
        self._note("decode", spans)
        self._decode_view[:] = np.nan
        busy = {span.slot for span in self._block or ()}
        assert not busy & {span.slot for span in spans}, "decode of a slot that is in prefill"
        self._decode_view = self._compute(spans)
        return self._decode_view

    def start_prefill(self, spans: Sequence[Span]) -> None:
        assert self._block is None, "two blocks in flight"
        assert 0 < sum(len(span.token_ids) for span in spans) <= self.limits.prefill_block
        assert len({span.slot for span in spans}) == len(spans)
        self._block = tuple(spans)
        self._left = next(self._segments)
        for span in spans:
            self._forget(span)

    def run_prefill(self, budget_s: float) -> NDArray[np.float32] | None:
        assert self._block is not None and budget_s > 0
        self._note("prefill", self._block)
        self._left -= 1
        if self._left > 0:
            return None
        block, self._block = self._block, None
        self._prefill_view[:] = np.nan
        self._prefill_view = self._compute(block)
        return self._prefill_view

    def cancel_prefill(self) -> None:
        assert self._block is not None, "nothing to cancel"
        self._block = None
        self.calls.append(("cancel", ()))

    def commit(self, slot: int, length: int) -> None:
        assert 0 <= length <= self.limits.sequence_length
        more = max(0, length - self.committed[slot])
        if self.capacity is not None and sum(self.committed) + more > self.capacity:
            raise KVExhausted("the double's capacity is used up")
        self.committed[slot] += more

    def release(self, slot: int) -> None:
        assert slot not in {span.slot for span in self._block or ()}, "release under a block"
        self.committed[slot] = 0
        self._kv[slot].clear()

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        assert source != target and length <= self.committed[target]
        self._chain(source, length)
        for position in range(length):
            self._kv[target][position] = self._kv[source][position]

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True

    # --- the table ---------------------------------------------------------------------------

    def _note(self, kind: str, spans: Sequence[Span]) -> None:
        assert not self.closed
        if self.before is not None:
            self.before(kind, spans)
        self.calls.append((kind, tuple(spans)))

    def _forget(self, span: Span) -> None:
        for position in range(span.start, span.stop):
            self._kv[span.slot].pop(position, None)

    def _chain(self, slot: int, length: int) -> bytes:
        """The hash of positions [0, length), each checked against the one before."""
        chain = b""
        for position in range(length):
            entry = self._kv[slot].get(position)
            if entry is None:
                raise InvalidRead(f"slot {slot} position {position} is not computed")
            chain = extend(chain, entry.token)
            if entry.chain != chain:
                raise InvalidRead(f"slot {slot} position {position} is stale")
        return chain

    def _compute(self, spans: Sequence[Span]) -> NDArray[np.float32]:
        rows = []
        for span in spans:
            assert span.stop <= self.committed[span.slot], "no memory for this position"
            chain = self._chain(span.slot, span.start)
            kv = self._kv[span.slot]
            prefix = tuple(kv[position].token for position in range(span.start))
            for offset, token in enumerate(span.token_ids):
                assert 0 <= token < self.limits.vocab_size
                chain = extend(chain, token)
                prefix = (*prefix, token)
                kv[span.start + offset] = Entry(token, chain)
                last = offset == len(span.token_ids) - 1
                if span.logits is LogitRows.ALL or (last and span.logits is LogitRows.LAST):
                    rows.append(self.logits_after(chain, prefix))
            self.num_computed += len(span.token_ids)
        assert len(rows) <= max(self.limits.max_logit_rows, self.limits.max_decode_rows)
        return np.array(rows, np.float32).reshape(len(rows), self.limits.vocab_size)


class HashExecutor(ExecutorDouble):
    """Logits drawn from a generator seeded with the hash of the prefix."""

    def logits_after(self, chain: bytes, prefix: Prefix) -> NDArray[np.float32]:
        generator = np.random.default_rng(int.from_bytes(chain, "little"))
        return (generator.standard_normal(self.limits.vocab_size) * 3).astype(np.float32)


class ScriptedExecutor(ExecutorDouble):
    """Says `script(prefix)` next, with certainty; NaN logits where that is None."""

    def __init__(
        self,
        limits: ExecutorLimits,
        script: Callable[[Prefix], int | None],
        *,
        segments: Iterable[int] = (1,),
        capacity: int | None = None,
        before: Callable[[str, Sequence[Span]], None] | None = None,
    ) -> None:
        super().__init__(limits, segments=segments, capacity=capacity, before=before)
        self._script = script

    def logits_after(self, chain: bytes, prefix: Prefix) -> NDArray[np.float32]:
        token = self._script(prefix)
        row = np.full(self.limits.vocab_size, np.nan if token is None else 0.0, np.float32)
        if token is not None:
            row[token] = 50.0
        return row


class FailOnce:
    """A `before` hook that raises at the n-th step of a kind."""

    def __init__(self, kind: str, number: int, error: Exception) -> None:
        self._kind, self._number, self._error = kind, number, error

    def __call__(self, kind: str, spans: Sequence[Span]) -> None:
        if kind == self._kind:
            self._number -= 1
            if self._number == 0:
                raise self._error


def step_error() -> EngineError:
    """A failure the engine survives."""
    return EngineError("the step was lost")


# --- consumers -----------------------------------------------------------------------------------


def limits(**changes: int) -> ExecutorLimits:
    """Small limits, so that every border is near."""
    small = ExecutorLimits(
        num_slots=4,
        sequence_length=64,
        max_decode_rows=4,
        prefill_block=16,
        max_logit_rows=8,
        vocab_size=48,
    )
    return replace(small, **changes)


class Consumer:
    """Collects the deltas of one request; `wait` fails rather than hang."""

    def __init__(self, on_delta: Callable[[TokenDelta], None] | None = None) -> None:
        self.deltas: list[TokenDelta] = []
        self._done = threading.Event()
        self._on_delta = on_delta

    def __call__(self, delta: TokenDelta) -> None:
        assert not self._done.is_set(), "a delta after the last one"
        self.deltas.append(delta)
        if delta.finish_reason is not None:
            self._done.set()
        if self._on_delta is not None:
            self._on_delta(delta)

    def wait(self) -> Consumer:
        assert self._done.wait(30), "the request never ended"
        return self

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def last(self) -> TokenDelta:
        return self.deltas[-1]

    @property
    def outcome(self) -> tuple[list[int], FinishReason | None, int | None, list[TokenLogprobs]]:
        """Everything that must not depend on neighbours."""
        logprobs = [entry for delta in self.deltas for entry in delta.logprobs]
        return self.token_ids, self.last.finish_reason, self.last.stop_token_id, logprobs


def run(engine: Engine, request: GenerateRequest) -> Consumer:
    """Generates one request to its end."""
    consumer = Consumer()
    engine.submit(request, consumer)
    return consumer.wait()


def alone(request: GenerateRequest, bounds: ExecutorLimits) -> Consumer:
    """The request by itself, on an engine that has served nothing else."""
    with Engine(HashExecutor(bounds), eos_token_ids=[EOS]) as engine:
        return run(engine, request)


EOS = 1
