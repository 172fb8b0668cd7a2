"""/v1/responses: answers as items, whole or as a stream of events, kept to be continued."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from ellm_serve.errors import EllmError, SynchronousResponse
from ellm_serve.protocol.common import UsageInfo, as_sent
from ellm_serve.protocol.errors import error_body
from ellm_serve.protocol.responses import (
    FunctionToolEcho,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from ellm_serve.serve.chat_events import ChatEvent, ChatRun, Finish
from ellm_serve.serve.context import RequestContext
from ellm_serve.serve.response_items import Event, ResponseItems
from ellm_serve.serve.response_store import ResponseStore
from ellm_serve.serve.responses_request import Message, offered_tools, to_chat, to_messages
from ellm_serve.serve.service import Service
from ellm_serve.serve.sse import EventStream, time_comment, to_json
from ellm_serve.text.plain import plain_json


class Responses:
    """Answers requests; `store` keeps the answers."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def create(
        self, service: Service, request: ResponsesRequest, context: RequestContext
    ) -> ResponseObject | EventStream:
        """The whole answer, or its events if the request wants a stream.

        Raises:
            RequestError: it is refused; nothing was generated.
            EngineError: the engine failed, and the answer was wanted whole.
        """
        store, principal = self._store, context.principal
        previous = request.previous_response_id
        history = [] if previous is None else store.conversation(principal, previous)
        messages = to_messages(request.input)
        echo = _echo(request)
        max_model_len = service.engine.limits.sequence_length
        chat = to_chat(request, history, messages, context, max_model_len)
        run = await service.start_chat(chat, context)
        response = _response(request, run, service.models().data[0].id, echo)
        keeper = _Keeper(store, principal, previous, messages) if request.store else None
        writer = _EventWriter(run, response, keeper, context.token_times)
        if request.stream:
            return EventStream(run, writer)
        return await writer.response()

    def earlier(self, response_id: str, context: RequestContext) -> bytes:
        """An answer that was given and kept, as it was sent.

        Raises:
            ResponseNotFound: it is not here, or no longer.
        """
        return self._store.body(context.principal, response_id)

    def cancel(self, response_id: str, context: RequestContext) -> NoReturn:
        """Answers are made while whoever asked for them waits; to cancel one is to stop waiting.

        Raises:
            RequestError: always.
        """
        self.earlier(response_id, context)
        raise SynchronousResponse()


class _Keeper:
    """Puts one answer into the store."""

    def __init__(
        self,
        store: ResponseStore,
        principal: str,
        previous: str | None,
        messages: Sequence[Message],
    ) -> None:
        self._store = store
        self._principal = principal
        self._previous = previous
        self._messages = messages

    def keep(self, response: ResponseObject) -> None:
        """`response` has come to its end."""
        answer = to_messages(item.model_dump() for item in response.output)
        body = response.model_dump_json().encode()
        said = [*self._messages, *answer]
        self._store.put(self._principal, response.id, self._previous, said, body)


