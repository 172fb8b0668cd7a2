"""The asynchronous face of the engine: sequences of one request, submitted and read together.

Whatever way a reader goes (it has read all, it was cancelled, it was dropped), `close` ends what
still runs. After that nothing comes any more.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Self

from ellm_serve.engine.engine import Engine
from ellm_serve.errors import (
    DeadlineExceeded,
    EllmError,
    EngineError,
    Overloaded,
    QueueBound,
    RequestError,
    Unavailable,
)
from ellm_serve.grammar.constraint import CompiledGrammar
from ellm_serve.metrics import Metrics, Rejection
from ellm_serve.request import FinishReason, TokenDelta
from ellm_serve.serve.answer import Answer, Piece
from ellm_serve.serve.context import RequestContext
from ellm_serve.serve.inbox import Inbox

# What a client is told to wait when the engine has stopped: about the time of a restart.
RESTART_RETRY_S = 30.0

# The metric's names for the bounds of the queue.
_REJECTIONS: dict[QueueBound, Rejection] = {
    "requests": "max_num_queued_reqs",
    "tokens": "max_num_queued_tokens",
}


class Generation:
    """Iterates over lists of pieces: all that came since the last look, one piece per answer.

    `answers` are `n` to each prompt, prompt by prompt. All of them follow the grammar, if there is
    one.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        inbox: Inbox,
        context: RequestContext,
        answers: Sequence[Answer],
        n: int,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        self.answers = answers
        self.n = n
        self._grammar = grammar
        self._engine = engine
        self._metrics = metrics
        self._inbox = inbox
        self._context = context
        self._open: dict[int, Answer] = {}
        self._arrived: deque[tuple[Answer, TokenDelta]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False

    # --- start ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Submits every sequence, or none.

        Raises:
            RequestError: one of them is refused, the deadline has passed, or the engine is gone.
        """
        for answer in self.answers:
            self._engine.check(answer.request)
        self._set_timer()
        try:
            for answer in self.answers:
                self._submit(answer)
        except BaseException:
            self._withdraw()
            raise
        self._context.progress = self.progress

    def _set_timer(self) -> None:
        deadline = self._context.deadline
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded("The request's deadline passed before it could start.")
            self._timer = self._inbox.loop.call_later(left, self._expire)

    def _submit(self, answer: Answer) -> None:
        receive = partial(self._receive, answer)
        try:
            self._engine.submit(
                answer.request, partial(self._inbox.put, receive), grammar=self._grammar
            )
        except Overloaded as error:
            self._metrics.rejected(_REJECTIONS[error.bound])
            raise
        except EngineError as error:
            raise Unavailable("The engine is not running.", RESTART_RETRY_S) from error
        self._open[answer.index] = answer

    def _withdraw(self) -> None:
        """Takes back what was submitted; a request that is refused has not ended, it never was."""
        for answer in self._open.values():
            self._engine.abort(answer.request.request_id)
        self._open.clear()
        self.close()

    # --- reading -------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Piece]:
        while True:
            pieces = self._take()
            if pieces:
                return pieces
            if not self._open:
                raise StopAsyncIteration
            self._waiter = self._inbox.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def collect(self) -> list[Piece]:
        """Everything, as one piece for each answer.

        Raises:
            RequestError: the deadline has passed, or the server is shutting down.
            EngineError: the engine failed.
        """
        texts: list[list[str]] = [[] for _ in self.answers]
        whole = [Piece(answer.index) for answer in self.answers]
        try:
            async for pieces in self:
                for piece in pieces:
                    # Put together at the end: adding to a long text token by token is slow.
                    texts[piece.index].append(piece.text)
                    piece.text = ""
                    whole[piece.index].add(piece)
        finally:
            self.close()
        for piece, parts in zip(whole, texts, strict=True):
            piece.text = "".join(parts)
        return whole

    def _receive(self, answer: Answer, delta: TokenDelta) -> None:
        self._arrived.append((answer, delta))
        self._wake()

    def _expire(self) -> None:
        self._expired = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> list[Piece]:
        """What has arrived, in the order of arrival."""
        if self._expired and self._open:
            raise self._failed(DeadlineExceeded("The request's deadline has passed."))
        pieces: dict[int, Piece] = {}
        while self._arrived:
            answer, delta = self._arrived.popleft()
            # Behind a stop string the engine may have sampled on for a moment.
            if answer.index not in self._open:
                continue
            if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise self._failed(self._error(delta))
            piece = pieces.get(answer.index)
            if piece is None:
                piece = pieces[answer.index] = Piece(answer.index)
            self._add(answer, delta, piece)
        return list(pieces.values())

    def _add(self, answer: Answer, delta: TokenDelta, piece: Piece) -> None:
        if delta.token_ids or delta.stop_token_id is not None:
            gap = answer.times.token(delta.time)
            if gap is None:
                self._metrics.first_token(delta.time - self._context.received)
            else:
                self._metrics.inter_token(gap)
        answer.take(delta, piece)
        if answer.finish_reason is None:
            return
        del self._open[answer.index]
        if delta.finish_reason is None:
            self._engine.abort(answer.request.request_id, FinishReason.STOP)
        self._record(answer, answer.finish_reason)
        if not self._open:
            self.close()

    def _error(self, delta: TokenDelta) -> EllmError:
        if self._engine.stopped is not None or delta.finish_reason is FinishReason.ABORT:
            return Unavailable("The server ended this request.", RESTART_RETRY_S)
        return EngineError(delta.error or "the generation failed")

    def _failed(self, error: EllmError) -> EllmError:
        if isinstance(error, RequestError | EngineError):
            self._context.log["error"] = error.kind
        self.close("abort" if isinstance(error, DeadlineExceeded) else "error")
        return error

    # --- ends ----------------------------------------------------------------------------------

    def close(self, reason: str = "abort") -> None:
        """Ends what still runs; may be called more than once, and in the loop only."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._open:
            _, answer = self._open.popitem()
            self._engine.abort(answer.request.request_id)
            self._record(answer, reason)
        self._context.progress = None

    def drop(self) -> None:
        """The same for finalizers, which run in any thread."""
        if self._open and not self._inbox.loop.is_closed():
            self._inbox.loop.call_soon_threadsafe(self.close)

    def progress(self) -> str | None:
        """Where the request is, in a few words, while it has no token yet."""
        for answer in self._open.values():
            if answer.times.first_token is not None:
                return None
            progress = self._engine.progress(answer.request.request_id)
            if progress is not None and progress.phase == "waiting":
                return f"waiting {progress.num_ahead} ahead"
            if progress is not None and progress.phase == "prefill":
                return f"prefill {progress.num_computed_tokens}/{progress.num_prompt_tokens}"
        return None

    def _record(self, answer: Answer, reason: str) -> None:
        """One sequence has ended: its numbers go to the metrics and to the access log."""
        answer.finish_reason = reason
        usage, times = answer.usage, answer.times
        self._metrics.finished(
            reason,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_output_tokens=usage.num_output_tokens,
            max_tokens=answer.request.sampling.max_tokens or 0,
            n=self.n,
            queue_s=times.queue_s,
            prefill_s=times.prefill_s,
            decode_s=times.decode_s,
            e2e_s=time.monotonic() - self._context.received,
            max_gap_s=times.max_gap_s,
        )
        self._note()

    def _note(self) -> None:
        """Brings what the access log says up to date."""
        answers = self.answers
        prompts = [answer.usage for answer in answers[:: self.n]]
        reasons = dict.fromkeys(answer.finish_reason for answer in answers)
        self._context.log |= {
            "n": len(answers),
            "prompt_tokens": sum(usage.num_prompt_tokens for usage in prompts),
            "cached_tokens": sum(usage.num_cached_tokens for usage in prompts),
            "output_tokens": sum(answer.usage.num_output_tokens for answer in answers),
            "queue_s": max(answer.times.queue_s for answer in answers),
            "prefill_s": max(answer.times.prefill_s for answer in answers),
            "decode_s": max(answer.times.decode_s for answer in answers),
            "finish_reason": ",".join(reason for reason in reasons if reason),
        }
