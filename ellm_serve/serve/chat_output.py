"""ChatOutput: the tokens' text of one chat answer in, what a client is shown of it out.

Stop strings count in what a user reads, the content: not in a thought and not in the arguments of a
call, where they would break what they were not meant for. So the text is taken apart first. What
was held back as the start of a stop string is shown before a call, so none reaches across one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ellm_serve.text.output_parser import OutputParser
from ellm_serve.text.stop import StopStrings
from ellm_serve.text.tool_calls import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallEnd,
    ToolCallStart,
)


@dataclass(frozen=True, slots=True)
class OutputRules:
    """What of an answer is shown, and what ends it.

    stop, include_stop, min_tokens: as in `text.answer.AnswerText`, for the content.
    hide_calls: calls are taken out of the content and not shown.
    only_calls: a call was demanded, so what is not one is the markup of a call that was cut off.
    single_call: the answer ends with its first call.
    hide_reasoning: thoughts are not shown.
    think_ids: the tokens that open and close a thought, where the model has such.
    """

    stop: Sequence[str] = ()
    include_stop: bool = False
    min_tokens: int = 0
    hide_calls: bool = False
    only_calls: bool = False
    single_call: bool = False
    hide_reasoning: bool = False
    think_ids: tuple[int | None, int | None] = (None, None)


class ChatOutput:
    """One answer. `num_reasoning_tokens`: of thoughts, their tags left out, shown or not."""

    def __init__(self, parser: OutputParser | None, rules: OutputRules) -> None:
        """Without a parser all text is content."""
        self._parser = parser
        self._rules = rules
        self._stop = self._new_stop()
        self._num_tokens = 0
        self._is_final = False
        self._ended_by_call = False
        self._is_over = False
        self.has_calls = False
        self.num_reasoning_tokens = 0

    @property
    def matched(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._stop.matched

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is wanted, whatever the model says next."""
        return self._ended_by_call or self.matched is not None

    def push(self, text: str, token_ids: Sequence[int]) -> list[OutputDelta]:
        """What is shown after some more tokens; `text` is as much of theirs as is known."""
        self._num_tokens += len(token_ids)
        if self.is_complete:
            return []
        if self._parser is None:
            return self._shown([ContentDelta(text)] if text else [])
        before = self._parser.in_reasoning
        deltas = self._parser.push(text)
        if before or self._parser.in_reasoning or _has_thought(deltas):
            self._count_thought(token_ids, before)
        return self._shown(deltas)

    def finish(self) -> list[OutputDelta]:
        """What was held back; the answer is over."""
        if self.is_complete:
            return []
        self._is_final = True
        shown = [] if self._parser is None else self._shown(self._parser.finish())
        return shown + _content(self._stop.flush())

    def _count_thought(self, token_ids: Sequence[int], before: bool) -> None:
        assert self._parser is not None
        opening, closing = self._rules.think_ids
        inner = list(token_ids)
        if not before and opening in inner:
            inner = inner[inner.index(opening) + 1 :]
        if not self._parser.in_reasoning and closing in inner:
            inner = inner[: inner.index(closing)]
        self.num_reasoning_tokens += sum(token not in self._rules.think_ids for token in inner)

    def _shown(self, deltas: Iterable[OutputDelta]) -> list[OutputDelta]:
        shown: list[OutputDelta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                shown += self._content(delta)
            elif isinstance(delta, ReasoningDelta):
                shown += [] if self._rules.hide_reasoning else [delta]
            elif not self._rules.hide_calls:
                shown += self._call(delta)
            if self._is_over or self.matched is not None:
                break
        return shown

    def _content(self, delta: ContentDelta) -> list[OutputDelta]:
        if self._rules.only_calls:
            return []
        if not self._rules.stop:
            return [delta]
        armed = self._num_tokens > self._rules.min_tokens
        return _content(self._stop.push(delta.text, armed=armed))

    def _call(self, delta: OutputDelta) -> list[OutputDelta]:
        held: list[OutputDelta] = []
        if isinstance(delta, ToolCallStart):
            self.has_calls = True
            held = _content(self._stop.flush())
            self._stop = self._new_stop()
        elif isinstance(delta, ToolCallEnd):
            self._is_over = self._rules.single_call
            # One that the end of the text has cut off has not ended the answer.
            self._ended_by_call = self._is_over and not (self._is_final and delta.truncated)
        return [*held, delta]

    def _new_stop(self) -> StopStrings:
        return StopStrings(self._rules.stop, include_in_output=self._rules.include_stop)


def _content(text: str) -> list[OutputDelta]:
    return [ContentDelta(text)] if text else []


def _has_thought(deltas: Iterable[OutputDelta]) -> bool:
    return any(isinstance(delta, ReasoningDelta) for delta in deltas)
