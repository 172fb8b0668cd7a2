"""StopStrings: ends a text at the first stop string, wherever the pieces of it are cut.

Held back is only what could be the start of a stop string. The first stop string to be *complete*
wins; of several that end at the same character the longest. So the result depends on the text
alone and not on how it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

from ellm_serve.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024


class StopStrings:
    """The filter between one sequence's text and its reader."""

    def __init__(self, strings: Sequence[str], *, include_in_output: bool = False) -> None:
        _check(strings)
        # The longest first, so that it is the one found where several end.
        ordered = sorted(set(strings), key=lambda string: (-len(string), string))
        self._matchers = [_Matcher(string) for string in ordered]
        self._include = include_in_output
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matched

    def push(self, text: str, *, armed: bool = True) -> str:
        """What the reader may see after `text`; nothing any more once a string has matched.

        A string that is complete while the filter is not `armed` is ordinary text; one that only
        starts there is found all the same.
        """
        if self._matched is not None:
            return ""
        if not self._matchers:
            return text
        for i, char in enumerate(text):
            for matcher in self._matchers:
                if matcher.advance(char) and armed:
                    return self._finish(matcher.string, self._held + text[: i + 1])
        return self._release(self._held + text, max(m.num_matched for m in self._matchers))

    def flush(self) -> str:
        """The held text; at the end of the sequence."""
        held, self._held = self._held, ""
        return held

    def _release(self, text: str, num_held: int) -> str:
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut]

    def _finish(self, string: str, text: str) -> str:
        self._matched = string
        self._held = ""
        return text if self._include else text[: len(text) - len(string)]


class _Matcher:
    """Knuth-Morris-Pratt for one string: constant work per character, on average.

    `num_matched` is the length of the longest start of the string, short of all of it, that the
    text ends with.
    """

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        self._fallback = _fallback_table(string)

    def advance(self, char: str) -> bool:
        """Takes one more character; True when the string is complete with it."""
        while self.num_matched and self.string[self.num_matched] != char:
            self.num_matched = self._fallback[self.num_matched - 1]
        if self.string[self.num_matched] == char:
            self.num_matched += 1
        complete = self.num_matched == len(self.string)
        if complete:
            self.num_matched = self._fallback[-1]
        return complete


def _fallback_table(string: str) -> list[int]:
    """For each prefix the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(string)
    length = 0
    for i in range(1, len(string)):
        while length and string[i] != string[length]:
            length = table[length - 1]
        if string[i] == string[length]:
            length += 1
        table[i] = length
    return table


def _check(strings: Sequence[str]) -> None:
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings", "stop")
    for string in strings:
        if not string:
            raise InvalidRequest("a stop string must not be empty", "stop")
        if len(string.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
            raise InvalidRequest(f"a stop string takes at most {MAX_STOP_BYTES} bytes", "stop")
