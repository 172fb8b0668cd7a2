"""Decides what the next step computes: one token of every decoding row, one segment of prefill.

One prefill block is in flight at most. Order is that of the queue (`waiting`), with two exceptions:
a prompt whose uncomputed part fits into the rest of a block joins it, and while a longer prompt
needs several blocks up to half of each goes to such short ones. So the first in line always
advances, and short prompts never wait for all of a long one. A sequence gets its slot when its
first block is built; until then nothing of it exists but its place in the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from ellm_serve.engine.executor import Executor, Span
from ellm_serve.engine.sequence import Phase, Sequence
from ellm_serve.engine.session_cache import SessionCache
from ellm_serve.engine.waiting import FairQueue

# Tokens of waiting prompts that are matched with resident sessions to fill one block: running
# streams wait for it, a few nanoseconds per token and session that shares it.
_MAX_TOKENS_MATCHED = 1 << 20


@dataclass(slots=True)
class PrefillBlock:
    """Spans computed together."""

    room: int
    logit_room: int
    sequences: list[Sequence] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of all spans."""
        return sum(len(span.token_ids) for span in self.spans)

    def add(self, sequence: Sequence, span: Span) -> None:
        """Takes a span and its share of the room."""
        self.sequences.append(sequence)
        self.spans.append(span)
        self.room -= len(span.token_ids)
        self.logit_room -= span.num_logit_rows


@dataclass(slots=True)
class Step:
    """What to compute now. `starved` sequences can never get memory and must end."""

    decode: list[Sequence]
    block: PrefillBlock | None
    starved: list[Sequence]

    @property
    def empty(self) -> bool:
        """Nothing to do at all."""
        return not self.decode and self.block is None and not self.starved


