"""Dialect: how a model writes its tool calls, and what is common to all such languages.

A call is an element with tags; everything else is content. The rules for content:
* Text outside of calls is content as it is, before, between and behind calls, except for
* white space right before a call, and at the end of a text with calls: it is dropped (of a very
  long run the last MAX_SPACE characters).
* A tag that opens no well-formed call is text. So are all tags in a code span that starts with one:
  right behind a backtick that is the first, third, ... of its line, up to the next backtick or the
  end of the line. (Whole calls in fenced blocks are calls.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol

from ellm_serve.text.tool_calls.deltas import (
    ContentDelta,
    OutputDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from ellm_serve.text.tool_calls.markup import WHITESPACE, num_unsure

MAX_SPACE = 256
# A long text is read in portions, as every tag in it takes a copy of what follows.
_PORTION = 4096


class Dialect(Protocol):
    """Turns the text of one answer into deltas. Serves one answer."""

    @property
    def opening(self) -> str | None:
        """What a `<tool_call>` element starts with in this dialect; None if there are no calls."""
        ...

    def push(self, text: str) -> list[OutputDelta]:
        """What is known after some more text."""
        ...

    def finish(self) -> list[OutputDelta]:
        """The rest; the text is over."""
        ...


class NoTools:
    """The dialect of requests without tools: all text is content, byte for byte."""

    opening: None = None

    def push(self, text: str) -> list[OutputDelta]:
        """The text."""
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[OutputDelta]:
        """Nothing is ever held back."""
        return []


class TaggedCalls(ABC):
    """What dialects with tags have in common: the text outside of calls, and the deltas.

    make_id: gives a new id for every call.
    """

    # The tags with which a call may start; their only `<` is in front.
    _openers: ClassVar[tuple[str, ...]]

    def __init__(self, make_id: Callable[[], str]) -> None:
        self._make_id = make_id
        self._buffer = ""  # what has not been understood yet
        self._space = ""  # white space that is content only if no call follows
        self._num_calls = 0
        self._in_call = False
        self._in_code = False  # whether an odd number of backticks is before us on this line
        self._is_quoting = False  # whether we are in a code span that starts with a tag
        self._last_char = ""
        self._deltas: list[OutputDelta] = []

    @property
    @abstractmethod
    def opening(self) -> str:
        """What a `<tool_call>` element starts with."""

    @abstractmethod
    def _open(self, final: bool) -> bool | None:
        """Whether the opener at the start of the buffer begins a call; None: too early to say.

        If it does, the call is begun and its opening is taken from the buffer. If the text is
        `final`, there is an answer.
        """

    @abstractmethod
    def _advance_call(self, final: bool) -> bool:
        """One step inside of a call; False: more text is needed. A `final` text ends the call."""

    def push(self, text: str) -> list[OutputDelta]:
        """What is known after some more text."""
        deltas: list[OutputDelta] = []
        for start in range(0, len(text), _PORTION):
            self._buffer += text[start : start + _PORTION]
            deltas += self._advance(final=False)
        return deltas

    def finish(self) -> list[OutputDelta]:
        """The rest; a call that is still open is closed and marked as truncated."""
        deltas = self._advance(final=True)
        if self._space and not self._num_calls:
            deltas.append(ContentDelta(self._space))
        return deltas

    def _advance(self, final: bool) -> list[OutputDelta]:
        while self._advance_call(final) if self._in_call else self._advance_text(final):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def _advance_text(self, final: bool) -> bool:
        starts = [self._buffer.find(opener) for opener in self._openers]
        start = min((start for start in starts if start >= 0), default=-1)
        if start < 0:
            num_held = 0 if final else num_unsure(self._buffer, self._openers)
            self._show(len(self._buffer) - num_held)
            return False
        self._show(start)
        self._is_quoting = self._is_quoting or (self._in_code and self._last_char == "`")
        opens = False if self._is_quoting else self._open(final)
        if opens is False:
            self._show(1)  # the rest of the tag may be followed by one that opens a call
        return opens is not None

    def _show(self, num_chars: int) -> None:
        """Takes characters from the buffer as content; white space at their end waits."""
        if not num_chars:
            return
        taken, self._buffer = self._buffer[:num_chars], self._buffer[num_chars:]
        line = taken.rfind("\n") + 1
        self._in_code = (self._in_code and not line) ^ (taken.count("`", line) % 2 == 1)
        self._is_quoting = self._is_quoting and not line and "`" not in taken
        self._last_char = taken[-1]
        text = self._space + taken
        num_shown = max(len(text.rstrip(WHITESPACE)), len(text) - MAX_SPACE)
        self._space = text[num_shown:]
        if num_shown:
            self._deltas.append(ContentDelta(text[:num_shown]))

    def _start_call(self, name: str) -> None:
        self._in_call = True
        self._space = ""
        self._deltas.append(ToolCallStart(self._num_calls, self._make_id(), name))
        self._num_calls += 1

    def _add_arguments(self, fragment: str) -> None:
        if fragment:
            self._deltas.append(ToolCallArguments(self._num_calls - 1, fragment))

    def _end_call(self, truncated: bool = False) -> None:
        self._deltas.append(ToolCallEnd(self._num_calls - 1, truncated))

    def _leave_call(self) -> None:
        """Text follows."""
        self._in_call = False
        self._in_code = self._is_quoting = False
        self._last_char = ""
