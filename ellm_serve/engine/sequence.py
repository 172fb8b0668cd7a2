"""One request being generated: its tokens, where it stands, and how it ends.

Only the token list and the number of computed positions are stored; every other length follows.
The last sampled token is never computed by the request that sampled it. A sequence is written by
the engine's loop thread alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from ellm_serve.engine.executor import LogitRows, Span
from ellm_serve.engine.logits import LogitsProcessor
from ellm_serve.engine.session_cache import Lease
from ellm_serve.engine.stats import RequestStats
from ellm_serve.request import (
    FinishReason,
    GenerateRequest,
    TokenDelta,
    TokenLogprobs,
    Usage,
)


class Phase(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(slots=True)
class Times:
    """Moments on the engine's clock; None until reached."""

    submitted: float
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    max_token_gap_s: float = 0.0

    def token(self, now: float) -> None:
        """A token came out."""
        if self.first_token is None:
            self.first_token = now
        if self.last_token is not None:
            self.max_token_gap_s = max(self.max_token_gap_s, now - self.last_token)
        self.last_token = now

    def phases(self, now: float) -> tuple[float, float, float]:
        """Seconds in queue, prefill and decode, for a request that ends now."""
        started = now if self.started is None else self.started
        first_token = now if self.first_token is None else self.first_token
        return started - self.submitted, first_token - started, now - first_token


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request."""

    request: GenerateRequest
    on_delta: Callable[[TokenDelta], None]
    end_ids: frozenset[int]
    max_output_tokens: int
    seed: int
    processor: LogitsProcessor
    times: Times
    token_ids: array[int] = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    phase: Phase = Phase.WAITING
    lease: Lease | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    _deliverable: bool = True

    def __post_init__(self) -> None:
        self.token_ids = array("i", self.request.prompt_token_ids)

    def __str__(self) -> str:
        return f"Request {self.request.request_id}"

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, an end id included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens still to compute before the next one can be sampled.

        The prompt's; after a sequence gave up its memory, its earlier output's as well.
        """
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether every prompt position must still return logits."""
        return self.request.sampling.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(self.num_prompt_tokens, self.num_cached_tokens, self.num_output_tokens)

    def prefill_span(self, max_tokens: int) -> Span:
        """The next known tokens to compute, at most `max_tokens`."""
        assert self.lease is not None and max_tokens > 0
        start = self.num_computed_tokens
        stop = min(start + max_tokens, len(self.token_ids))
        if self.wants_prompt_logprobs:
            rows = LogitRows.ALL
        elif stop == len(self.token_ids) and self.max_output_tokens > 0:
            rows = LogitRows.LAST
        else:
            rows = LogitRows.NONE
        return Span(self.lease.slot, start, tuple(self.token_ids[start:stop]), rows)

    def decode_span(self) -> Span:
        """The token sampled last."""
        assert self.lease is not None and self.num_computed_tokens == len(self.token_ids) - 1
        last = (self.token_ids[-1],)
        return Span(self.lease.slot, self.num_computed_tokens, last, LogitRows.LAST)

    def append(self, token_id: int) -> FinishReason | None:
        """Takes a sampled token; says whether it was the last."""
        self.token_ids.append(token_id)
        self.processor.observe(token_id)
        if token_id in self.end_ids:
            return FinishReason.STOP
        if self.num_output_tokens >= self.max_output_tokens:
            return FinishReason.LENGTH
        return None

    def deliver(
        self,
        time: float,
        token_ids: tuple[int, ...] = (),
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        error: str | None = None,
    ) -> None:
        """Hands a delta to the consumer, with the prompt's log-probabilities if still due.

        A consumer that raised is never called again.
        """
        if not self._deliverable:
            return
        prompt_logprobs = tuple(self.prompt_logprobs) if error is None else ()
        delta = TokenDelta(
            self.request.request_id, token_ids, self.usage, finish_reason, stop_token_id, logprobs,
            prompt_logprobs, error, time, self.times.started,
        )  # fmt: skip
        self.prompt_logprobs.clear()
        self._deliverable = False
        self.on_delta(delta)
        self._deliverable = True

    def stats(self, finish_reason: FinishReason, now: float) -> RequestStats:
        """Numbers of a request that ends now."""
        queue_s, prefill_s, decode_s = self.times.phases(now)
        return RequestStats(
            self.request.request_id, finish_reason, self.usage, queue_s, prefill_s, decode_s,
            self.times.max_token_gap_s,
        )  # fmt: skip
