"""One sequence being generated for a request, from token deltas to text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ellm_serve.request import (
    FinishReason,
    GenerateRequest,
    TokenDelta,
    TokenLogprobs,
    Usage,
)
from ellm_serve.serve.chat_output import ChatOutput
from ellm_serve.text.answer import AnswerText
from ellm_serve.text.tool_calls import OutputDelta

# On the wire; the other reasons are failures.
_FINISHED = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class Piece:
    """What was added to one answer since it was last read; the last one has a `finish_reason`.

    Of a chat answer there are `deltas` in place of `text`.
    `token_ids` has the end id as well, and `logprobs`, if wanted, one entry for each of them.
    `time`: when the last token was sampled, on the engine's clock.
    """

    index: int
    text: str = ""
    deltas: list[OutputDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    time: float = 0.0
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, later: Piece) -> None:
        """Takes in what came after."""
        self.text += later.text
        self.deltas += later.deltas
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.time = later.time
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


@dataclass(frozen=True, slots=True)
class EndRules:
    """How the end of an answer is shown.

    plain_end_id: the end id that is not mentioned as `stop_reason`.
    include_stop: what stopped the answer is part of its text.
    """

    plain_end_id: int | None
    include_stop: bool = False


@dataclass(slots=True)
class Times:
    """Moments of one sequence on `time.monotonic()`, the engine's clock; None until reached."""

    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    max_gap_s: float = 0.0

    def token(self, moment: float) -> float | None:
        """A token was sampled; seconds since the one before, None for the first."""
        before, self.last_token = self.last_token, moment
        if before is None:
            self.first_token = moment
            return None
        gap = moment - before
        self.max_gap_s = max(self.max_gap_s, gap)
        return gap

    @property
    def queue_s(self) -> float:
        """Seconds until it left the queue; 0 if that is not known."""
        return 0.0 if self.started is None else self.started - self.submitted

    @property
    def prefill_s(self) -> float:
        """Seconds from there to the first token; 0 without one."""
        if self.started is None or self.first_token is None:
            return 0.0
        return self.first_token - self.started

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        if self.first_token is None or self.last_token is None:
            return 0.0
        return self.last_token - self.first_token


class Answer:
    """State of one sequence; read and written in the event loop only."""

    def __init__(
        self,
        index: int,
        request: GenerateRequest,
        text: AnswerText,
        rules: EndRules,
        output: ChatOutput | None = None,
    ) -> None:
        """`output` takes a chat answer apart."""
        self.index = index
        self.request = request
        self.usage = Usage(len(request.prompt_token_ids))
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self.finish_reason: str | None = None
        self.times = Times()
        self._text = text
        self._rules = rules
        self._output = output

    @property
    def has_calls(self) -> bool:
        """Whether the answer calls tools, as far as it is shown."""
        return self._output is not None and self._output.has_calls

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thoughts, if they are told apart."""
        return 0 if self._output is None else self._output.num_reasoning_tokens

    def take(self, delta: TokenDelta, piece: Piece) -> None:
        """Adds a delta to the answer and to `piece`. Not for deltas that report a failure."""
        self.usage = delta.usage
        self.times.started = delta.started
        self.prompt_logprobs += delta.prompt_logprobs
        text = self._text.push(delta.token_ids)
        piece.token_ids += delta.token_ids
        piece.logprobs += delta.logprobs
        if delta.stop_token_id is not None:
            piece.token_ids.append(delta.stop_token_id)
            if self._rules.include_stop:
                text += self._text.push((delta.stop_token_id,))
        if delta.finish_reason is not None:
            text += self._text.finish()
        if self._output is None:
            piece.text += text
        else:
            piece.deltas += self._output.push(text, delta.token_ids)
            if delta.finish_reason is not None or self._text.matched is not None:
                piece.deltas += self._output.finish()
        piece.time = delta.time
        self._finish(delta, piece)

    def _finish(self, delta: TokenDelta, piece: Piece) -> None:
        output = self._output
        matched = self._text.matched if output is None else output.matched or self._text.matched
        if matched is not None or (output is not None and output.is_complete):
            piece.finish_reason, piece.stop_reason = "stop", matched
        elif delta.finish_reason is not None:
            piece.finish_reason = _FINISHED[delta.finish_reason]
            if delta.stop_token_id != self._rules.plain_end_id:
                piece.stop_reason = delta.stop_token_id
        self.finish_reason = piece.finish_reason