class Scheduler:
    """Queues and the block in flight. The engine calls it from its loop thread only."""

    def __init__(self, executor: Executor, cache: SessionCache, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._clock = clock
        self._limits = executor.limits
        self._cache = cache
        self._fork_threshold = cache.fork_threshold
        self._block: PrefillBlock | None = None
        # No memory for the first prompt in line: not tried again until a sequence has ended.
        self._out_of_memory = False
        self.num_requeued = 0
        self.waiting = FairQueue(self._limits.prefill_block)
        self.prefilling: list[Sequence] = []
        self.decoding: deque[Sequence] = deque()

    @property
    def has_work(self) -> bool:
        """Whether any sequence is alive."""
        return bool(self.waiting or self.prefilling or self.decoding or self._block)

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence into the queue."""
        self.waiting.add(sequence)

    def schedule(self) -> Step:
        """The next step. Also takes leases and starts or cancels blocks."""
        starved: list[Sequence] = []
        self._cancel_dead_block()
        if self._block is None:
            self._start_block(starved)
        decode = self._decode_rows(starved)
        return Step(decode, self._block, starved)

    def prefilled(self, block: PrefillBlock) -> None:
        """The block in flight is done: its rows are valid now, except those of ended sequences."""
        assert block is self._block
        self._block = None
        for sequence, span in zip(block.sequences, block.spans, strict=True):
            if sequence.phase is Phase.FINISHED:
                self._end_lease(sequence)
                continue
            self._advance(sequence, span.stop)
            if sequence.num_uncomputed_tokens == 0:
                self.prefilling.remove(sequence)
                self.decoding.append(sequence)
                sequence.phase = Phase.DECODE

    def decoded(self, sequence: Sequence) -> None:
        """One more token of a decoding sequence is computed."""
        self._advance(sequence, sequence.num_computed_tokens + 1)

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, in whatever phase; its computed rows stay for the next turn.

        A slot that the block in flight writes to stays leased until that block is over.
        """
        match sequence.phase:
            case Phase.WAITING:
                self.waiting.remove(sequence)
            case Phase.PREFILL:
                self.prefilling.remove(sequence)
            case Phase.DECODE:
                self.decoding.remove(sequence)
            case Phase.FINISHED:
                return
        sequence.phase = Phase.FINISHED
        if self._block is None or sequence not in self._block.sequences:
            self._end_lease(sequence)

    def drop_block(self) -> None:
        """Gives up the block in flight; its live sequences compute those tokens again."""
        if self._block is None:
            return
        block, self._block = self._block, None
        self._executor.cancel_prefill()
        for sequence in block.sequences:
            if sequence.phase is Phase.FINISHED:
                self._end_lease(sequence)

    def _cancel_dead_block(self) -> None:
        block = self._block
        if block is not None and all(s.phase is Phase.FINISHED for s in block.sequences):
            self.drop_block()

    def _advance(self, sequence: Sequence, num_computed_tokens: int) -> None:
        assert sequence.lease is not None
        sequence.num_computed_tokens = num_computed_tokens
        self._cache.advance(sequence.lease, num_computed_tokens)

    def _end_lease(self, sequence: Sequence) -> None:
        self._out_of_memory = False
        if sequence.lease is not None:
            lease, sequence.lease = sequence.lease, None
            self._cache.commit(lease)

    # --- decode ------------------------------------------------------------------------------

    def _decode_rows(self, starved: list[Sequence]) -> list[Sequence]:
        """Up to `max_decode_rows` rows, in turn if there are more.

        A row without memory for its next token sits out until another one ends. If all sit out
        and nothing is being computed, the one that started last gives its memory up and goes back
        to the queue; only a sequence that is alone ends for lack of memory.
        """
        rows = []
        for sequence in islice(self.decoding, self._limits.max_decode_rows):
            assert sequence.lease is not None
            if self._cache.reserve(sequence.lease, sequence.num_computed_tokens + 1):
                rows.append(sequence)
        if len(self.decoding) > self._limits.max_decode_rows:
            self.decoding.rotate(-self._limits.max_decode_rows)
        if not self.decoding or rows or self._block is not None:
            return rows
        youngest = self.prefilling[-1] if self.prefilling else _youngest(self.decoding)
        if len(self.decoding) == 1 and youngest is self.decoding[0]:
            starved.append(youngest)
            return rows
        self._requeue(youngest)
        return self._decode_rows(starved)

    # --- prefill -----------------------------------------------------------------------------

    def _start_block(self, starved: list[Sequence]) -> None:
        head = self._head()
        if head is None:
            return
        limits = self._limits
        block = PrefillBlock(limits.prefill_block, limits.max_logit_rows)
        longer = head.num_uncomputed_tokens > block.room
        if longer:
            self._join_short(block, block.room // 2, head)
        if self._add(block, head, block.room) and not longer:
            self._join_short(block, block.room, head)
        if not block.spans:
            self._wait_for_memory(head, starved)
            return
        self._executor.start_prefill(block.spans)
        self._block = block

    def _head(self) -> Sequence | None:
        """The prompt that is next in line, with a lease."""
        if self.prefilling:
            return self.prefilling[0]
        if self._out_of_memory:
            return None
        if not (self.waiting and self._cache.num_idle):
            return None
        first = self.waiting.in_order()[0]
        return first if self._admit(first) else None

    def _admit(self, sequence: Sequence) -> bool:
        """Takes a lease and moves the sequence from the queue to prefill, if a slot is idle."""
        request = sequence.request
        lease = self._cache.lease(
            request.session_key,
            request.cache_owner,
            sequence.token_ids,
            reuse=not sequence.wants_prompt_logprobs,
        )
        if lease is None:
            return False
        self.waiting.start(sequence, len(sequence.token_ids) - lease.num_cached_tokens)
        self.prefilling.append(sequence)
        sequence.phase = Phase.PREFILL
        sequence.lease = lease
        sequence.num_computed_tokens = lease.num_cached_tokens
        if sequence.times.started is None:
            sequence.times.started = self._clock()
            sequence.num_cached_tokens = lease.num_cached_tokens
        return True

    def _add(self, block: PrefillBlock, sequence: Sequence, room: int) -> bool:
        """Adds as much of a prompt as fits; False if there is no memory for it."""
        if sequence.wants_prompt_logprobs:
            room = min(room, block.logit_room)
        span = sequence.prefill_span(room)
        assert sequence.lease is not None
        if not self._cache.reserve(sequence.lease, span.stop):
            return False
        block.add(sequence, span)
        return True

    def _join_short(self, block: PrefillBlock, room: int, head: Sequence) -> None:
        """Adds waiting prompts whose uncomputed part fits into `room` tokens."""
        num_matched = 0
        for sequence in self.waiting.in_order():
            num_matched += len(sequence.token_ids)
            # The head needs at least one row of logits for itself.
            full = not room or not self._cache.num_idle or block.logit_room < 2
            if full or self._out_of_memory or num_matched > _MAX_TOKENS_MATCHED:
                return
            num_cached = self._match(sequence)
            num_new = len(sequence.token_ids) - num_cached
            rows = num_new if sequence.wants_prompt_logprobs else 1
            if num_new > room or rows >= block.logit_room:
                continue
            if num_cached < self._fork_threshold and self._will_fork(sequence, head):
                continue
            if not self._admit(sequence):
                return
            if not self._add(block, sequence, num_new):
                self._requeue(sequence)
                return
            room -= num_new

    def _match(self, sequence: Sequence) -> int:
        if sequence.wants_prompt_logprobs:
            return 0
        request = sequence.request
        return self._cache.match(request.session_key, request.cache_owner, sequence.token_ids)

    def _will_fork(self, sequence: Sequence, head: Sequence) -> bool:
        """Whether it is better to wait: the head is about to compute the start of this prompt."""
        count = self._fork_threshold
        return (
            sequence.num_prompt_tokens > count
            and head.num_prompt_tokens > count
            and sequence.request.cache_owner == head.request.cache_owner
            and not sequence.wants_prompt_logprobs
            and head.num_computed_tokens < count
            and sequence.token_ids[:count] == head.token_ids[:count]
        )

    def _wait_for_memory(self, head: Sequence, starved: list[Sequence]) -> None:
        if self.decoding:
            self._requeue(head)
        else:
            starved.append(head)

    def _requeue(self, sequence: Sequence) -> None:
        """Back to the head of the queue; what was computed stays an idle session meanwhile."""
        if sequence.phase is Phase.PREFILL:
            self.prefilling.remove(sequence)
            sequence.prompt_logprobs.clear()
        else:
            self.decoding.remove(sequence)
        self._end_lease(sequence)
        sequence.phase = Phase.WAITING
        self.waiting.put_back(sequence)
        self._out_of_memory = True
        self.num_requeued += 1


def _youngest(sequences: Iterable[Sequence]) -> Sequence:
    return max(sequences, key=lambda sequence: sequence.times.started or 0.0)
