"""Keeps control tokens that a client only *spells* apart from those the template writes.

Before rendering, each control spelling in a client's string is replaced by stand-ins: private-use
characters, one for one, so lengths and positions stay. After rendering the stand-ins become the
ordinary spelling again and their places are known: there no control token may be encoded.
A template that asks about a string (`startswith`, `in`, `==`) is answered for the plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ellm_serve.errors import InvalidRequest
from ellm_serve.text.plain import Json, map_strings

# Supplementary private use area A; the last two code points of that plane are not characters.
_AREA = range(0xF0000, 0xFFFFE)
_IN_AREA = re.compile(f"[{chr(_AREA.start)}-{chr(_AREA.stop - 1)}]")


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text, and the spans [start, stop) of it that are ordinary text whatever they spell."""

    text: str
    literal_spans: tuple[tuple[int, int], ...] = ()

    def tail(self, start: int) -> MarkedText:
        """The text from `start` on, with its spans."""
        spans = tuple(
            (max(low - start, 0), high - start) for low, high in self.literal_spans if high > start
        )
        return MarkedText(self.text[start:], spans)


def longest_first(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds tokens in a text as a tokenizer does: leftmost, then longest."""
    ordered = sorted(set(tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


class ControlSpellings:
    """The spellings of a tokenizer's control tokens, and what they could be put together from."""

    def __init__(self, tokens: Mapping[str, bool]) -> None:
        """`tokens` tells for each added token whether it is a special one."""
        self.alphabet = "".join(sorted(set("".join(tokens))))
        self.any_token = longest_first(tokens)
        self.special_token = longest_first(token for token, special in tokens.items() if special)
        cuts = [(token, n) for token in tokens for n in range(1, len(token))]
        self._heads = frozenset(token[:n] for token, n in cuts)
        self._tails = frozenset(token[n:] for token, n in cuts)
        self._inner = frozenset(tail[:n] for tail in self._tails for n in range(1, len(tail)))
        self._longest = max(map(len, tokens), default=1) - 1

    def fragments(self, text: str) -> Iterator[tuple[int, int]]:
        """Spans at the ends of `text` that its surroundings could complete to a control token."""
        if text in self._inner:
            yield 0, len(text)
            return
        lengths = range(min(self._longest, len(text)), 0, -1)
        head = next((n for n in lengths if text[:n] in self._tails), 0)
        tail = next((n for n in lengths if text[-n:] in self._heads), 0)
        if head:
            yield 0, head
        if tail and head + tail <= len(text):
            yield len(text) - tail, len(text)


class StandIns:
    """One request's private-use alphabet: none of its characters occurs in the request.

    `end_mark` is one more such character, for marking a place; it stands for nothing.
    """

    def __init__(self, spellings: ControlSpellings, strings: Iterable[str]) -> None:
        self._spellings = spellings
        size = len(spellings.alphabet)
        start = _free_block(size + 1, strings)
        self.end_mark = chr(start + size)
        self._hide = dict(zip(map(ord, spellings.alphabet), _chars(start, size), strict=True))
        self._show = dict(zip(range(start, start + size), spellings.alphabet, strict=True))
        self._show[start + size] = ""
        self._hidden = re.compile(f"[{chr(start)}-{chr(start + size - 1)}]+" if size else r"(?!)")

    def hide(self, value: Json, tokens: re.Pattern[str]) -> Json:
        """Replaces the control spellings in every string of `value`."""
        return map_strings(value, lambda text: tokens.sub(self._hide_match, text))

    def hide_fragments(self, value: Json) -> Json:
        """Replaces what could be completed to a control spelling by its surroundings."""
        # Keys that are names stay: templates look values up by them.
        return map_strings(
            value,
            self._hide_ends,
            lambda key: key if key.isidentifier() else self._hide_ends(key),
        )

    def show(self, text: str) -> str:
        """The ordinary spelling of a text with stand-ins."""
        return text if text.isascii() else text.translate(self._show)

    def to_marked(self, text: str) -> MarkedText:
        """The ordinary spelling, and where the stand-ins were."""
        spans = tuple(match.span() for match in self._hidden.finditer(text))
        return MarkedText(self.show(text), spans)

    def num_control_tokens(self, text: str) -> int:
        """How many control tokens the text would encode to, outside of the stand-ins."""
        return sum(1 for _ in self._spellings.any_token.finditer(text))

    def _hide_match(self, match: re.Match[str]) -> str:
        return match.group().translate(self._hide)

    def _hide_ends(self, text: str) -> str:
        for start, stop in self._spellings.fragments(text):
            text = text[:start] + text[start:stop].translate(self._hide) + text[stop:]
        return text


def _chars(start: int, size: int) -> list[str]:
    return [chr(code) for code in range(start, start + size)]


def _free_block(size: int, strings: Iterable[str]) -> int:
    """The first code point of a block that no string uses."""
    used = {
        (ord(char) - _AREA.start) // size
        for text in strings
        if not text.isascii()
        for char in _IN_AREA.findall(text)
    }
    for block in range(len(_AREA) // size):
        if block not in used:
            return _AREA.start + block * size
    raise InvalidRequest("The messages use up Unicode's private-use area.", "messages")
