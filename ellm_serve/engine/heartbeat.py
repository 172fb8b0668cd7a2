"""Whether the engine gets on: when its loop last did, and how long that may take.

The loop thread writes, other threads read; a field is replaced as a whole, so no lock is needed.
"""

from __future__ import annotations

from collections.abc import Callable

from ellm_serve.engine.scheduler import Step
from ellm_serve.engine.stats import StepStats

# A step may take this many times what it should: the rate of prefill falls as the context grows.
_PATIENCE = 3.0


class Heartbeat:
    """Watches one loop.

    timeout_s: how long the loop may be silent in addition to the steps it runs. It also covers what
    has never been measured: the first steps, and the replacement of a worker.
    """

    def __init__(self, clock: Callable[[], float], steps: StepStats, timeout_s: float) -> None:
        self._clock = clock
        self._steps = steps
        self._timeout_s = timeout_s
        self._step: Step | None = None
        self._last: float | None = None

    def idle(self) -> None:
        """Nothing is to be done from now on."""
        self._last = self._step = None

    def beat(self, now: float) -> None:
        """The loop has got on."""
        self._last = now

    def step(self, step: Step, now: float) -> None:
        """A step begins."""
        self._step = step
        self._last = now

    @property
    def stalled_s(self) -> float:
        """Seconds since the loop got on; 0.0 while there is nothing to do."""
        last = self._last
        return 0.0 if last is None else max(0.0, self._clock() - last)

    @property
    def expected_s(self) -> float:
        """How long the step in flight should take by the rates measured so far.

        A block may be computed without a pause, so all of it counts.
        """
        step, rate = self._step, self._steps.prefill_tokens_per_s
        if step is None:
            return 0.0
        decode_s = self._steps.decode_step_s if step.decode else 0.0
        prefill_s = step.block.num_tokens / rate if step.block is not None and rate else 0.0
        return decode_s + prefill_s

    def complaint(self) -> str | None:
        """What is wrong; None while the loop gets on."""
        stalled_s = self.stalled_s
        allowed_s = self._timeout_s + _PATIENCE * self.expected_s
        if stalled_s <= allowed_s:
            return None
        return (
            f"The engine has made no progress for {stalled_s:.0f} s (allowed: {allowed_s:.0f} s)."
        )
