"""Stop strings: the same cut however the text arrives, and nothing held back for nothing."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_serve.errors import InvalidRequest
from ellm_serve.text import StopStrings

letters = st.text(alphabet="ab<", max_size=24)
stops = st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), max_size=4)


def _search(text: str, strings: list[str], include: bool) -> tuple[str, str | None]:
    """The whole text at once: the first end of any stop string, the longest one there."""
    for end in range(len(text) + 1):
        for string in sorted(strings, key=len, reverse=True):
            if text[:end].endswith(string):
                return text[: end if include else end - len(string)], string
    return text, None


def _split(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@given(letters, stops, st.lists(st.integers(0, 100), max_size=6), st.booleans())
def test_any_split_is_a_search(
    text: str, strings: list[str], cuts: list[int], include: bool
) -> None:
    """A stop string that lies across two tokens must be found all the same."""
    filter = StopStrings(strings, include_in_output=include)
    shown = "".join(filter.push(piece) for piece in _split(text, cuts)) + filter.flush()
    assert (shown, filter.matched) == _search(text, strings, include)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_strings_that_repeat_themselves(length: int) -> None:
    """After "aa" of "aab" a third "a" is no way back to the start."""
    for string in map("".join, product("ab", repeat=length)):
        for text in map("".join, product("ab", repeat=8)):
            filter = StopStrings([string])
            shown = "".join(map(filter.push, text)) + filter.flush()
            assert (shown, filter.matched) == _search(text, [string], include=False)


@given(letters, stops, st.integers(0, 24))
def test_a_filter_that_is_armed_later_finds_what_ends_later(
    text: str, strings: list[str], first: int
) -> None:
    """Strings that end among the first characters are ordinary text, even if they start others."""
    filter = StopStrings(strings)
    shown = filter.push(text[:first], armed=False) + filter.push(text[first:]) + filter.flush()
    expected: tuple[str, str | None] = (text, None)
    for end in range(len(text), first, -1):
        for string in sorted(strings, key=len):
            if text[:end].endswith(string):
                expected = (text[: end - len(string)], string)
    # A string that started before may reach back behind what was shown already.
    assert filter.matched == expected[1]
    assert shown == expected[0]


@given(letters, stops)
def test_holds_only_a_possible_start(text: str, strings: list[str]) -> None:
    """Text that cannot be part of a stop string any more must not wait for more text."""
    filter = StopStrings(strings)
    seen = shown = ""
    for char in text:
        seen += char
        shown += filter.push(char)
        if filter.matched:
            return
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert not held or any(s.startswith(held) and s != held for s in strings)


def test_held_text_is_flushed_at_the_end() -> None:
    """Held text was lost when generation ended by itself."""
    filter = StopStrings(["b,c"])
    pieces = [filter.push(piece) for piece in ["<think>a</think>", "x", "b"]]
    assert pieces == ["<think>a</think>", "x", ""]
    assert filter.flush() == "b"
    assert filter.flush() == ""
    assert filter.matched is None


def test_marker_after_a_possible_start_comes_out_whole() -> None:
    """A parser behind the filter needs `</think>` in one piece, not the hold-back's cut of it."""
    filter = StopStrings(["###", "</thunk>"])
    assert filter.push("a#") == "a"
    assert filter.push("</th") == "#"
    assert filter.push("ink>") == "</think>"


def test_nothing_comes_after_the_match() -> None:
    filter = StopStrings(["end"], include_in_output=True)
    assert filter.push("the end of it") == "the end"
    assert filter.push("more") == ""
    assert filter.flush() == ""
    assert filter.matched == "end"


@pytest.mark.parametrize(
    "strings", [[""], ["a", ""], ["x"] * 17, ["é" * 513]], ids=["empty", "one", "many", "long"]
)
def test_limits(strings: list[str]) -> None:
    """A hundred thousand stop strings would be searched for with every token."""
    with pytest.raises(InvalidRequest) as caught:
        StopStrings(strings)
    assert caught.value.param == "stop"


def test_largest_allowed() -> None:
    filter = StopStrings([chr(ord("a") + i) + "x" * 1023 for i in range(16)])
    assert filter.push("c" + "x" * 1022) == ""
    assert filter.push("y") == "c" + "x" * 1022 + "y"
