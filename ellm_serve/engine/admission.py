"""What may enter the engine: requests are checked here, so that nothing below has to.

Every id is in the vocabulary, the prompt fits into a slot with room for one more token, and the
queue of requests that have not started is bounded in number and in prompt tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ellm_serve.engine.executor import ExecutorLimits
from ellm_serve.engine.logits import LogitsProcessor
from ellm_serve.engine.sampler import MAX_SEED
from ellm_serve.engine.sequence import Sequence, Times
from ellm_serve.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from ellm_serve.request import GenerateRequest, TokenDelta

# What a client is told to wait before any prefill has been measured, and the bounds after that.
_FIRST_RETRY_S = 5.0
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 600.0


def validate(request: GenerateRequest, limits: ExecutorLimits) -> None:
    """Raises InvalidRequest or ContextLengthExceeded if the request can never be served."""
    sampling = request.sampling
    if not request.prompt_token_ids:
        raise InvalidRequest("The prompt must have at least one token.", "prompt")
    _check_ids(request.prompt_token_ids, limits.vocab_size, "prompt")
    _check_ids([token for token, _ in sampling.logit_bias], limits.vocab_size, "logit_bias")
    _check_ids(sampling.stop_token_ids, limits.vocab_size, "stop_token_ids")
    # Without any output the prompt may fill the slot; otherwise one more token must be possible.
    needed = len(request.prompt_token_ids) + (sampling.max_tokens != 0)
    if needed > limits.sequence_length:
        raise ContextLengthExceeded(needed, limits.sequence_length)


def _check_ids(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    low, high = min(token_ids, default=0), max(token_ids, default=0)
    if low < 0 or high >= vocab_size:
        raise InvalidRequest(
            f"Token id {low if low < 0 else high} in {param} is out of range: the vocabulary has"
            f" {vocab_size} tokens.",
            param,
        )


def new_sequence(
    request: GenerateRequest,
    limits: ExecutorLimits,
    eos_token_ids: frozenset[int],
    on_delta: Callable[[TokenDelta], None],
    now: float,
) -> Sequence:
    """The engine's state for a valid request."""
    sampling = request.sampling
    room = limits.sequence_length - len(request.prompt_token_ids)
    end_ids = frozenset(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        end_ids |= eos_token_ids
    return Sequence(
        request,
        on_delta,
        end_ids,
        room if sampling.max_tokens is None else min(sampling.max_tokens, room),
        secrets.randbelow(MAX_SEED) if sampling.seed is None else sampling.seed,
        LogitsProcessor(sampling, request.prompt_token_ids, end_ids, limits.vocab_size),
        Times(now),
    )


@dataclass(slots=True)
class QueueLoad:
    """Requests that have not started and the tokens of their prompts; `num_rejected` only grows."""

    max_requests: int
    max_tokens: int
    num_requests: int = 0
    num_tokens: int = 0
    num_rejected: int = 0

    def add(self, num_tokens: int, tokens_per_s: float) -> None:
        """Counts one more prompt. A single one is let in whatever its length.

        Raises:
            Overloaded: a bound would be passed. By the measured rate of prefill, half of the queue
                should be gone after `retry_after_s`.
        """
        full = self.num_requests >= self.max_requests
        if full or (self.num_requests and self.num_tokens + num_tokens > self.max_tokens):
            self.num_rejected += 1
            wait = self.num_tokens / (2 * tokens_per_s) if tokens_per_s else _FIRST_RETRY_S
            raise Overloaded(
                f"{self.num_requests} requests with {self.num_tokens} prompt tokens are waiting"
                " already; try again later.",
                min(max(wait, _MIN_RETRY_S), _MAX_RETRY_S),
            )
        self.num_requests += 1
        self.num_tokens += num_tokens

    def recount(self, waiting: Iterable[Sequence]) -> None:
        """Sets the load to what is waiting now."""
        lengths = [sequence.num_prompt_tokens for sequence in waiting]
        self.num_requests, self.num_tokens = len(lengths), sum(lengths)
