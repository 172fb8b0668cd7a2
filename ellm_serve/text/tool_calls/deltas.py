"""What an answer consists of, as it arrives: content, reasoning, tool calls.

The deltas of an answer put together (`collect`) are the answer: there is no second way to it, so
what is streamed and what is returned whole cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the text that the user is to see."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the model's thought."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; calls are numbered from 0 and never overlap."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call is over. Its arguments are valid JSON in any case.

    truncated: its markup broke off, by the end of the text or by an error in its JSON.
    """

    index: int
    truncated: bool


OutputDelta: TypeAlias = (
    ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallEnd
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """One whole answer; None where there is nothing of the kind."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]


def collect(deltas: Iterable[OutputDelta]) -> Output:
    """The answer that the deltas make up."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    fragments: list[str] = []
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallStart(_, call_id, name):
                calls.append(ToolCall(call_id, name))
                fragments = []
            case ToolCallArguments(_, fragment):
                fragments.append(fragment)
            case ToolCallEnd(_, truncated):
                arguments = "".join(fragments)
                calls[-1] = replace(calls[-1], arguments=arguments, truncated=truncated)
    return Output("".join(content) or None, "".join(reasoning) or None, tuple(calls))


def merged(deltas: Iterable[OutputDelta]) -> list[OutputDelta]:
    """The same deltas with neighbours of one kind joined and empty ones left out."""
    result: list[OutputDelta] = []
    for delta in deltas:
        last = result[-1] if result else None
        match last, delta:
            case (_, ContentDelta("") | ReasoningDelta("") | ToolCallArguments(_, "")):
                pass
            case (ContentDelta(before), ContentDelta(text)):
                result[-1] = ContentDelta(before + text)
            case (ReasoningDelta(before), ReasoningDelta(text)):
                result[-1] = ReasoningDelta(before + text)
            case (ToolCallArguments(index, before), ToolCallArguments(_, text)):
                result[-1] = ToolCallArguments(index, before + text)
            case _:
                result.append(delta)
    return result
