"""Thoughts and tool calls in one answer."""

from __future__ import annotations

import pytest

from ellm_serve.text.output_parser import OutputParser
from ellm_serve.text.tool_calls import (
    ContentDelta,
    DialectName,
    NoTools,
    Output,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from tests.text.tool_calls.parsing import all_cuts, deltas_of

CODER_CALL = (
    "<tool_call>\n<function=act>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"
)
HERMES_CALL = '<tool_call>\n{"name": "act", "arguments": {"n": 1}}\n</tool_call>'
CALLS: list[tuple[DialectName, str]] = [("qwen3_coder", CODER_CALL), ("hermes", HERMES_CALL)]
ACT = ToolCall("call-0", "act", '{"n": 1}')


def parse(text: str, dialect: DialectName | None, starts: bool | None = True) -> Output:
    """The answer, the same for every cut."""
    results = {
        collect(deltas_of(pieces, dialect, reasoning=True, starts_in_reasoning=starts))
        for pieces in all_cuts(text)
    }
    (only,) = results
    return only


@pytest.mark.parametrize(("dialect", "call"), CALLS)
def test_thought_then_call(dialect: DialectName, call: str) -> None:
    assert parse(f"<think>a</think>\n\n{call}", dialect) == Output(None, "a", (ACT,))
    assert parse(f"<think>a</think>\n\nb\n{call}\n", dialect) == Output("\n\nb", "a", (ACT,))
    assert parse(call, dialect, starts=False) == Output(None, None, (ACT,))
    assert parse(call, dialect, starts=None) == Output(None, None, (ACT,))


@pytest.mark.parametrize(("dialect", "call"), CALLS)
def test_a_call_inside_of_a_thought_is_not_made(dialect: DialectName, call: str) -> None:
    text = f"<think>Maybe {call}? No.</think>\nHi."
    assert parse(text, dialect) == Output("\nHi.", f"Maybe {call}? No.", ())


@pytest.mark.parametrize(("dialect", "call"), CALLS)
def test_unless_the_thought_never_ends(dialect: DialectName, call: str) -> None:
    assert parse(f"<think>Go.\n{call}", dialect) == Output(None, "Go.\n", (ACT,))
    # A broken one before it still is part of the thought, and so is a call that is not complete.
    broken = '<tool_call>{"x"} ' if dialect == "hermes" else "<tool_call><function=q>x "
    assert parse(f"<think>Go.{broken}{call}", dialect).tool_calls == (ACT,)
    assert parse(f"<think>Go.{broken}{call}", dialect).reasoning == f"Go.{broken}".rstrip()
    cut = call[: call.index("1") + 1]
    assert parse(f"<think>Go.\n{cut}", dialect) == Output(None, f"Go.\n{cut}", ())


def test_without_tools_calls_are_text() -> None:
    text = f"<think>a {HERMES_CALL}</think>{CODER_CALL}\n"
    assert parse(text, None) == Output(f"{CODER_CALL}\n", f"a {HERMES_CALL}", ())


def test_deltas_are_joined_and_never_empty() -> None:
    parser = OutputParser(NoTools(), reasoning=True, starts_in_reasoning=True)
    assert parser.in_reasoning
    assert parser.push("") == []
    assert parser.push("a<b</think>") == [ReasoningDelta("a<b")]
    assert not parser.in_reasoning
    assert parser.push("c") == [ContentDelta("c")]
    assert parser.finish() == []


def test_one_piece_may_hold_everything() -> None:
    text = f"a</think>b {CODER_CALL} c {CODER_CALL}"
    assert deltas_of([text], "qwen3_coder", reasoning=True, starts_in_reasoning=True) == [
        ReasoningDelta("a"),
        ContentDelta("b"),
        ToolCallStart(0, "call-0", "act"),
        ToolCallArguments(0, '{"n": 1}'),
        ToolCallEnd(0, truncated=False),
        ContentDelta(" c"),
        ToolCallStart(1, "call-1", "act"),
        ToolCallArguments(1, '{"n": 1}'),
        ToolCallEnd(1, truncated=False),
    ]


def test_without_a_reasoning_stage_thoughts_are_content() -> None:
    text = "<think>a</think>b"
    assert collect(deltas_of([text], None)) == Output(text, None, ())
    assert not OutputParser(NoTools()).in_reasoning


def test_state_starts_fresh_for_every_answer() -> None:
    first = collect(deltas_of([CODER_CALL[:40]], "qwen3_coder"))
    assert first.tool_calls[0].truncated
    assert collect(deltas_of(["</parameter> x"], "qwen3_coder")).content == "</parameter> x"


def test_long_texts_at_once() -> None:
    """A text of many portions, with a tag across the border of two of them."""
    text = "x" * 4090 + CODER_CALL + "y" * 9000 + CODER_CALL
    output = collect(deltas_of([text], "qwen3_coder"))
    assert output.content == "x" * 4090 + "y" * 9000
    assert len(output.tool_calls) == 2
