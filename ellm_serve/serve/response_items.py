"""The output items of one answer of /v1/responses, and the events that tell of them."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from ellm_serve.protocol.responses import (
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from ellm_serve.text.tool_calls import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

Event = dict[str, Any]


class ResponseItems:
    """Takes deltas in; one item is open at a time.

    `items`: those that are complete. Events are numbered in the order in which they are made.
    """

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._open: _Item | None = None
        self._sequence = 0

    def event(self, kind: str, **fields: object) -> Event:
        """An event with its number; its keys are sorted, as in the recorded ones."""
        event = {**fields, "sequence_number": self._sequence, "type": kind}
        self._sequence += 1
        return dict(sorted(event.items()))

    def add(self, delta: OutputDelta) -> Iterator[Event]:
        """The events of more of the answer; they must all be taken."""
        match delta:
            case ContentDelta(text):
                yield from self._more(_Message, text)
            case ReasoningDelta(text):
                yield from self._more(_Thought, text)
            case ToolCallStart(_, call_id, name):
                yield from self._close("completed")
                yield from self._begin(_Call(call_id, name))
            case ToolCallArguments(_, fragment):
                yield from self._told(fragment)
            case ToolCallEnd(_, truncated):
                yield from self._close("incomplete" if truncated else "completed")

    def end(self, is_cut: bool) -> list[Event]:
        """The events of the end; `is_cut`: the answer was not over."""
        return list(self._close("incomplete" if is_cut else "completed"))

    def _more(self, kind: type[_Message] | type[_Thought], text: str) -> Iterator[Event]:
        """Goes on with an item of this kind, or begins one."""
        if not isinstance(self._open, kind):
            yield from self._close("completed")
            yield from self._begin(kind())
        yield from self._told(text)

    def _begin(self, item: _Item) -> Iterator[Event]:
        self._open = item
        yield self._of("response.output_item.added", item=item.model("in_progress").model_dump())
        yield from self._own(item.openings())

    def _told(self, text: str) -> Iterator[Event]:
        assert self._open is not None
        self._open.parts.append(text)
        yield from self._own([self._open.told(text)])

    def _close(self, status: ItemStatus) -> Iterator[Event]:
        if self._open is None:
            return
        yield from self._own(self._open.closings())
        item = self._open.model(status)
        yield self._of("response.output_item.done", item=item.model_dump())
        self.items.append(item)
        self._open = None

    def _own(self, events: list[Event]) -> Iterator[Event]:
        """Events of the open item's own."""
        assert self._open is not None
        for event in events:
            yield self._of(**event, item_id=self._open.id)

    def _of(self, kind: str, **fields: object) -> Event:
        return self.event(kind, **fields, output_index=len(self.items))


class _Item(ABC):
    """An item that is being told. Its events come without what all events of an item have."""

    prefix: str

    def __init__(self) -> None:
        self.id = f"{self.prefix}_{secrets.token_hex(8)}"
        self.parts: list[str] = []

    @property
    def text(self) -> str:
        """All that was told."""
        return "".join(self.parts)

    @abstractmethod
    def model(self, status: ItemStatus) -> OutputItem:
        """The item as it is; without its text while it is in progress."""

    def openings(self) -> list[Event]:
        """Events between the item's beginning and its first piece."""
        return []

    @abstractmethod
    def told(self, text: str) -> Event:
        """The event of a piece."""

    @abstractmethod
    def closings(self) -> list[Event]:
        """Events between the last piece and the item's end."""


class _Message(_Item):
    """What is said to the user."""

    prefix = "msg"

    def model(self, status: ItemStatus) -> OutputItem:
        content = [] if status == "in_progress" else [OutputText(text=self.text)]
        return OutputMessage(id=self.id, content=content, status=status)

    def openings(self) -> list[Event]:
        part = OutputText(text="", logprobs=()).model_dump()
        return [{"kind": "response.content_part.added", "content_index": 0, "part": part}]

    def told(self, text: str) -> Event:
        kind = "response.output_text.delta"
        return {"kind": kind, "content_index": 0, "delta": text, "logprobs": []}

    def closings(self) -> list[Event]:
        text, part = self.text, OutputText(text=self.text).model_dump()
        done = {"kind": "response.output_text.done", "text": text, "logprobs": []}
        ended = {"kind": "response.content_part.done", "part": part}
        return [{**event, "content_index": 0} for event in (done, ended)]


class _Thought(_Item):
    """What the model thinks."""

    prefix = "rs"

    def model(self, status: ItemStatus) -> OutputItem:
        content = None if status == "in_progress" else [ReasoningText(text=self.text)]
        return ReasoningItem(id=self.id, content=content, status=status)

    def openings(self) -> list[Event]:
        part = ReasoningText(text="").model_dump()
        return [{"kind": "response.reasoning_part.added", "content_index": 0, "part": part}]

    def told(self, text: str) -> Event:
        return {"kind": "response.reasoning_text.delta", "content_index": 0, "delta": text}

    def closings(self) -> list[Event]:
        text, part = self.text, ReasoningText(text=self.text).model_dump()
        done = {"kind": "response.reasoning_text.done", "text": text}
        ended = {"kind": "response.reasoning_part.done", "part": part}
        return [{**event, "content_index": 0} for event in (done, ended)]


class _Call(_Item):
    """A call of a function."""

    prefix = "fc"

    def __init__(self, call_id: str, name: str) -> None:
        super().__init__()
        self._call_id = call_id
        self._name = name

    def model(self, status: ItemStatus) -> OutputItem:
        arguments = "" if status == "in_progress" else self.text
        return FunctionCallItem(
            arguments=arguments, call_id=self._call_id, name=self._name, id=self.id, status=status
        )

    def told(self, text: str) -> Event:
        return {"kind": "response.function_call_arguments.delta", "delta": text}

    def closings(self) -> list[Event]:
        kind = "response.function_call_arguments.done"
        return [{"kind": kind, "arguments": self.text, "name": self._name}]
