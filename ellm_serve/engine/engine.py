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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import overload

import numpy as np
from numpy.typing import NDArray

from ellm_serve.closing import Closing
from ellm_serve.engine.admission import QueueLoad, new_sequence, validate
from ellm_serve.engine.executor import Executor, ExecutorLimits
from ellm_serve.engine.heartbeat import Heartbeat
from ellm_serve.engine.rows import Computed, Ending, Rows
from ellm_serve.engine.scheduler import PrefillBlock, Scheduler, Step
from ellm_serve.engine.sequence import Phase, Sequence
from ellm_serve.engine.session_cache import SessionCache
from ellm_serve.engine.stats import EngineStats, Progress, RequestStats, StepReport, StepStats
from ellm_serve.engine.stream import TokenStream
from ellm_serve.errors import EngineError, InvalidRequest, WorkerDied
from ellm_serve.grammar.constraint import CompiledGrammar
from ellm_serve.request import FinishReason, GenerateRequest, TokenDelta

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Abort:
    sequence: Sequence
    finish: FinishReason


class Engine(Closing):
    """Generates. Takes over the executor and closes it.

    Args:
        eos_token_ids: the model's own end ids.
        max_queued_requests, max_queued_tokens: bounds on what has not started; a single prompt is
            admitted whatever its length, and one principal leaves a reserve (see `QueueLoad`).
        prefill_budget_s: how long decoding rows wait for prefill between two of their tokens.
        fork_threshold: shorter common prefixes are computed again rather than copied.
        stall_timeout_s: how long the loop may be silent, besides three times what its step should
            take, before `health` complains.
        on_finished, on_step: called from the loop thread with the numbers of each finished request
            and of each step; they must not block.
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
        stall_timeout_s: float = 180.0,
        on_finished: Callable[[RequestStats], None] | None = None,
        on_step: Callable[[StepReport], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._limits = executor.limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._prefill_budget_s = prefill_budget_s
        self._on_finished = on_finished
        self._on_step = on_step
        self._clock = clock
        self._cache = SessionCache(executor, fork_threshold)
        self._scheduler = Scheduler(executor, self._cache, clock)
        self._rows = Rows(self._limits.vocab_size, clock)
        self._steps = StepStats()
        self._heartbeat = Heartbeat(clock, self._steps, stall_timeout_s)
        # Everything below is guarded by the condition.
        self._wake = threading.Condition()
        self._inbox: list[Sequence | _Abort] = []
        self._live: dict[str, Sequence] = {}
        self._queue = QueueLoad(max_queued_requests, max_queued_tokens)
        self._in_line: tuple[Sequence, ...] = ()
        self._num_changes = 0
        self._closing = False
        self._stopped: str | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="ellm-engine", daemon=True)
        self._thread.start()

    # --- any thread --------------------------------------------------------------------------

    @overload
    def submit(
        self, request: GenerateRequest, *, grammar: CompiledGrammar | None = None
    ) -> TokenStream: ...
    @overload
    def submit(
        self,
        request: GenerateRequest,
        on_delta: Callable[[TokenDelta], None],
        *,
        grammar: CompiledGrammar | None = None,
    ) -> None: ...
    def submit(
        self,
        request: GenerateRequest,
        on_delta: Callable[[TokenDelta], None] | None = None,
        *,
        grammar: CompiledGrammar | None = None,
    ) -> TokenStream | None:
        """Queues a request.

        With `on_delta`, deltas go to that function from the loop thread, so it must not block;
        otherwise to the stream that is returned. The answer follows the grammar, if there is one;
        several requests may share it.

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
            request,
            self._limits,
            self._eos_token_ids,
            on_delta or stream.put,
            self._clock(),
            grammar,
        )
        with self._wake:
            if self._stopped is not None or self._closing:
                raise EngineError(self._stopped or "The engine is shutting down.")
            if request.request_id in self._live:
                raise InvalidRequest(
                    f"A request with the id {request.request_id!r} is running.", "request_id"
                )
            self._queue.add(
                request.principal, sequence.num_prompt_tokens, self._steps.prefill_tokens_per_s
            )
            self._live[request.request_id] = sequence
            self._inbox.append(sequence)
            self._wake.notify()
        return stream if on_delta is None else None

    def check(self, request: GenerateRequest) -> None:
        """Raises what `submit` would raise about the request itself."""
        validate(request, self._limits)

    def abort(self, request_id: str, finish: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request early; unknown or finished ones are ignored.

        finish: why; a reader that has found its stop string says STOP. What was computed stays for
        the session's next turn either way.
        """
        with self._wake:
            sequence = self._live.get(request_id)
            if sequence is not None:
                self._inbox.append(_Abort(sequence, finish))
                self._wake.notify()

    def stats(self) -> EngineStats:
        """What the engine is doing now. Counts may be one step apart from each other."""
        with self._wake:
            num_waiting, num_rejected = self._queue.all.num_requests, self._queue.num_rejected
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

    def progress(self, request_id: str) -> Progress | None:
        """How far a request is; None if it is not running."""
        num_ahead = 0
        with self._wake:
            sequence = self._live.get(request_id)
            if sequence is None or sequence.phase is Phase.FINISHED:
                return None
            phase = sequence.phase
            if phase is Phase.WAITING:
                line = (*self._in_line, *self._newcomers())
                num_ahead = line.index(sequence) if sequence in line else len(line)
        return Progress(
            phase.value, sequence.num_computed_tokens, sequence.num_prompt_tokens, num_ahead
        )

    @property
    def limits(self) -> ExecutorLimits:
        """What one request may ask for, and how many run at once."""
        return self._limits

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The model's own end ids."""
        return self._eos_token_ids

    @property
    def stalled_s(self) -> float:
        """Seconds since the loop last made progress; 0.0 when it has no work or has stopped."""
        return self._heartbeat.stalled_s

    @property
    def expected_step_s(self) -> float:
        """How long the step in flight should take by the rates measured so far."""
        return self._heartbeat.expected_s

    def health(self) -> str | None:
        """Why the engine does not work: it has stopped, or its loop is stuck. None: it works."""
        return self._stopped or self._heartbeat.complaint()

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
            computed = self._execute(step)
        except WorkerDied:
            raise
        except EngineError as error:
            self._fail_running(error)
        else:
            self._update(step, computed)
            if self._on_step is not None and not step.empty:
                report = computed.report(step)
                self._guarded("The listener to steps", partial(self._on_step, report))

    def _receive(self) -> bool:
        """Sleeps until there is work, then takes the commands. False: closing."""
        self._recount()
        with self._wake:
            while not (self._inbox or self._closing or self._scheduler.has_work):
                self._heartbeat.idle()
                self._wake.wait()
                self._heartbeat.beat(self._clock())
            commands, self._inbox = self._inbox, []
            if self._closing:
                return False
        # Without the lock: consumers are called from here.
        for command in commands:
            match command:
                case Sequence():
                    self._scheduler.add(command)
                case _Abort(sequence, finish):
                    self._end(sequence, Ending(finish))
        return True

    def _recount(self) -> None:
        """Brings the load of the queue up to date with what has started or ended."""
        waiting = self._scheduler.waiting
        if waiting.num_changes == self._num_changes:
            return
        self._num_changes = waiting.num_changes
        with self._wake:
            self._in_line = waiting.in_order()
            self._queue.recount((*self._in_line, *self._newcomers()))

    def _newcomers(self) -> Iterator[Sequence]:
        """What was submitted and not yet received."""
        return (command for command in self._inbox if isinstance(command, Sequence))

    def _execute(self, step: Step) -> Computed:
        assert not (step.empty and self._scheduler.has_work), "nothing to do for live sequences"
        start = self._clock()
        self._heartbeat.step(step, start)
        decoded = prefilled = None
        if step.decode:
            decoded = self._executor.decode([sequence.decode_span() for sequence in step.decode])
        stop = between = self._clock()
        self._heartbeat.beat(between)
        if step.block is not None:
            prefilled = self._executor.run_prefill(self._prefill_budget_s)
            stop = self._clock()
            self._heartbeat.beat(stop)
            step.block.seconds += stop - between
            self._steps.num_prefill_segments += 1
        self._steps.num_steps += 1
        self._steps.num_decode_steps += bool(step.decode)
        self._steps.num_decode_tokens += len(step.decode)
        self._steps.decode_s += between - start
        return Computed(decoded, prefilled, stop - start)

    def _update(self, step: Step, computed: Computed) -> None:
        for sequence in step.starved:
            message = "No memory is left for this sequence."
            self._end(sequence, Ending(FinishReason.ERROR, error=message))
        if computed.decoded is not None:
            for sequence, logits in zip(step.decode, computed.decoded, strict=True):
                self._scheduler.decoded(sequence)
                self._take(sequence, partial(self._rows.next, sequence, logits))
        if step.block is not None and computed.prefilled is not None:
            self._update_block(step.block, computed.prefilled)

    def _update_block(self, block: PrefillBlock, logits: NDArray[np.float32]) -> None:
        self._scheduler.prefilled(block)
        self._steps.prefilled(block.num_tokens, block.seconds)
        first = 0
        for sequence, span in zip(block.sequences, block.spans, strict=True):
            rows = logits[first : first + span.num_logit_rows]
            first += span.num_logit_rows
            if sequence.phase is not Phase.FINISHED:
                self._take(sequence, partial(self._rows.prompt, sequence, span.start, rows))

    def _take(self, sequence: Sequence, action: Callable[[], Ending | None]) -> None:
        """Runs what concerns one row; if that fails, only this row ends."""
        ending = self._guarded(sequence, action)
        if ending is not None:
            self._end(sequence, ending)

    def _guarded(self, what: object, action: Callable[[], Ending | None]) -> Ending | None:
        try:
            return action()
        except Exception as error:
            # A row's sampler or a consumer may fail in any way; nobody else must notice.
            logger.exception("%s failed.", what)
            message = str(error) if isinstance(error, EngineError) else "Internal error."
            return Ending(FinishReason.ERROR, error=message)

    # --- ends --------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, ending: Ending) -> None:
        """Ends a sequence in whatever phase and tells its consumer; later calls do nothing."""
        if sequence.phase is Phase.FINISHED:
            return
        if sequence.phase is Phase.PREFILL and ending.finish is FinishReason.ABORT:
            self._steps.num_cancelled_in_prefill += 1
        self._scheduler.finish(sequence)
        now = self._clock()
        stats = sequence.stats(ending.finish, now)
        self._steps.ended(stats)
        with self._wake:
            del self._live[sequence.request.request_id]
        self._deliver(sequence, ending, now)
        if self._on_finished is not None:
            self._guarded(sequence, partial(self._on_finished, stats))

    def _deliver(self, sequence: Sequence, ending: Ending, now: float) -> None:
        self._guarded(
            sequence,
            partial(
                sequence.deliver, now if ending.time is None else ending.time, ending.token_ids,
                ending.finish, ending.stop_token_id, ending.logprobs, ending.error,
            ),
        )  # fmt: skip

    def _fail_running(self, error: EngineError) -> None:
        """A step failed: what was running ends, what waits goes on."""
        logger.error("A step failed: %s", error)
        self._scheduler.drop_block()
        for sequence in (*self._scheduler.decoding, *self._scheduler.prefilling):
            self._end(sequence, Ending(FinishReason.ERROR, error=str(error)))

    def _stop(self, reason: str, finish: FinishReason) -> None:
        """The thread's last act. Leaves the scheduler alone: after a bug it may be inconsistent."""
        with self._wake:
            self._stopped = reason
            live = list(self._live.values())
            self._live.clear()
            self._inbox.clear()
            self._queue.recount(())
            self._heartbeat.idle()
        for sequence in live:
            error = reason if finish is FinishReason.ERROR else None
            self._deliver(sequence, Ending(finish, error=error), self._clock())
        self._executor.close()
