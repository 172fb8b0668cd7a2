"""OutputParser: the text of one answer in, its content, reasoning and tool calls out.

Works on pieces of any size and holds back only what could still turn out to be something else. The
deltas put together are the same wherever the text was cut, so an answer that is returned whole is
just `collect(parser.push(text) + parser.finish())`.
"""

from __future__ import annotations

from ellm_serve.text.reasoning import ReasoningStage
from ellm_serve.text.tool_calls.deltas import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallEnd,
    ToolCallStart,
    merged,
)
from ellm_serve.text.tool_calls.dialect import Dialect


class OutputParser:
    """The parser of one answer: thoughts are taken out first, then tool calls.

    reasoning: whether the model's thoughts are told apart; without, they are content.
    starts_in_reasoning: what the prompt says, see `reasoning.starts_in_reasoning`.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        reasoning: bool = False,
        starts_in_reasoning: bool | None = None,
    ) -> None:
        self._dialect = dialect
        self._reasoning = (
            ReasoningStage(starts_in_reasoning, dialect.opening) if reasoning else None
        )

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside of a thought."""
        return self._reasoning is not None and self._reasoning.in_reasoning

    def push(self, text: str) -> list[OutputDelta]:
        """What is known after some more text; neighbours of one kind are joined."""
        if self._reasoning is None:
            return merged(self._dialect.push(text))
        split = self._reasoning.push(text)
        return merged([ReasoningDelta(split.reasoning), *self._dialect.push(split.content)])

    def finish(self) -> list[OutputDelta]:
        """The rest; the text is over."""
        if self._reasoning is None:
            return merged(self._dialect.finish())
        split = self._reasoning.finish()
        answer = [*self._dialect.push(split.content + split.call), *self._dialect.finish()]
        if split.call:
            answer = _call_from_thought(split.call, answer)
        return merged([ReasoningDelta(split.reasoning), *answer])


def _call_from_thought(text: str, parsed: list[OutputDelta]) -> list[OutputDelta]:
    """The end of a thought that was never closed, from something like a tool call on.

    parsed: what the text would be as an answer. It is one if the first call in it is complete; what
    stands before that call, or else all of the text, still is part of the thought.
    """
    ends = [delta for delta in parsed if isinstance(delta, ToolCallEnd)]
    if not ends or ends[0].truncated:
        return [ReasoningDelta(text)]
    first = next(i for i, delta in enumerate(parsed) if isinstance(delta, ToolCallStart))
    before = [ReasoningDelta(d.text) for d in parsed[:first] if isinstance(d, ContentDelta)]
    return [*before, *parsed[first:]]
