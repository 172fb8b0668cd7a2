"""One request being generated: its tokens, where it stands, and how it ends.

Only the token list and the number of computed positions are stored; every other length follows.
The last sampled token is never computed by the request that sampled it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from ellm_serve.engine.logits import LogitsProcessor
from ellm_serve.engine.sampler import MAX_SEED
from ellm_serve.engine.session_cache import Lease
from ellm_serve.engine.stats import RequestStats
from ellm_serve.request import FinishReason, GenerateRequest, TokenLogprobs, Usage


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


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one request. Written by the engine's loop thread alone."""

    request: GenerateRequest
    end_ids: frozenset[int]
    max_output_tokens: int
    processor: LogitsProcessor
    on_delta: Callable[[object], None]
    times: Times
    token_ids: list[int] = field(init=False)
    seed: int = field(init=False)
    phase: Phase = Phase.WAITING
    lease: Lease | None = None
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    deliverable: bool = True
