"""ObjectReader: reads a JSON object that arrives in pieces, member by member.

The text of each member's value comes out as it arrives, in the form in which `json.dumps` writes
it: fixed separators, no needless escapes. Put together, that is what parsing the whole and writing
it again would give, except that a key may come twice. Forgiven, as models write it: raw line breaks
in strings, a backslash that starts no escape (it stands for itself), a comma before a closing
bracket, Python's True, False and None. Lone surrogates become U+FFFD.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from ellm_serve.text.plain import MAX_DEPTH, without_surrogates

_encode = json.JSONEncoder(ensure_ascii=False).encode

_CLOSERS = {"{": "}", "[": "]"}
_LITERALS = {
    "true": "true",
    "True": "true",
    "false": "false",
    "False": "false",
    "null": "null",
    "None": "null",
}
_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[A-Za-z0-9+.-]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_RUN = re.compile(r'[^"\\]*')

_HEX = "[0-9a-fA-F]"
_HIGH = rf"\\u[dD][89abAB]{_HEX}{{2}}"
_ESCAPE = re.compile(rf'\\["\\/bfnrt]|{_HIGH}\\u[dD][c-fC-F]{_HEX}{{2}}|(?!{_HIGH})\\u{_HEX}{{4}}')
_ESCAPE_SO_FAR = re.compile(rf"\\(u{_HEX}{{0,3}})?|{_HIGH}(\\(u([dD]([c-fC-F]{_HEX}?)?)?)?)?")
_HIGH_CHARS = 6
_REPLACEMENT = "\ufffd"


class Expect(Enum):
    """What comes next."""

    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()
    STRING = auto()  # the rest of a string
    WORD = auto()  # the rest of a number or literal
    NOTHING = auto()  # the object is complete


class ObjectReader:
    """Reads one object whose opening brace has been read already."""

    def __init__(self) -> None:
        self.expect = Expect.KEY
        self.has_failed = False  # whether something else came than what was expected
        self._open = ["}"]  # what will close the open containers, the outermost first
        self._is_empty = True  # whether the innermost container is
        self._is_key = False
        self._token = ""  # a key or word as far as it came
        self._escape = ""
        self._member = ""
        self._events: list[tuple[str, str | None]] = []

    def push(self, text: str, position: int, end: int) -> int:
        """Reads text[position:end]; returns how far it got, which is all, unless the object ends.

        At an error that is the first character that cannot be.
        """
        while position < end and not self.has_failed:
            match self.expect:
                case Expect.NOTHING:
                    break
                case Expect.STRING if self._escape:
                    position = self._read_escape(text, position)
                case Expect.STRING:
                    position = self._read_string(text, position, end)
                case Expect.WORD:
                    position = self._read_word(text, position, end)
                case _:
                    position = self._read_structure(text, position, end)
        return position

    def take(self) -> list[tuple[str, str | None]]:
        """(member, more of its value) for all that was read since the last call, in order.

        (member, None): the value is complete.
        """
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """The text is over: completes the value that is open with as little as possible."""
        match self.expect:
            case Expect.STRING if not self._is_key:
                self._emit('"')
            case Expect.WORD:
                self._start_item(_word_value(self._token) or "null")
            case Expect.VALUE if self._open[-1] == "}":
                self._emit("null")
            case Expect.NOTHING:
                return
            case _ if len(self._open) == 1:
                return  # between members
        self._emit("".join(reversed(self._open[1:])))
        self._events.append((self._member, None))
        self.expect = Expect.NOTHING

    def _emit(self, fragment: str) -> None:
        self._events.append((self._member, fragment))

    def _read_structure(self, text: str, position: int, end: int) -> int:
        space = _SPACE.match(text, position, end)
        position = space.end() if space else position
        if position == end:
            return position
        char = text[position]
        if char == self._open[-1] and self._may_close():
            self._close_container()
        elif not self._accept(char):
            self.has_failed = True
            return position
        # The first character of a word belongs to the word.
        return position if self.expect is Expect.WORD else position + 1

    def _may_close(self) -> bool:
        if self.expect is Expect.VALUE:
            return self._open[-1] == "]"
        return self.expect is not Expect.COLON

    def _accept(self, char: str) -> bool:
        """Takes a character that closes nothing; False if it cannot stand here."""
        match self.expect:
            case Expect.KEY if char == '"':
                self._start_string(is_key=True)
            case Expect.COLON if char == ":":
                self._end_key()
            case Expect.COMMA if char == ",":
                self._expect_item()
            case Expect.VALUE if char == '"':
                self._start_item('"')
                self._start_string(is_key=False)
            case Expect.VALUE if char in _CLOSERS and len(self._open) <= MAX_DEPTH:
                self._start_item(char)
                self._open.append(_CLOSERS[char])
                self._is_empty = True
                self._expect_item()
            case Expect.VALUE if _WORD.fullmatch(char):
                self._token = ""
                self.expect = Expect.WORD
            case _:
                return False
        return True

    def _expect_item(self) -> None:
        self.expect = Expect.KEY if self._open[-1] == "}" else Expect.VALUE

    def _start_item(self, fragment: str) -> None:
        """Emits the start of a value; in an array also what stands in front of it."""
        in_array = self._open[-1] == "]"
        self._emit((", " if in_array and not self._is_empty else "") + fragment)
        self._is_empty = False

    def _end_value(self) -> None:
        self.expect = Expect.COMMA
        if len(self._open) == 1:
            self._events.append((self._member, None))

    def _close_container(self) -> None:
        closer = self._open.pop()
        self._is_empty = False
        if self._open:
            self._emit(closer)
            self._end_value()
        else:
            self.expect = Expect.NOTHING

    def _start_string(self, is_key: bool) -> None:
        self._is_key = is_key
        self._token = ""
        self.expect = Expect.STRING

    def _end_key(self) -> None:
        if len(self._open) == 1:
            self._member = self._token
        else:
            self._emit(("" if self._is_empty else ", ") + _encode(self._token) + ": ")
            self._is_empty = False
        self.expect = Expect.VALUE

    def _read_string(self, text: str, position: int, end: int) -> int:
        run = _RUN.match(text, position, end)
        if run and run.group():
            self._add_text(run.group())
            return run.end()
        if text[position] == "\\":
            self._escape = "\\"
        elif self._is_key:
            self.expect = Expect.COLON
        else:
            self._emit('"')
            self._end_value()
        return position + 1

    def _read_escape(self, text: str, position: int) -> int:
        """One more character of an escape, or none if it cannot belong to it."""
        escape = self._escape + text[position]
        if _ESCAPE.fullmatch(escape):
            self._add_text(without_surrogates(json.loads(f'"{escape}"')))
            self._escape = ""
        elif _ESCAPE_SO_FAR.fullmatch(escape):
            self._escape = escape
        else:
            self._give_up_escape()
            return position
        return position + 1

    def _give_up_escape(self) -> None:
        if len(self._escape) < _HIGH_CHARS:
            self._add_text(self._escape)
            self._escape = ""
        else:  # a high surrogate, and what may have been the start of a low one
            self._add_text(_REPLACEMENT)
            self._escape = self._escape[_HIGH_CHARS:]

    def _add_text(self, text: str) -> None:
        if self._is_key:
            self._token += text
        else:
            self._emit(_encode(text)[1:-1])

    def _read_word(self, text: str, position: int, end: int) -> int:
        word = _WORD.match(text, position, end)
        position = word.end() if word else position
        self._token += word.group() if word else ""
        if position < end:
            value = _word_value(self._token)
            if value is None:
                self.has_failed = True
            else:
                self._start_item(value)
                self._end_value()
        return position


def _word_value(word: str) -> str | None:
    """A number or literal as `json.dumps` writes it; None if it is neither."""
    if not _NUMBER.fullmatch(word):
        return _LITERALS.get(word)
    try:
        value = json.loads(word)
    except ValueError:  # more digits than Python converts
        return word
    # Too great for a float: the text is valid JSON, "Infinity" would not be.
    return word if value in (float("inf"), float("-inf")) else _encode(value)
