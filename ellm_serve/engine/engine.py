"""The step loop: requests of token ids in, token deltas out.

One thread owns all state: schedule, execute, update. Everything else puts a command into its inbox.
A row that fails ends alone; a step that fails ends the rows that were running; a dead worker or a
bug stops the engine. In every case each request gets a last delta, so nobody waits for ever.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import overload

import numpy as np
from numpy.typing import NDArray

from ellm_serve.closing import Closing
from ellm_serve.engine.admission import QueueLoad, new_sequence, validate
from ellm_serve.engine.executor import Executor
from ellm_serve.engine.sampler import Sampler
from ellm_serve.engine.scheduler import PrefillBlock, Scheduler, Step
from ellm_serve.engine.sequence import Phase, Sequence
from ellm_serve.engine.session_cache import SessionCache
from ellm_serve.engine.stats import EngineStats, RequestStats, StepStats
from ellm_serve.engine.stream import TokenStream
from ellm_serve.errors import EngineError, InvalidRequest, WorkerDied
from ellm_serve.request import FinishReason, GenerateRequest, TokenDelta, TokenLogprobs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Abort:
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a sequence ends, and what its last delta adds."""

    finish: FinishReason
    token_ids: tuple[int, ...] = ()
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


class Engine(Closing):
    """Generates. Takes over the executor and closes it.

    Args:
        eos_token_ids: the model's own end ids.
        max_queued_requests, max_queued_tokens: bounds on what has not started; a single prompt is
            admitted whatever its length.
        prefill_budget_s: how long decoding rows wait for prefill between two of their tokens.
        fork_threshold: shorter common prefixes are computed again rather than copied.
        on_finished: called from the loop thread with the numbers of each finished request.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        eos_token_ids: Iterable[int],
        max_queued_requests: int = 256,
        max_queued_tokens: int = 1 << 21,
        prefill_budget_s: float = 0.05,
        fork_threshold: int = 64,
        on_finished: Callable[[RequestStats], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._limits = executor.limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._prefill_budget_s = prefill_budget_s
        self._on_finished = on_finished
        self._clock = clock
        self._cache = SessionCache(executor, fork_threshold)
        self._scheduler = Scheduler(executor, self._cache, clock)
        self._sampler = Sampler(self._limits.vocab_size)
        self._steps = StepStats()
        # Everything below is guarded by the condition.
        self._wake = threading.Condition()
        self._inbox: list[Sequence | _Abort] = []
        self._live: dict[str, Sequence] = {}
        self._queue = QueueLoad(max_queued_requests, max_queued_tokens)
        self._closing = False
        self._stopped: str | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="ellm-engine", daemon=True)
        self._thread.start()

    # --- any thread --------------------------------------------------------------------------

    @overload
    def submit(self, request: GenerateRequest) -> TokenStream: ...
    @overload
    def submit(self, request: GenerateRequest, on_delta: Callable[[TokenDelta], None]) -> None: ...
    def submit(
        self, request: GenerateRequest, on_delta: Callable[[TokenDelta], None] | None = None
    ) -> TokenStream | None:
        """Queues a request.

        With `on_delta`, deltas go to that function from the loop thread, so it must not block;
        otherwise to the stream that is returned.

        Raises:
            InvalidRequest, ContextLengthExceeded: the request can never be served.
            Overloaded: the queue is full.
            EngineError: the engine has stopped.
        """
        if os.getpid() != self._pid:
            raise EngineError("An engine does not survive a fork; start one in the child process.")
        validate(request, self._limits)
        stream = TokenStream(request.request_id, self.abort)
        sequence = new_sequence(
            request, self._limits, self._eos_token_ids, on_delta or stream.put, self._clock()
        )
        with self._wake:
            if self._stopped is not None or self._closing:
                raise EngineError(self._stopped or "The engine is shutting down.")
            if request.request_id in self._live:
                raise InvalidRequest(
                    f"A request with the id {request.request_id!r} is running.", "request_id"
                )
            self._queue.add(sequence.num_prompt_tokens, self._steps.prefill_tokens_per_s)
            self._live[request.request_id] = sequence
            self._inbox.append(sequence)
            self._wake.notify()
        return stream if on_delta is None else None

    def check(self, request: GenerateRequest) -> None:
        """Raises what `submit` would raise about the request itself."""
        validate(request, self._limits)

    def abort(self, request_id: str) -> None:
        """Ends a request with FinishReason.ABORT; unknown or finished ones are ignored."""
        with self._wake:
            sequence = self._live.get(request_id)
            if sequence is not None:
                self._inbox.append(_Abort(sequence))
                self._wake.notify()

    def stats(self) -> EngineStats:
        """What the engine is doing now. Counts may be one step apart from each other."""
        with self._wake:
            num_waiting, num_rejected = self._queue.num_requests, self._queue.num_rejected
        return EngineStats(
            num_waiting=num_waiting,
            num_prefilling=len(self._scheduler.prefilling),
            num_decoding=len(self._scheduler.decoding),
            num_rejected=num_rejected,
            num_evictions=self._cache.num_evictions,
            num_forks=self._cache.num_forks,
            num_requeued=self._scheduler.num_requeued,
            num_slots=self._limits.num_slots,
            sessions=self._cache.sessions(),
            steps=self._steps.copy(),
        )

    def num_computed_tokens(self, request_id: str) -> int | None:
        """How far a request is, cached tokens included; None if it is not running. For progress."""
        with self._wake:
            sequence = self._live.get(request_id)
        return None if sequence is None else sequence.num_computed_tokens

    @property
    def stopped(self) -> str | None:
        """Why the engine no longer runs; None while it does."""
        return self._stopped

    def close(self) -> None:
        """Aborts what is running, ends the thread and closes the executor. May be called twice."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    # --- loop thread -------------------------------------------------------------------------

    def _run(self) -> None:
        reason, finish = "The engine was shut down.", FinishReason.ABORT
        try:
            while self._receive():
                self._step()
        except EngineError as error:
            logger.error("The engine stops: %s", error)
            reason, finish = str(error), FinishReason.ERROR
        except Exception:
            # The thread's top: whatever it was, log it and let nobody wait for ever.
            logger.exception("The engine stops because of a bug.")
            reason, finish = "The engine stopped because of an internal error.", FinishReason.ERROR
        finally:
            self._stop(reason, finish)

    def _step(self) -> None:
        try:
            step = self._scheduler.schedule()
            self._recount()
            decode_logits, prefill_logits = self._execute(step)
        except WorkerDied:
            raise
        except EngineError as error:
            self._fail_running(error)
        else:
            self._update(step, decode_logits, prefill_logits)

    def _receive(self) -> bool:
        """Sleeps until there is work, then takes the commands. False: closing."""
        with self._wake:
            self._recount()
            while not (self._inbox or self._closing or self._scheduler.has_work):
                self._wake.wait()
            commands, self._inbox = self._inbox, []
            if self._closing:
                return False
        # Without the lock: consumers are called from here.
        for command in commands:
            match command:
                case Sequence():
                    self._scheduler.add(command)
                case _Abort(sequence):
                    self._end(sequence, _Ending(FinishReason.ABORT))
        return True

    def _recount(self) -> None:
        """Brings the load of the queue up to date with what has started or ended."""
        with self._wake:
            new = (command for command in self._inbox if isinstance(command, Sequence))
            self._queue.recount((*self._scheduler.waiting, *new))

    def _execute(self, step: Step) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None]:
        assert not (step.empty and self._scheduler.has_work), "nothing to do for live sequences"
        start = self._clock()
        decoded = prefilled = None
        if step.decode:
            decoded = self._executor.decode([sequence.decode_span() for sequence in step.decode])
        between = self._clock()
        if step.block is not None:
            prefilled = self._executor.run_prefill(self._prefill_budget_s)
            step.block.seconds += self._clock() - between
            self._steps.num_prefill_segments += 1
        self._steps.num_steps += 1
        self._steps.num_decode_steps += bool(step.decode)
        self._steps.num_decode_tokens += len(step.decode)
        self._steps.decode_s += between - start
        return decoded, prefilled

    def _update(
        self,
        step: Step,
        decode_logits: NDArray[np.float32] | None,
        prefill_logits: NDArray[np.float32] | None,
    ) -> None:
        for sequence in step.starved:
            message = "No memory is left for this sequence."
            self._end(sequence, _Ending(FinishReason.ERROR, error=message))
        if decode_logits is not None:
            for sequence, logits in zip(step.decode, decode_logits, strict=True):
                self._scheduler.decoded(sequence)
                self._take(sequence, partial(self._sample, sequence, logits))
        if step.block is not None and prefill_logits is not None:
            self._update_block(step.block, prefill_logits)

    def _update_block(self, block: PrefillBlock, logits: NDArray[np.float32]) -> None:
        self._scheduler.prefilled(block)
        self._steps.prefilled(block.num_tokens, block.seconds)
        first = 0
        for sequence, span in zip(block.sequences, block.spans, strict=True):
            rows = logits[first : first + span.num_logit_rows]
            first += span.num_logit_rows
            if sequence.phase is not Phase.FINISHED:
                self._take(sequence, partial(self._take_prompt, sequence, span.start, rows))

    def _take(self, sequence: Sequence, action: Callable[[], _Ending | None]) -> None:
        """Runs what concerns one row; if that fails, only this row ends."""
        ending = self._guarded(sequence, action)
        if ending is not None:
            self._end(sequence, ending)

    def _guarded(self, sequence: Sequence, action: Callable[[], _Ending | None]) -> _Ending | None:
        try:
            return action()
        except Exception as error:
            # A row's sampler or consumer may fail in any way; its neighbours must not notice.
            logger.exception("Request %s failed.", sequence.request.request_id)
            message = str(error) if isinstance(error, EngineError) else "Internal error."
            return _Ending(FinishReason.ERROR, error=message)

    def _take_prompt(
        self, sequence: Sequence, start: int, logits: NDArray[np.float32]
    ) -> _Ending | None:
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
            return _Ending(FinishReason.LENGTH)
        return self._sample(sequence, logits[-1])

    def _sample(self, sequence: Sequence, logits: NDArray[np.float32]) -> _Ending | None:
        choice = self._sampler.choose(
            logits,
            sequence.request.sampling,
            sequence.processor,
            sequence.seed,
            len(sequence.token_ids),
            sequence.num_output_tokens,
        )
        sequence.times.token(self._clock())
        finish = sequence.append(choice.token_id)
        if finish is FinishReason.STOP:
            return _Ending(finish, stop_token_id=choice.token_id)
        logprobs = () if choice.logprobs is None else (choice.logprobs,)
        if finish is not None:
            return _Ending(finish, (choice.token_id,), logprobs=logprobs)
        sequence.deliver((choice.token_id,), logprobs=logprobs)
        return None

    # --- ends --------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, ending: _Ending) -> None:
        """Ends a sequence in whatever phase and tells its consumer; later calls do nothing."""
        if sequence.phase is Phase.FINISHED:
            return
        if sequence.phase is Phase.PREFILL and ending.finish is FinishReason.ABORT:
            self._steps.num_cancelled_in_prefill += 1
        self._scheduler.finish(sequence)
        stats = sequence.stats(ending.finish, self._clock())
        self._steps.ended(stats)
        with self._wake:
            del self._live[sequence.request.request_id]
        self._deliver(sequence, ending)
        if self._on_finished is not None:
            self._guarded(sequence, partial(self._on_finished, stats))

    def _deliver(self, sequence: Sequence, ending: _Ending) -> None:
        self._guarded(
            sequence,
            partial(
                sequence.deliver, ending.token_ids, ending.finish, ending.stop_token_id,
                ending.logprobs, ending.error,
            ),
        )  # fmt: skip

    def _fail_running(self, error: EngineError) -> None:
        """A step failed: what was running ends, what waits goes on."""
        logger.error("A step failed: %s", error)
        self._scheduler.drop_block()
        for sequence in (*self._scheduler.decoding, *self._scheduler.prefilling):
            self._end(sequence, _Ending(FinishReason.ERROR, error=str(error)))

    def _stop(self, reason: str, finish: FinishReason) -> None:
        """The thread's last act. Leaves the scheduler alone: after a bug it may be inconsistent."""
        with self._wake:
            self._stopped = reason
            live = list(self._live.values())
            self._live.clear()
            self._inbox.clear()
            self._queue.recount(())
        for sequence in live:
            error = reason if finish is FinishReason.ERROR else None
            self._deliver(sequence, _Ending(finish, error=error))
        self._executor.close()
