"""HermesDialect: calls as JSON objects in `<tool_call>` elements.

    <tool_call>
    {"name": NAME, "arguments": {...}}
    </tool_call>

Arguments are handed on while they are written, in the form of `json.dumps`, whatever the model's
own spacing and escapes (`json_reader` says what is forgiven).

What is a call: a `<tool_call>` with an object in it that has a non-empty string as `name`, within
MAX_OPENING characters; declared or not. All else is text. The name is handed on as soon as it is
known; arguments that come before it wait.

Where the markup is not as it should be, these rules decide:
* `parameters` stands for `arguments`. Of several the first counts. None, or null, are `{}`.
* A string with a JSON object in it stands for the object. Any other value stays as it is.
* Braces that are missing or too many at the end do no harm, nor does a missing `</tool_call>`.
* At an error in the JSON, or at the end of the text, open strings and containers are closed, and a
  value that has not begun becomes null; the call is truncated, unless its arguments were complete.
  The rest up to `</tool_call>`, or to the next `<tool_call>`, is dropped.
* A call cut off before its name is known is text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum, auto

from ellm_serve.errors import InvalidRequest
from ellm_serve.text.plain import plain_json
from ellm_serve.text.tool_calls.dialect import TaggedCalls
from ellm_serve.text.tool_calls.json_reader import Expect, ObjectReader
from ellm_serve.text.tool_calls.markup import (
    TOOL_CALL,
    TOOL_CALL_END,
    WHITESPACE,
    followed_by,
    num_unsure,
    opens_call,
)

MAX_OPENING = 16384

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode

_ARGUMENTS = ("arguments", "parameters")
_ENDS = (TOOL_CALL_END, TOOL_CALL)


class _State(Enum):
    """Where in a call we are."""

    OBJECT = auto()
    CLOSED = auto()  # behind the object
    BROKEN = auto()  # behind an error


class _Call:
    """One call on its way from the members of its object to a name and arguments."""

    def __init__(self, start: int) -> None:
        self.reader = ObjectReader()
        self.position = start  # how far the opening has been read
        self.name: str | None = None
        self.has_bad_name = False
        self.is_complete = False  # whether the arguments are
        self._name_json = ""
        self._source: str | None = None  # the member that the arguments come from
        self._held: list[str] = []  # arguments that cannot be handed on yet
        self._is_object = False

    def read(self, text: str, start: int, end: int) -> int:
        """Reads on; returns how far."""
        position = self.reader.push(text, start, end)
        self._understand()
        return position

    def close(self) -> None:
        """Closes what is open."""
        self.reader.close()
        self._understand()

    def arguments(self) -> str:
        """The arguments since the last time, as far as they can be handed on."""
        if not (self._is_object or self.is_complete):
            return ""
        text, self._held = "".join(self._held), []
        return text

    def finish(self) -> str:
        """The rest of the arguments."""
        rest = self.arguments()
        return rest if self._source is not None else "{}"

    def _understand(self) -> None:
        for member, fragment in self.reader.take():
            if member == "name" and self.name is None:
                self._add_name(fragment)
            elif member in _ARGUMENTS and not self.is_complete:
                self._add_arguments(member, fragment)

    def _add_name(self, fragment: str | None) -> None:
        if fragment is not None:
            self._name_json += fragment
            return
        is_string = self._name_json.startswith('"')
        self.name = json.loads(self._name_json) if is_string else ""
        self.has_bad_name = not self.name.strip()

    def _add_arguments(self, member: str, fragment: str | None) -> None:
        if self._source is None:
            self._source = member
            self._is_object = fragment is not None and fragment.startswith("{")
        if fragment is not None:
            self._held.append(fragment)
            return
        self.is_complete = True
        if not self._is_object:
            self._held = [_as_object("".join(self._held))]


class HermesDialect(TaggedCalls):
    """The parser of one answer."""

    _openers = (TOOL_CALL,)

    def __init__(self, make_id: Callable[[], str]) -> None:
        super().__init__(make_id)
        self._state = _State.OBJECT
        self._call: _Call | None = None

    @property
    def opening(self) -> str:
        """What a `<tool_call>` element starts with."""
        return "{"

    def _open(self, final: bool) -> bool | None:
        opens = opens_call(self._buffer, 0, self.opening)
        if not opens:
            return False if final else opens
        call = self._call or _Call(self._buffer.index(self.opening) + 1)
        call.position = call.read(self._buffer, call.position, min(len(self._buffer), MAX_OPENING))
        self._call = call
        if call.name is not None and not call.has_bad_name:
            self._buffer = self._buffer[call.position :]
            self._state = _State.OBJECT
            self._start_call(call.name)
            self._add_arguments(call.arguments())
            return True
        over = call.reader.has_failed or call.reader.expect is Expect.NOTHING
        if over or final or call.has_bad_name or call.position >= MAX_OPENING:
            self._call = None
            return False
        return None

    def _advance_call(self, final: bool) -> bool:
        match self._state:
            case _State.OBJECT:
                return self._object(final)
            case _State.CLOSED:
                return self._closed(final)
            case _State.BROKEN:
                return self._broken(final)

    def _object(self, final: bool) -> bool:
        call = self._call
        if call is None:
            raise RuntimeError("inside of a call without one")
        self._buffer = self._buffer[call.read(self._buffer, 0, len(self._buffer)) :]
        self._add_arguments(call.arguments())
        if call.reader.expect is Expect.NOTHING:
            self._finish_call(call, truncated=False)
            self._state = _State.CLOSED
        elif call.reader.has_failed or final:
            truncated = not call.is_complete
            call.close()
            self._finish_call(call, truncated)
            self._state = _State.BROKEN
        else:
            return False
        return True

    def _finish_call(self, call: _Call, truncated: bool) -> None:
        self._add_arguments(call.finish())
        self._end_call(truncated)
        self._call = None

    def _closed(self, final: bool) -> bool:
        """Takes the end of the `<tool_call>` element, if it comes next."""
        skipped = WHITESPACE + "}"
        ends = followed_by(self._buffer, 0, (TOOL_CALL_END,), skipped)
        if ends is None and not final:
            return False
        if ends:
            self._buffer = self._buffer.lstrip(skipped).removeprefix(TOOL_CALL_END)
        self._leave_call()
        return True

    def _broken(self, final: bool) -> bool:
        starts = [self._buffer.find(tag) for tag in _ENDS]
        start = min((start for start in starts if start >= 0), default=-1)
        if start >= 0:
            self._buffer = self._buffer[start:].removeprefix(TOOL_CALL_END)
        else:
            num_held = 0 if final else num_unsure(self._buffer, _ENDS)
            self._buffer = self._buffer[len(self._buffer) - num_held :]
        if start < 0 and not final:
            return False
        self._leave_call()
        return True


def _as_object(text: str) -> str:
    """Arguments that were not written as an object, as one if they stand for one."""
    if text == "null":
        return "{}"
    if not text.startswith('"'):
        return text
    inner = json.loads(text)
    if not inner.strip():
        return "{}"
    try:
        value = plain_json(json.loads(inner), "arguments")
        return _encode(value) if isinstance(value, dict) else text
    except (ValueError, RecursionError, InvalidRequest):
        return text
