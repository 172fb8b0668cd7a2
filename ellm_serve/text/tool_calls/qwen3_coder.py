"""Qwen3CoderDialect: calls as XML-like elements, one element a parameter, values as bare text.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

The arguments are the JSON object of the parameters, separators as `json.dumps` writes them. A
string is handed on while it is written; values of other types when they are complete (`schema`
tells the types and how text becomes a value). One line break at each end of a value is no part of
it. White space between tags means nothing.

What is a call: `<function=NAME>` with `<parameter=`, `</function>` or `</tool_call>` behind it,
inside a `<tool_call>` element or, if NAME is a declared tool, without one. All else is text.

Where markup lacks something or a value quotes some, these rules decide:
* `</parameter>` ends a value only if another tag of a call, or the end of the text, comes next; so
  a value may mention the tag.
* Without it, a value ends at `</function>` with `</tool_call>` (or the end) behind it, and at
  `<parameter=KEY>` at the start of a line, if KEY is declared and has no value so far.
* Without `</function>`, a call ends at `</tool_call>` and at the start of the next call.
* A KEY or NAME may stand in quotes. A KEY without `>` ends with its line.
* Of two values for one KEY the first counts: it has been handed on already.
* A call that the text's end cuts off keeps the parameters so far, the last one as far as it came;
  what may have been the start of a tag is left out. A call cut off within its opening is text,
  unless the whole of `<tool_call><function=NAME>` is there and NAME is declared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum, auto

from ellm_serve.text.tool_calls.dialect import TaggedCalls
from ellm_serve.text.tool_calls.markup import (
    TOOL_CALL,
    TOOL_CALL_END,
    WHITESPACE,
    after_gap,
    followed_by,
    tag_at,
)
from ellm_serve.text.tool_calls.schema import ToolSchemas, convert, may_become_typed

FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"

_BODY = (_PARAMETER, _FUNCTION_END, TOOL_CALL_END)
_STRUCTURE = (*_BODY, TOOL_CALL, FUNCTION)
_VALUE_ENDS = (_PARAMETER_END, _FUNCTION_END, _PARAMETER)

MAX_NAME_CHARS = 256
_KEY_END = re.compile(r"[>\n]")
_NAME_END = re.compile(r"[<>\n]")

# Keeps its C encoder, unlike `json.dumps` with an option.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class _State(Enum):
    """Where in a call we are."""

    BODY = auto()  # between parameters
    KEY = auto()  # behind `<parameter=`
    VALUE_START = auto()  # behind `<parameter=KEY>`
    VALUE = auto()
    CLOSED = auto()  # behind `</function>`


class _Mode(Enum):
    """What becomes of the text of a value."""

    STREAM = auto()  # a string
    PEEK = auto()  # a string, unless it turns out to be null, a number, ...
    WAIT = auto()  # converted when it is complete
    SKIP = auto()  # the key has a value already


class Qwen3CoderDialect(TaggedCalls):
    """The parser of one answer."""

    _openers = (TOOL_CALL, FUNCTION)

    def __init__(self, schemas: ToolSchemas, make_id: Callable[[], str]) -> None:
        super().__init__(make_id)
        self._schemas = schemas
        self._state = _State.BODY
        self._mode = _Mode.STREAM
        self._wrapped = False  # whether we are inside of a `<tool_call>` element
        self._name = ""
        self._types: frozenset[str] = frozenset()
        self._keys: set[str] = set()
        self._value: list[str] = []  # text of a value that is not handed on yet
        self._at_value_start = False
        self._due = ""  # the end of the last value; handed on together with what follows

    @property
    def opening(self) -> str:
        """What a `<tool_call>` element starts with."""
        return FUNCTION

    def _open(self, final: bool) -> bool | None:
        start, wrapped = 0, self._wrapped
        if self._buffer.startswith(TOOL_CALL):
            gap_end = after_gap(self._buffer, len(TOOL_CALL))
            found = None if gap_end is None else tag_at(self._buffer, gap_end, (FUNCTION,))
            if not found or gap_end is None:
                return False if final else found
            start, wrapped = gap_end, True
        opens = self._open_function(start + len(FUNCTION), wrapped, final)
        self._wrapped = self._wrapped and opens is not False
        return opens

    def _open_function(self, position: int, wrapped: bool, final: bool) -> bool | None:
        name, end = _name_at(self._buffer, position)
        if name is None:
            return False if final or end else None
        declared = name in self._schemas
        if not name or not (declared or wrapped):
            return False
        opens = followed_by(self._buffer, end, _BODY)
        if opens is None and final:
            opens = declared and wrapped
        if opens:
            self._begin(name, wrapped, end)
        return opens

    def _begin(self, name: str, wrapped: bool, end: int) -> None:
        self._buffer = self._buffer[end:]
        self._wrapped = wrapped
        self._name = name
        self._keys = set()
        self._due = ""
        self._state = _State.BODY
        self._start_call(name)

    def _advance_call(self, final: bool) -> bool:
        match self._state:
            case _State.BODY:
                return self._body(final)
            case _State.KEY:
                return self._key(final)
            case _State.VALUE_START:
                return self._value_start(final)
            case _State.VALUE:
                return self._value_text(final)
            case _State.CLOSED:
                return self._closed(final)

    def _body(self, final: bool) -> bool:
        self._buffer = self._buffer.lstrip(WHITESPACE)
        if not (tag := self._tag(_STRUCTURE)):
            return self._cut() if final else False
        if tag == _PARAMETER:
            self._take(tag)
            self._state = _State.KEY
            return True
        self._close_object()
        if tag == _FUNCTION_END:
            self._take(tag)
        self._state = _State.CLOSED
        return True

    def _key(self, final: bool) -> bool:
        found = _KEY_END.search(self._buffer, 0, MAX_NAME_CHARS + 1)
        if not found and len(self._buffer) <= MAX_NAME_CHARS:
            return self._cut() if final else False
        end = found.start() if found else MAX_NAME_CHARS
        key = _unquoted(self._buffer[:end])
        self._buffer = self._buffer[end + (self._buffer[end] == ">") :]
        self._start_value(key)
        return True

    def _start_value(self, key: str) -> None:
        self._types = self._schemas.types(self._name, key)
        self._value = []
        self._state = _State.VALUE_START
        if key in self._keys:
            self._mode = _Mode.SKIP
            return
        opening = ", " if self._keys else "{"
        self._keys.add(key)
        if self._types == {"string"}:
            self._mode = _Mode.STREAM
        else:
            self._mode = _Mode.PEEK if "string" in self._types else _Mode.WAIT
        quote = '"' if self._mode is _Mode.STREAM else ""
        self._add_due(f"{opening}{_encode(key)}: {quote}")

    def _value_start(self, final: bool) -> bool:
        if not self._buffer and not final:
            return False
        self._buffer = self._buffer.removeprefix("\n")
        self._at_value_start = True
        self._state = _State.VALUE
        return True

    def _value_text(self, final: bool) -> bool:
        end, ended = self._find_value_end(final)
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        # The line break in front of the closing tag; held until we know whether one follows.
        if text.endswith("\n"):
            text = text[:-1]
            self._buffer = self._buffer if ended else "\n" + self._buffer
        if text:
            self._at_value_start = False
            self._add_value(text)
        if not ended:
            return False
        self._end_value()
        self._buffer = self._buffer.removeprefix(_PARAMETER_END)
        self._state = _State.BODY
        return True

    def _find_value_end(self, final: bool) -> tuple[int, bool]:
        """How far the buffer is text of the value, and whether the value ends there."""
        position = self._buffer.find("<")
        while position >= 0:
            ends = self._ends_value(position, final)
            if ends is not False:
                return position, ends is True
            position = self._buffer.find("<", position + 1)
        return len(self._buffer), final

    def _ends_value(self, position: int, final: bool) -> bool | None:
        text = self._buffer
        ends = tag_at(text, position, _VALUE_ENDS)
        if ends and text.startswith(_PARAMETER_END, position):
            ends = followed_by(text, position + len(_PARAMETER_END), _STRUCTURE)
        elif ends and text.startswith(_FUNCTION_END, position):
            ends = followed_by(text, position + len(_FUNCTION_END), (TOOL_CALL_END,))
        elif ends:
            ends = self._is_next_parameter(position)
        return True if ends is None and final else ends

    def _is_next_parameter(self, position: int) -> bool | None:
        at_line_start = self._buffer[position - 1] == "\n" if position else self._at_value_start
        if not at_line_start:
            return False
        key, end = _name_at(self._buffer, position + len(_PARAMETER))
        if key is None:
            return False if end else None
        return key not in self._keys and self._schemas.declares(self._name, key)

    def _add_value(self, text: str) -> None:
        if self._mode is _Mode.PEEK:
            text = "".join(self._value) + text
            self._value = []
            if may_become_typed(text, self._types):
                # Containers are read as a whole; so are scalars, which are short.
                self._mode = _Mode.WAIT if text[0] in "{[" else _Mode.PEEK
            else:
                self._mode = _Mode.STREAM
                self._add_arguments('"')
        if self._mode is _Mode.STREAM:
            self._add_arguments(_encode(text)[1:-1])
        elif self._mode is not _Mode.SKIP:
            self._value.append(text)

    def _end_value(self) -> None:
        if self._mode is _Mode.STREAM:
            self._due = '"'
        elif self._mode is not _Mode.SKIP:
            self._due = _encode(convert("".join(self._value), self._types))

    def _add_due(self, fragment: str) -> None:
        self._add_arguments(self._due + fragment)
        self._due = ""

    def _close_object(self, truncated: bool = False) -> None:
        self._add_due("}" if self._keys else "{}")
        self._end_call(truncated)

    def _cut(self) -> bool:
        self._close_object(truncated=True)
        self._buffer = ""
        self._leave_call()
        return True

    def _closed(self, final: bool) -> bool:
        """Takes the end of the `<tool_call>` element, if it comes next."""
        ends = followed_by(self._buffer, 0, (TOOL_CALL_END,))
        continues = followed_by(self._buffer, 0, (FUNCTION,))
        if (ends is None or continues is None) and not final:
            return False
        if ends:
            self._buffer = self._buffer.lstrip(WHITESPACE).removeprefix(TOOL_CALL_END)
        self._wrapped = self._wrapped and bool(continues)
        self._leave_call()
        return True

    def _tag(self, tags: tuple[str, ...]) -> str | None:
        return next((tag for tag in tags if self._buffer.startswith(tag)), None)

    def _take(self, tag: str) -> None:
        self._buffer = self._buffer[len(tag) :]


def _name_at(text: str, position: int) -> tuple[str | None, int]:
    """The name that ends with a `>`, and the position behind that.

    No name: 0 as position if the `>` may still come, else one that is not 0.
    """
    found = _NAME_END.search(text, position, position + MAX_NAME_CHARS + 1)
    if found and found.group() == ">":
        return _unquoted(text[position : found.start()]), found.end()
    too_long = len(text) - position > MAX_NAME_CHARS
    return None, position if found or too_long else 0


def _unquoted(name: str) -> str:
    return name.strip().strip("\"'").strip()
