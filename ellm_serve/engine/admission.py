"""What may enter the engine: requests are checked here, so that nothing below has to.

Every id is in the vocabulary, the prompt fits into a slot with room for one more token, and the
queue of requests that have not started is bounded in number and in prompt tokens, for all
principals together and for each.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import chain

from ellm_serve.engine.executor import ExecutorLimits
from ellm_serve.engine.logits import LogitsProcessor
from ellm_serve.engine.sampler import MAX_SEED
from ellm_serve.engine.sequence import Sequence, Times
from ellm_serve.errors import ContextLengthExceeded, InvalidRequest, Overloaded, QueueBound
from ellm_serve.grammar.constraint import CompiledGrammar, Constraint
from ellm_serve.request import GenerateRequest, TokenDelta

# What a client is told to wait before any prefill has been measured, and the bounds after that.
_FIRST_RETRY_S = 5.0
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 600.0
# One part of this many is kept for other principals than the one that fills the queue.
_RESERVE_PARTS = 8


def validate(request: GenerateRequest, limits: ExecutorLimits) -> None:
    """Raises InvalidRequest or ContextLengthExceeded if the request can never be served."""
    sampling = request.sampling
    if not request.prompt_token_ids:
        raise InvalidRequest("The prompt must have at least one token.", "prompt")
    _check_ids(request.prompt_token_ids, limits.vocab_size, "prompt")
    _check_ids([token for token, _ in sampling.logit_bias], limits.vocab_size, "logit_bias")
    _check_ids(sampling.stop_token_ids, limits.vocab_size, "stop_token_ids")
    _check_ids(sampling.allowed_token_ids or (), limits.vocab_size, "allowed_token_ids")
    _check_ids(list(chain.from_iterable(sampling.bad_words)), limits.vocab_size, "bad_words")
    # Without any output the prompt may fill the slot; otherwise one more token must be possible.
    needed = len(request.prompt_token_ids) + (sampling.max_tokens != 0)
    if needed > limits.sequence_length:
        raise ContextLengthExceeded(needed, limits.sequence_length)


def _check_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
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
    grammar: CompiledGrammar | None = None,
) -> Sequence:
    """The engine's state for a valid request.

    With `ignore_eos` the model's own end ids mean nothing, except at the end of a grammar.
    """
    sampling = request.sampling
    room = limits.sequence_length - len(request.prompt_token_ids)
    end_ids = frozenset(sampling.stop_token_ids)
    if not sampling.ignore_eos or grammar is not None:
        end_ids |= eos_token_ids
    constraint = None
    if grammar is not None:
        assert grammar.vocab_size == limits.vocab_size
        constraint = _constraint(request, eos_token_ids, grammar)
    return Sequence(
        request,
        on_delta,
        end_ids,
        room if sampling.max_tokens is None else min(sampling.max_tokens, room),
        secrets.randbelow(MAX_SEED) if sampling.seed is None else sampling.seed,
        LogitsProcessor(sampling, request.prompt_token_ids, end_ids, limits.vocab_size, constraint),
        Times(now),
    )


def _constraint(
    request: GenerateRequest, eos_token_ids: frozenset[int], grammar: CompiledGrammar
) -> Constraint:
    sampling = request.sampling
    stop_ids = frozenset(sampling.stop_token_ids)
    if not eos_token_ids | stop_ids:
        raise InvalidRequest("A grammar needs a token that ends the answer.", "stop_token_ids")
    return grammar.constraint(
        stop_ids if sampling.ignore_eos else eos_token_ids | stop_ids,
        eos_token_ids if sampling.ignore_eos else (),
        request.grammar_after,
    )


def share(bound: int) -> int:
    """How much of the queue's bound one principal may use: seven eighths, rounded up."""
    return bound - bound // _RESERVE_PARTS


@dataclass(slots=True)
class Load:
    """Requests that have not started, and the tokens of their prompts."""

    num_requests: int = 0
    num_tokens: int = 0

    def add(self, num_tokens: int) -> None:
        """Counts one more prompt."""
        self.num_requests += 1
        self.num_tokens += num_tokens

    def full(self, num_tokens: int, max_requests: int, max_tokens: int) -> QueueBound | None:
        """The bound that one more prompt would pass; a first one may have any length."""
        if self.num_requests >= max_requests:
            return "requests"
        if self.num_requests and self.num_tokens + num_tokens > max_tokens:
            return "tokens"
        return None


class QueueLoad:
    """The load of the queue, and whether it takes one more. `num_rejected` only grows.

    All principals together may have `max_requests` waiting, with `max_tokens` in their prompts;
    one principal may have its `share` of either, so that another one finds room in a queue that
    the first has filled.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.num_rejected = 0
        self.all = Load()
        self._own: defaultdict[str, Load] = defaultdict(Load)

    def add(self, principal: str, num_tokens: int, tokens_per_s: float) -> None:
        """Counts one more prompt.

        Raises:
            Overloaded: a bound would be passed. By the measured rate of prefill, half of what
                waits should be gone after `retry_after_s`.
        """
        own = self._own[principal]
        bound = self.all.full(num_tokens, self._max_requests, self._max_tokens)
        bound = bound or own.full(num_tokens, share(self._max_requests), share(self._max_tokens))
        if bound is not None:
            self.num_rejected += 1
            raise self._overloaded(tokens_per_s, bound)
        self.all.add(num_tokens)
        own.add(num_tokens)

    def _overloaded(self, tokens_per_s: float, bound: QueueBound) -> Overloaded:
        wait = self.all.num_tokens / (2 * tokens_per_s) if tokens_per_s else _FIRST_RETRY_S
        return Overloaded(
            f"{self.all.num_requests} requests with {self.all.num_tokens} prompt tokens are"
            " waiting already; try again later.",
            min(max(wait, _MIN_RETRY_S), _MAX_RETRY_S),
            bound,
        )

    def recount(self, waiting: Iterable[Sequence]) -> None:
        """Sets the load to what is waiting now."""
        self.all = Load()
        self._own.clear()
        for sequence in waiting:
            self.all.add(sequence.num_prompt_tokens)
            self._own[sequence.request.principal].add(sequence.num_prompt_tokens)
