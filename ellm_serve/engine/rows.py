"""What becomes of a row of logits: its sequence's next token, and perhaps the sequence's end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ellm_serve.engine.sampler import Sampler
from ellm_serve.engine.scheduler import Step
from ellm_serve.engine.sequence import Phase, Sequence
from ellm_serve.engine.stats import StepReport
from ellm_serve.request import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sequence ends, and what its last delta adds. `time`: of its token, if it has one."""

    finish: FinishReason
    token_ids: tuple[int, ...] = ()
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    time: float | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step has given: logits of the decoded rows, and of the block if it is complete."""

    decoded: NDArray[np.float32] | None
    prefilled: NDArray[np.float32] | None
    seconds: float

    def report(self, step: Step) -> StepReport:
        """For listeners; the tokens of a block count in the step that completes it."""
        done = step.block if self.prefilled is not None else None
        return StepReport(done.num_tokens if done else 0, len(step.decode), self.seconds)


class Rows:
    """Samples for one thread and hands out what was sampled."""

    def __init__(self, vocab_size: int, clock: Callable[[], float]) -> None:
        self._sampler = Sampler(vocab_size)
        self._clock = clock

    def prompt(self, sequence: Sequence, start: int, logits: NDArray[np.float32]) -> Ending | None:
        """Takes the logits of prompt positions from `start` on; samples after the last one."""
        count = sequence.request.sampling.prompt_logprobs
        if count is not None and sequence.wants_prompt_logprobs:
            wanted = sequence.token_ids[start + 1 : start + 1 + len(logits)]
            if start == 0:
                sequence.prompt_logprobs.append(None)
            sequence.prompt_logprobs += self._sampler.prompt_logprobs(
                logits[: len(wanted)], wanted, count
            )
        if sequence.phase is not Phase.DECODE:
            return None
        if sequence.max_output_tokens == 0:
            return Ending(FinishReason.LENGTH)
        return self.next(sequence, logits[-1])

    def next(self, sequence: Sequence, logits: NDArray[np.float32]) -> Ending | None:
        """Samples the next token. Delivers it unless the sequence ends with it."""
        choice = self._sampler.choose(
            logits,
            sequence.request.sampling,
            sequence.processor,
            sequence.seed,
            len(sequence.token_ids),
            sequence.num_output_tokens,
        )
        now = self._clock()
        sequence.times.token(now)
        finish = sequence.append(choice.token_id)
        logprobs = () if choice.logprobs is None else (choice.logprobs,)
        if finish is FinishReason.STOP:
            return Ending(finish, (), choice.token_id, logprobs, time=now)
        if finish is not None:
            return Ending(finish, (choice.token_id,), logprobs=logprobs, time=now)
        sequence.deliver(now, (choice.token_id,), logprobs=logprobs)
        return None
