"""Plain numbers about the engine and its requests; what exports them lives elsewhere.

Counters are written by the engine's loop thread alone and only ever grow; readers get copies.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from ellm_serve.request import FinishReason, Usage

# Weight of the newest measurement in the moving prefill rate.
_NEWEST = 0.2


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One finished request. Phases it never reached took 0 s."""

    request_id: str
    finish_reason: FinishReason
    usage: Usage
    queue_s: float
    prefill_s: float
    decode_s: float
    max_token_gap_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a running request is.

    phase: "waiting", "prefill" or "decode". num_computed_tokens counts cached tokens and output
    too; during a prefill it moves block by block. num_ahead: requests that the queue would start
    first, 0 once started.
    """

    phase: str
    num_computed_tokens: int
    num_prompt_tokens: int
    num_ahead: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step: prompt tokens whose block it completed, tokens decoded, seconds of computing."""

    num_prefill_tokens: int
    num_decode_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SessionStats:
    """One slot of the KV tensor that holds tokens."""

    slot: int
    generation: int
    session_key: str | None
    principal: str
    num_tokens: int
    busy: bool


@dataclass(slots=True)
class StepStats:
    """Counters since start."""

    num_steps: int = 0
    num_decode_steps: int = 0
    num_decode_tokens: int = 0
    num_prefill_blocks: int = 0
    num_prefill_segments: int = 0
    num_prefill_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_cancelled_in_prefill: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    prefill_tokens_per_s: float = 0.0

    def copy(self) -> StepStats:
        """A snapshot for another thread."""
        return replace(self, finished=self.finished.copy())

    def ended(self, request: RequestStats) -> None:
        """One request is over."""
        self.num_prompt_tokens += request.usage.num_prompt_tokens
        self.num_cached_tokens += request.usage.num_cached_tokens
        self.num_output_tokens += request.usage.num_output_tokens
        self.finished[request.finish_reason] += 1

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """One block of so many tokens is done."""
        self.num_prefill_blocks += 1
        self.num_prefill_tokens += num_tokens
        self.prefill_s += seconds
        rate = num_tokens / max(seconds, 1e-6)
        old = self.prefill_tokens_per_s
        self.prefill_tokens_per_s = old + _NEWEST * (rate - old) if old else rate

    @property
    def decode_step_s(self) -> float:
        """Mean seconds of a decode step; 0.0 before the first."""
        return self.decode_s / self.num_decode_steps if self.num_decode_steps else 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine is doing now, and its counters."""

    num_waiting: int
    num_prefilling: int
    num_decoding: int
    num_rejected: int
    num_evictions: int
    num_forks: int
    num_requeued: int
    num_slots: int
    sessions: tuple[SessionStats, ...]
    steps: StepStats
