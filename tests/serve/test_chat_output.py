"""The text of an answer taken apart: order of deltas, and where stop strings count."""

from __future__ import annotations

from typing import Any

import pytest

from ellm_serve.serve.chat_output import ChatOutput, OutputRules
from ellm_serve.text.output_parser import OutputParser
from ellm_serve.text.tool_calls import (
    ContentDelta,
    OutputDelta,
    ToolCallEnd,
    ToolCallStart,
    create_dialect,
)

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def output(**rules: Any) -> ChatOutput:
    parser = OutputParser(create_dialect("hermes", TOOLS, lambda: "id"))
    return ChatOutput(parser, OutputRules(**rules))


def say(shown: ChatOutput, text: str, size: int = 1) -> list[OutputDelta]:
    """All deltas of a text, a token for every `size` characters."""
    deltas = []
    for start in range(0, len(text), size):
        deltas += shown.push(text[start : start + size], (0,))
    return deltas + shown.finish()


def content(deltas: list[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_what_is_held_back_comes_before_a_call(size: int) -> None:
    """The start of a stop string is content that was said before the call; none reaches across."""
    deltas = say(output(stop=("bcd",)), f"ab{CALL}cd", size)
    start = next(i for i, delta in enumerate(deltas) if isinstance(delta, ToolCallStart))
    assert content(deltas[:start]) == "ab" and content(deltas[start:]) == "cd"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("include", "text"), [(False, "a "), (True, "a bc")])
def test_a_stop_string_ends_the_answer(size: int, include: bool, text: str) -> None:
    """Nothing behind it is shown, no call either."""
    shown = output(stop=("bc",), include_stop=include)
    deltas = say(shown, f"a bc {CALL}", size)
    assert content(deltas) == text and shown.matched == "bc"
    assert shown.is_complete and not shown.has_calls
    assert all(isinstance(delta, ContentDelta) for delta in deltas)


def test_stop_strings_wait_for_enough_tokens() -> None:
    shown = output(stop=("b",), min_tokens=3)
    assert content(say(shown, "abcabc")) == "abca" and shown.matched == "b"


def test_a_call_that_the_end_cuts_off_has_not_ended_the_answer() -> None:
    """Its reason is the limit and not a call."""
    whole, cut = output(single_call=True), output(single_call=True)
    assert say(whole, f"{CALL}\n{CALL}").count(ToolCallEnd(0, False)) == 1
    assert whole.is_complete and whole.has_calls
    assert say(cut, CALL[: CALL.index("x") + 1])[-1] == ToolCallEnd(0, True)
    assert not cut.is_complete and cut.has_calls


def test_calls_that_are_not_shown() -> None:
    """Are no calls; the text around them stays."""
    shown = output(hide_calls=True)
    assert say(shown, f"a{CALL}b", 5)[0] == ContentDelta("a")
    assert not shown.has_calls


def test_without_a_parser_all_is_content() -> None:
    shown = ChatOutput(None, OutputRules())
    assert content(say(shown, CALL)) == CALL and not shown.push("", (1,))
