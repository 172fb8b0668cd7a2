"""An answer is the same wherever its text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ellm_serve.text.tool_calls import DialectName, collect
from tests.text.tool_calls.parsing import MARKUP, all_cuts, cut_at, deltas_of, widths

CODER = """Let me `check`.

<tool_call>
<function=act>
<parameter=s>
if a < b: "é😀" \\ </para </parameter> x
<parameter=q>

</parameter>
<parameter=n>
3
</parameter>
<parameter=u>
nul
</parameter>
<parameter=v>
12
</parameter>
<parameter=o>
{"a": [1, 2]}
</parameter>
<parameter=w>
[1]
<parameter=b>
True
</function>
</tool_call>
 <tool_call>
<function=now>
</function>
</tool_call> `<tool_call><function=now></function>` <function=now>
</function>
so <tool_call>
<function=x>
<parameter=y>1"""

HERMES = r"""Let me `check`.

<tool_call>
{"name": "act", "arguments": {"s":"\u00e9\ud83d\ude00\ud83d \\ C:\Users </tool_call>", "a": [1.50,
tru]}}
</tool_call>
 <tool_call>{"arguments": "{\"a\": 1}", "name": "now"}}
</tool_call> `<tool_call>{"name": "x"}` <tool_call>{"x": 1} <tool_call>{"name": "y"}
</tool_call>

and <tool_call>
{"name": "act", "arguments": {"a": {"b": [null, 12"""

THOUGHTS = [
    "<think>\na `</think>` b <tool_call>\n{}\n</think>\n\n",
    "<think>\na</think>",
    " <think>",
    "<thin",
    "",
]
DIALECTS: list[tuple[DialectName, str]] = [("qwen3_coder", CODER), ("hermes", HERMES)]


@pytest.mark.parametrize(("dialect", "text"), DIALECTS)
def test_the_examples_show_what_they_are_for(dialect: DialectName, text: str) -> None:
    output = collect(deltas_of([text], dialect))
    assert len(output.tool_calls) == 4
    assert output.tool_calls[-1].truncated
    assert output.content is not None and output.content.count("`") == 4


@pytest.mark.parametrize("thought", THOUGHTS)
@pytest.mark.parametrize(("dialect", "text"), DIALECTS)
def test_every_cut(dialect: DialectName, text: str, thought: str) -> None:
    text = thought + text
    whole = collect(deltas_of([text], dialect, reasoning=True))
    for pieces in all_cuts(text):
        assert collect(deltas_of(pieces, dialect, reasoning=True)) == whole


@pytest.mark.parametrize("dialect", ["qwen3_coder", "hermes", None])
@given(
    text=MARKUP,
    widths=widths(),
    reasoning=st.booleans(),
    starts_in_reasoning=st.none() | st.booleans(),
)
@example("<think>`</think>", [1], True, None)
def test_any_text(
    dialect: DialectName | None,
    text: str,
    widths: list[int],
    reasoning: bool,
    starts_in_reasoning: bool | None,
) -> None:
    """Tags and their pieces in any order: no error, valid JSON, the same result for every cut."""
    whole, in_pieces, by_char = (
        collect(
            deltas_of(pieces, dialect, reasoning=reasoning, starts_in_reasoning=starts_in_reasoning)
        )
        for pieces in ([text], cut_at(text, widths), list(text))
    )
    assert in_pieces == whole
    assert by_char == whole
    for call in whole.tool_calls:
        json.loads(call.arguments)


@pytest.mark.parametrize("dialect", ["qwen3_coder", "hermes"])
@given(text=MARKUP)
def test_nothing_is_lost_without_calls(dialect: DialectName, text: str) -> None:
    """A text in which there is no call comes out as it went in."""
    output = collect(deltas_of([text], dialect))
    if not output.tool_calls:
        assert (output.content or "") == text