class _EventWriter:
    """Writes one answer."""

    def __init__(
        self, run: ChatRun, response: ResponseObject, keeper: _Keeper | None, token_times: bool
    ) -> None:
        self._run = run
        self._response = response
        self._keeper = keeper
        self._times = token_times
        self._items = ResponseItems()
        self._finish: Finish | None = None
        self._begun = False

    async def response(self) -> ResponseObject:
        """The whole answer, once the run has come to its end."""
        try:
            async for events in self._run:
                self.events(events)
        finally:
            self._run.close()
        self._complete()
        return self._response

    def events(self, pieces: Sequence[ChatEvent], /) -> str:
        """The items' events for what has come."""
        events = [] if self._begun else self._openings()
        self._begun = True
        for piece in pieces:
            if self._times:
                events.append(time_comment(piece.time))
            for delta in piece.deltas:
                events += map(_frame, self._items.add(delta))
            self._finish = piece.finish
        return "".join(events)

    def end(self) -> str:
        """The end of the last item, and the whole answer."""
        events = self._complete()
        kind = f"response.{self._response.status}"
        return "".join(map(_frame, [*events, self._about(kind)]))

    def failure(self, error: EllmError, /) -> str:
        """The event after which nothing comes."""
        message = error_body(error)["error"]["message"]
        self._response.status = "failed"
        self._response.error = ResponseError(message=message)
        return _frame(self._about("response.failed"))

    def _openings(self) -> list[str]:
        return [_frame(self._about(f"response.{kind}")) for kind in ("created", "in_progress")]

    def _about(self, kind: str) -> Event:
        return self._items.event(kind, response=self._response.model_dump())

    def _complete(self) -> list[Event]:
        """Brings the answer to its end, and keeps it if it is to be kept."""
        assert self._finish is not None, "an answer without an end"
        is_cut = self._finish.reason == "length"
        events = self._items.end(is_cut)
        self._response.output = self._items.items
        self._response.usage = _usage(self._run.usage)
        self._response.status = "incomplete" if is_cut else "completed"
        self._response.incomplete_details = IncompleteDetails() if is_cut else None
        if self._keeper is not None:
            self._keeper.keep(self._response)
        return events


def _echo(request: ResponsesRequest) -> dict[str, Any]:
    """What the answer repeats of the request.

    Raises:
        InvalidRequest: it is nested too deeply.
    """
    reasoning = None if request.reasoning is None else as_sent(request.reasoning)
    values = {
        "metadata": request.metadata,
        "reasoning": reasoning,
        "text": request.text_as_sent(),
        "tools": offered_tools(request),
        "tool_choice": request.tool_choice,
    }
    return {name: plain_json(value, name) for name, value in values.items()}


def _response(
    request: ResponsesRequest, run: ChatRun, model: str, echo: dict[str, Any]
) -> ResponseObject:
    """The answer before anything was said."""
    sampling = run.answers[0].request.sampling
    tools = [FunctionToolEcho(**tool) for tool in echo["tools"]]
    default_choice = "auto" if tools else "none"
    return ResponseObject(
        id=f"resp_{secrets.token_hex(8)}",
        created_at=int(time.time()),
        instructions=request.instructions,
        metadata=echo["metadata"],
        model=model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        temperature=sampling.temperature,
        tool_choice=echo["tool_choice"] or default_choice,
        tools=tools,
        top_p=sampling.top_p,
        max_output_tokens=sampling.max_tokens,
        max_tool_calls=request.max_tool_calls,
        previous_response_id=request.previous_response_id,
        reasoning=echo["reasoning"],
        service_tier=request.service_tier,
        text=echo["text"],
        truncation=request.truncation,
        user=request.user,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        prompt_cache_key=request.prompt_cache_key,
        safety_identifier=request.safety_identifier,
    )


def _usage(info: UsageInfo) -> ResponseUsage:
    prompt, output = info.prompt_tokens_details, info.completion_tokens_details
    return ResponseUsage(
        input_tokens=info.prompt_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=(prompt and prompt.cached_tokens) or 0,
            cache_write_tokens=(prompt and prompt.created_cache_tokens) or 0,
        ),
        output_tokens=info.completion_tokens or 0,
        output_tokens_details=OutputTokensDetails(
            reasoning_tokens=(output and output.reasoning_tokens) or 0
        ),
        total_tokens=info.total_tokens,
    )


def _frame(event: Event) -> str:
    return f"event: {event['type']}\ndata: {to_json(event)}\n\n"


def error_event(error: Exception) -> str:
    """The last event of a stream that a mistake of ours has cut short."""
    message = error_body(error)["error"]["message"]
    event = {
        "code": "server_error",
        "message": message,
        "param": None,
        "sequence_number": 0,
        "type": "error",
    }
    return _frame(event)
