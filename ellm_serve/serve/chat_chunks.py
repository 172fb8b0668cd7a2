"""The chunks of a streamed chat answer."""

from __future__ import annotations

from collections.abc import Sequence

from ellm_serve.errors import EllmError
from ellm_serve.serve.answer import Answer
from ellm_serve.serve.chat_events import ChatEvent
from ellm_serve.serve.chat_view import ChatView
from ellm_serve.serve.sse import DONE, failure_chunk, time_comment, to_json
from ellm_serve.serve.usage import UsageTails
from ellm_serve.text.tool_calls.deltas import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    merged,
)


class ChatChunkWriter:
    """Writes chunks as JSON text: a model object per token would cost too much.

    Each chunk has one kind of delta. A token that shows nothing of its own (half a character, the
    start of a tag) waits for the next one, so that its log-probability and its id come with the
    text they belong to.
    """

    def __init__(self, view: ChatView, token_times: bool) -> None:
        backend = view.backend
        self._view = view
        self._times = token_times
        self._deltas = DeltaWriter(
            # vLLM's parsers differ in this, and there may be clients that have come to rely on it.
            null_content=backend.parsers.dialect == "hermes",
            reasoning_names=("reasoning", "reasoning_content")[: 1 + view.aliases_reasoning],
        )
        self._tails = UsageTails(
            view.usage, view.run.request.stream_options, backend.config, backend.fingerprint
        )
        self._head = (
            f'data: {{"id":{to_json(view.run.id)},"object":"chat.completion.chunk",'
            f'"created":{view.created},"model":{to_json(backend.model_name)},"choices":['
        )
        self._held: dict[int, ChatEvent] = {}
        self._begun = False

    def events(self, events: Sequence[ChatEvent]) -> str:
        """The chunks of what has something to show; before them all, those of roles."""
        chunks = [] if self._begun else self._openings()
        for event in events:
            held = self._held.pop(event.index, None)
            if held is not None:
                held.add(event)
                event = held
            shown = self._deltas.write(event.deltas)
            if shown or event.finish is not None:
                chunks += self._chunks(event, shown)
            else:
                self._held[event.index] = event
        return "".join(chunks)

    def end(self) -> str:
        """The chunk with the whole request's usage, if it is wanted, and [DONE]."""
        usage = self._tails.final()
        return f"{self._head}]{usage}}}\n\n{DONE}" if usage else DONE

    def failure(self, error: EllmError) -> str:
        """What is sent if there is no whole answer."""
        return failure_chunk(error)

    def _openings(self) -> list[str]:
        self._begun = True
        view = self._view
        chunks = []
        for answer in view.run.answers:
            delta = to_json({"role": view.role, "content": ""})
            tail = (
                f'{self._tails.running(answer)},"prompt_token_ids":{to_json(view.prompt_ids)}'
                f',"prompt_text":{to_json(view.prompt_text)}'
            )
            chunks.append(self._opening(answer, delta, tail))
        if view.echo:
            delta = to_json({"content": view.echo})
            for answer in view.run.answers:
                chunks.append(self._opening(answer, delta, self._tails.running(answer)))
        return chunks

    def _opening(self, answer: Answer, delta: str, tail: str) -> str:
        return (
            f'{self._head}{{"index":{answer.index},"delta":{delta},"logprobs":null'
            f',"finish_reason":null}}]{tail}}}\n\n'
        )

    def _chunks(self, event: ChatEvent, shown: Sequence[str]) -> list[str]:
        """One chunk for each delta; ids and log-probabilities are in the first, the end in the
        last."""
        view = self._view
        answer = view.run.answers[event.index]
        logprobs = to_json(view.logprobs(event.logprobs))
        token_ids = to_json(event.token_ids if view.wants_ids else None)
        head = f"{time_comment(event.time) if self._times else ''}{self._head}"
        chunks: list[str] = []
        *others, last = shown or ("{}",)
        running = self._tails.running(answer)
        for delta in others:
            chunks.append(
                f'{head}{{"index":{event.index},"delta":{delta},"logprobs":{logprobs}'
                f',"finish_reason":null,"token_ids":{token_ids}}}]{running}}}\n\n'
            )
            logprobs = token_ids = "null"
        if event.finish is None:
            finish, tail = "null", running
        else:
            finish = f'"{event.finish.reason}","stop_reason":{to_json(event.finish.stop_reason)}'
            tail = self._tails.last(answer)
        chunks.append(
            f'{head}{{"index":{event.index},"delta":{last},"logprobs":{logprobs}'
            f',"finish_reason":{finish},"token_ids":{token_ids}}}]{tail}}}\n\n'
        )
        return chunks


class DeltaWriter:
    """Writes what is added to a message.

    null_content: a call comes with an empty `content`. reasoning_names: the keys of thoughts.
    """

    def __init__(self, *, null_content: bool, reasoning_names: Sequence[str]) -> None:
        content = '"content":null,' if null_content else ""
        self._call = f'{{{content}"tool_calls":[{{'
        self._reasoning_names = reasoning_names

    def write(self, deltas: Sequence[OutputDelta]) -> list[str]:
        """The JSON of each delta that shows; neighbours of one kind are joined."""
        return [self._write(one) for one in merged(deltas) if not isinstance(one, ToolCallEnd)]

    def _write(self, delta: OutputDelta) -> str:
        match delta:
            case ContentDelta(text):
                return f'{{"content":{to_json(text)}}}'
            case ReasoningDelta(text):
                fields = [f'"{name}":{to_json(text)}' for name in self._reasoning_names]
                return f"{{{','.join(fields)}}}"
            case ToolCallStart(index, call_id, name):
                return (
                    f'{self._call}"id":"{call_id}","type":"function","index":{index}'
                    f',"function":{{"name":{to_json(name)}}}}}]}}'
                )
            case ToolCallArguments(index, fragment):
                return (
                    f'{self._call}"index":{index},"function":{{"arguments":{to_json(fragment)}'
                    "}}]}"
                )
            case ToolCallEnd():
                raise AssertionError("the end of a call does not show")
