"""ReasoningStage: takes the thought of a Qwen3 model out of its text.

A thought is what stands before the first `</think>`. The tags are dropped, nothing is trimmed.
Whether an answer starts inside of a thought, the end of the prompt tells (`starts_in_reasoning`):
* The prompt opens the thought: the answer starts inside. A `<think>` in front is dropped.
* The prompt closes it (thinking is off): all is content.
* The prompt does neither: an answer that starts with `<think>`, white space aside, is a thought;
  all else is content. So a model that never thinks is not silenced.
A thought that never ends stays a thought. A `</think>` between backticks is mentioned, not meant.

A tool call inside of a thought is only thought about, unless the thought never ends: then the model
forgot `</think>`, and what it wrote from the first call on is the answer, if that call is complete.
As this is known at the end only, the text from a call on is held until then or until `</think>`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ellm_serve.text.tool_calls.markup import WHITESPACE, after_gap, opens_call, tag_at

THINK = "<think>"
THINK_END = "</think>"
_TURN = "<|im_start|>"


def starts_in_reasoning(prompt: str) -> bool | None:
    """What the rendered prompt says about its last turn: inside of a thought, behind it, neither.

    The end of the prompt is enough, if it contains the start of the last turn.
    """
    turn = prompt.rpartition(_TURN)[2]
    opened, closed = turn.rfind(THINK), turn.rfind(THINK_END)
    return None if opened == closed else opened > closed


@dataclass(frozen=True, slots=True)
class Split:
    """Text, divided. `call`: what follows a tool call inside of a thought that never ended."""

    reasoning: str = ""
    content: str = ""
    call: str = ""


class _State(Enum):
    """Where in the answer we are."""

    START = auto()
    THOUGHT = auto()
    CALL = auto()  # in a thought, behind the start of a tool call
    CONTENT = auto()


class ReasoningStage:
    """Divides the text of one answer.

    starts_in_reasoning: what the prompt says, see there. call_opening: what a `<tool_call>` element
    starts with, None if there are no calls.
    """

    def __init__(self, starts_in_reasoning: bool | None, call_opening: str | None) -> None:
        self._state = _State.CONTENT if starts_in_reasoning is False else _State.START
        self._default = _State.THOUGHT if starts_in_reasoning else _State.CONTENT
        self._call_opening = call_opening
        self._buffer = ""
        self._last_char = ""
        self._held: list[str] = []  # the text from a tool call on

    @property
    def in_reasoning(self) -> bool:
        """Whether we are inside of a thought, as far as we know."""
        inside = (_State.THOUGHT, _State.CALL)
        return self._state in inside or (self._state is _State.START and self._default in inside)

    def push(self, text: str) -> Split:
        """What some more text belongs to, as far as it is known."""
        if self._state is _State.CONTENT:
            return Split(content=text)
        self._buffer += text
        return self._advance(final=False)

    def finish(self) -> Split:
        """The rest; the text is over."""
        split = self._advance(final=True)
        if self._state is not _State.CALL:
            return split
        return Split(split.reasoning, split.content, "".join(self._held))

    def _advance(self, final: bool) -> Split:
        if self._state is _State.START and not self._decide_start(final):
            return Split()
        reasoning: list[str] = []
        while self.in_reasoning and self._read_thought(reasoning, final):
            pass
        content = ""
        if self._state is _State.CONTENT:
            content, self._buffer = self._buffer, ""
        return Split("".join(reasoning), content)

    def _decide_start(self, final: bool) -> bool:
        start = after_gap(self._buffer, 0)
        opened = None if start is None else tag_at(self._buffer, start, (THINK,))
        if opened is None and not final:
            return False
        self._state = _State.THOUGHT if opened else self._default
        if opened:
            self._buffer = self._buffer.lstrip(WHITESPACE).removeprefix(THINK)
        return True

    def _read_thought(self, reasoning: list[str], final: bool) -> bool:
        """Reads up to the next tag that counts; False if more text is needed."""
        position = self._buffer.find("<")
        while position >= 0:
            ends = self._ends_thought(position, final)
            calls = False if ends else self._starts_call(position, final)
            if ends:
                self._take(position, reasoning)
                reasoning += self._held
                self._buffer = self._buffer.removeprefix(THINK_END)
                self._state = _State.CONTENT
                return True
            if calls:
                self._take(position, reasoning)
                self._state = _State.CALL
                return True
            if ends is None or calls is None:
                self._take(position, reasoning)
                return False
            position = self._buffer.find("<", position + 1)
        self._take(len(self._buffer), reasoning)
        return False

    def _ends_thought(self, position: int, final: bool) -> bool | None:
        ends = tag_at(self._buffer, position, (THINK_END,))
        before = self._buffer[position - 1] if position else self._last_char
        if ends and before == "`":
            behind = position + len(THINK_END)
            at_end = behind == len(self._buffer)
            ends = None if at_end else self._buffer[behind] != "`"
        if ends is None and final:
            return self._buffer.startswith(THINK_END, position)
        return ends

    def _starts_call(self, position: int, final: bool) -> bool | None:
        if self._call_opening is None or self._state is _State.CALL:
            return False
        starts = opens_call(self._buffer, position, self._call_opening)
        return False if starts is None and final else starts

    def _take(self, num_chars: int, reasoning: list[str]) -> None:
        """Takes characters from the buffer; as reasoning, unless a call may be in them."""
        taken, self._buffer = self._buffer[:num_chars], self._buffer[num_chars:]
        self._last_char = taken[-1:] or self._last_char
        (self._held if self._state is _State.CALL else reasoning).append(taken)
