"""A chat answer as typed events: what every endpoint that answers conversations is written on.

`Service.start_chat` gives a `ChatRun`. Its events are either read one by one (a stream), or put
together (`collect`); there is no second way to an answer, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ellm_serve.protocol.chat import ChatCompletionRequest
from ellm_serve.protocol.common import UsageInfo
from ellm_serve.request import TokenLogprobs
from ellm_serve.serve.answer import Answer, Piece
from ellm_serve.serve.conversation import Conversation
from ellm_serve.serve.generation import Generation
from ellm_serve.serve.prompts import Prompt
from ellm_serve.serve.usage import UsageReport
from ellm_serve.text.tool_calls import Output, OutputDelta, collect


@dataclass(frozen=True, slots=True)
class Finish:
    """How an answer ended.

    reason: "stop", "length" or "tool_calls"; the last if it has calls, ended by itself, and the
    call was not asked for by name (then it is "stop", as in vLLM). One cut within a call: "length".
    stop_reason: the stop string or the token id that ended it, unless it was the plain end.
    """

    reason: str
    stop_reason: int | str | None


@dataclass(slots=True)
class ChatEvent:
    """What one step added to one answer. The last event of an answer has `finish`.

    deltas: in the order in which they were said; there may be none, as a token may not tell yet
    what it is part of. token_ids: with the end id; logprobs, if wanted, has one entry for each.
    time: when the last token was sampled, on the engine's clock.
    """

    index: int
    deltas: list[OutputDelta]
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    time: float
    finish: Finish | None

    def add(self, later: ChatEvent) -> None:
        """Takes in what came after."""
        self.deltas += later.deltas
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.time = later.time
        self.finish = later.finish


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One whole answer."""

    index: int
    output: Output
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish: Finish


class ChatRun:
    """One request that has been admitted: `n` answers, on their way.

    Iterates over lists of events: all that came since the last look, one for each answer. A failure
    is raised by the iteration: a RequestError (deadline, shutdown) or an EngineError. However it is
    left, `close` (in the loop) or `drop` (from a finalizer) ends the generation.

    Attributes:
        id: `chatcmpl-...`.
        prompt: its tokens, and its rendered text unless that was cut.
        names_tool: one function was asked for by name.
        requires_tool: that, or `tool_choice` is "required".
        hides_tokens: ids and log-probabilities would show what `include_reasoning` hides.
        has_reasoning: thoughts are told apart.
        usage_report: token counts and times.
    """

    def __init__(
        self,
        answer_id: str,
        request: ChatCompletionRequest,
        conversation: Conversation,
        prompt: Prompt,
        generation: Generation,
        usage: UsageReport,
        *,
        hides_tokens: bool = False,
        has_reasoning: bool = False,
    ) -> None:
        self.id = answer_id
        self.request = request
        self.conversation = conversation
        self.prompt = prompt
        self.generation = generation
        self.names_tool = request.named_tool is not None
        self.requires_tool = self.names_tool or request.tool_choice == "required"
        self.hides_tokens = hides_tokens
        self.has_reasoning = has_reasoning
        self.usage_report = usage

    @property
    def answers(self) -> Sequence[Answer]:
        """The state of each answer: its token counts and times."""
        return self.generation.answers

    @property
    def usage(self) -> UsageInfo:
        """Token counts of the whole request so far."""
        return self.usage_report.info()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[ChatEvent]:
        return list(map(self._event, await anext(self.generation)))

    async def collect(self) -> list[ChatAnswer]:
        """The whole answers.

        Raises:
            RequestError: the deadline has passed, or the server is shutting down.
            EngineError: the engine failed.
        """
        wholes = [ChatEvent(answer.index, [], [], [], 0.0, None) for answer in self.answers]
        try:
            async for events in self:
                for event in events:
                    wholes[event.index].add(event)
        finally:
            self.close()
        return list(map(_whole, wholes))

    def close(self) -> None:
        """Ends the generation; in the loop only, may be called more than once."""
        self.generation.close()

    def drop(self) -> None:
        """The same for finalizers, which run in any thread."""
        self.generation.drop()

    def _event(self, piece: Piece) -> ChatEvent:
        finish = None if piece.finish_reason is None else self._finish(piece, piece.finish_reason)
        return ChatEvent(
            piece.index, piece.deltas, piece.token_ids, piece.logprobs, piece.time, finish
        )

    def _finish(self, piece: Piece, reason: str) -> Finish:
        if reason == "stop" and not self.names_tool and self.answers[piece.index].has_calls:
            reason = "tool_calls"
        return Finish(reason, piece.stop_reason)


def _whole(event: ChatEvent) -> ChatAnswer:
    """The answer that all of its events together make up."""
    assert event.finish is not None, "an answer without an end"
    output = collect(event.deltas)
    return ChatAnswer(event.index, output, event.token_ids, event.logprobs, event.finish)
