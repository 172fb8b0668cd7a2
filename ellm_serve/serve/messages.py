"""/v1/messages: answers in Anthropic's form, whole or as a stream of events.

Both are made by one walk over the answer, so they cannot differ.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from ellm_serve.errors import EllmError
from ellm_serve.protocol.common import UsageInfo
from ellm_serve.protocol.messages import (
    AnswerBlock,
    ContextManagement,
    CountTokensRequest,
    CountTokensResponse,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    messages_error_body,
)
from ellm_serve.serve.chat_events import ChatEvent, ChatRun, Finish
from ellm_serve.serve.context import RequestContext
from ellm_serve.serve.messages_request import to_chat, to_tokenize
from ellm_serve.serve.service import Service
from ellm_serve.serve.sse import EventStream, time_comment, to_json
from ellm_serve.text.messages import RAW_ARGUMENTS
from ellm_serve.text.tool_calls import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

_Event = dict[str, Any]


async def create_message(
    service: Service, request: MessagesRequest, context: RequestContext
) -> MessagesResponse | EventStream:
    """The whole answer, or its events if the request wants a stream.

    Raises:
        RequestError: it is refused; nothing was generated.
        EngineError: the engine failed, and the answer was wanted whole.
    """
    run = await service.start_chat(to_chat(request, context), context)
    writer = _EventWriter(run, service.models().data[0].id, context.token_times)
    if request.stream:
        return EventStream(run, writer)
    return await writer.response()


async def count_tokens(
    service: Service, request: CountTokensRequest, context: RequestContext
) -> CountTokensResponse:
    """How long the prompt of a conversation is, whether or not it fits.

    Raises:
        RequestError: it is refused.
    """
    count = (await service.tokenize(to_tokenize(request), context)).count
    management = ContextManagement(original_input_tokens=count)
    return CountTokensResponse(input_tokens=count, context_management=management)


class _EventWriter:
    """Writes one answer."""

    def __init__(self, run: ChatRun, model: str, token_times: bool) -> None:
        self._run = run
        self._model = model
        self._times = token_times
        self._blocks = _Blocks()
        self._finish: Finish | None = None
        self._begun = False

    async def response(self) -> MessagesResponse:
        """The whole answer, once the run has come to its end."""
        try:
            async for events in self._run:
                self.events(events)
        finally:
            self._run.close()
        self._blocks.end()
        return MessagesResponse(
            id=self._run.id,
            content=self._blocks.content,
            model=self._model,
            stop_reason=self._stop_reason(),
            stop_sequence=self._stop_sequence(),
            usage=_usage(self._run.usage),
        )

    def events(self, pieces: Sequence[ChatEvent], /) -> str:
        """The blocks' events for what has come."""
        events = [] if self._begun else [_frame(self._start())]
        self._begun = True
        for piece in pieces:
            if self._times:
                events.append(time_comment(piece.time))
            for delta in piece.deltas:
                events += map(_frame, self._blocks.add(delta))
            self._finish = piece.finish
        return "".join(events)

    def end(self) -> str:
        """The end of the last block, and that of the message."""
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
        usage = _usage(self._run.usage).model_dump()
        events = [
            *self._blocks.end(),
            {"type": "message_delta", "delta": delta, "usage": usage},
            {"type": "message_stop"},
        ]
        return "".join(map(_frame, events))

    def failure(self, error: EllmError, /) -> str:
        """The event after which nothing comes."""
        return error_event(error)

    def _start(self) -> _Event:
        message: dict[str, Any] = {
            "id": self._run.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(self._run.prompt.token_ids), "output_tokens": 0},
        }
        return {"type": "message_start", "message": message}

    def _stop_sequence(self) -> str | None:
        reason = None if self._finish is None else self._finish.stop_reason
        return reason if isinstance(reason, str) else None

    def _stop_reason(self) -> StopReason:
        assert self._finish is not None, "an answer without an end"
        if self._finish.reason == "length":
            return "max_tokens"
        if self._stop_sequence() is not None:
            return "stop_sequence"
        # Also where chat completions say "stop", because the function was asked for by name.
        return "tool_use" if self._blocks.has_calls else "end_turn"


class _Blocks:
    """The content blocks of an answer, and the events that tell of them; one is open at a time."""

    def __init__(self) -> None:
        self.content: list[AnswerBlock] = []
        self.has_calls = False
        self._open: OutputDelta | None = None
        self._parts: list[str] = []

    def add(self, delta: OutputDelta) -> Iterator[_Event]:
        """The events of more of the answer; they must all be taken."""
        match delta:
            case ContentDelta(text):
                yield from self._opened(delta, {"type": "text", "text": ""})
                yield self._more("text_delta", "text", text)
            case ReasoningDelta(text):
                yield from self._opened(delta, {"type": "thinking", "thinking": ""})
                yield self._more("thinking_delta", "thinking", text)
            case ToolCallStart(_, call_id, name):
                self.has_calls = True
                yield from self._closed()
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                yield from self._opened(delta, block)
            case ToolCallArguments(_, fragment):
                yield self._more("input_json_delta", "partial_json", fragment)
            case ToolCallEnd():
                yield from self._closed()

    def end(self) -> list[_Event]:
        """The events of the end. An answer that says nothing is one empty text."""
        events = list(self._closed())
        if not self.content:
            events += self._opened(ContentDelta(""), {"type": "text", "text": ""})
            events += self._closed()
        return events

    def _opened(self, delta: OutputDelta, block: dict[str, Any]) -> Iterator[_Event]:
        """Goes on with a block of this kind, or begins one."""
        if type(self._open) is type(delta):
            return
        yield from self._closed()
        self._open = delta
        yield self._event("content_block_start", content_block=block)

    def _more(self, kind: str, field: str, text: str) -> _Event:
        self._parts.append(text)
        return self._event("content_block_delta", delta={"type": kind, field: text})

    def _closed(self) -> Iterator[_Event]:
        if self._open is None:
            return
        block = _block(self._open, "".join(self._parts))
        if isinstance(block, ThinkingBlock):
            delta = {"type": "signature_delta", "signature": block.signature}
            yield self._event("content_block_delta", delta=delta)
        yield self._event("content_block_stop")
        self.content.append(block)
        self._open, self._parts = None, []

    def _event(self, kind: str, **fields: object) -> _Event:
        return {"type": kind, **fields, "index": len(self.content)}


def _block(opening: OutputDelta, text: str) -> AnswerBlock:
    match opening:
        case ToolCallStart(_, call_id, name):
            return ToolUseBlock(id=call_id, name=name, input=_input(text))
        case ReasoningDelta():
            return ThinkingBlock(thinking=text, signature=secrets.token_hex(16))
    return TextBlock(text=text)


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object. Those that are none are given as they were said."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {RAW_ARGUMENTS: arguments}


def _usage(info: UsageInfo) -> MessagesUsage:
    details = info.prompt_tokens_details
    cached = None if details is None else details.cached_tokens or 0
    return MessagesUsage(
        input_tokens=info.prompt_tokens - (cached or 0),
        output_tokens=info.completion_tokens or 0,
        cache_creation_input_tokens=None if cached is None else 0,
        cache_read_input_tokens=cached,
    )


def _frame(event: _Event) -> str:
    return f"event: {event['type']}\ndata: {to_json(event)}\n\n"


def error_event(error: Exception) -> str:
    """The last event of a stream that was cut short."""
    body = messages_error_body(error)
    return f"event: error\ndata: {to_json(body)}\n\n"
