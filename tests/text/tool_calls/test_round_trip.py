"""What the parsers emit comes back in the next request: our ingest takes it, templates render it.

And what a template renders as a call, the parser of its dialect reads as the same call.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ellm_serve.text import ChatEncoder
from ellm_serve.text.messages import normalize_messages
from ellm_serve.text.tool_calls import DialectName, Output, choose_dialect
from tests.text.conftest import TEMPLATES
from tests.text.tool_calls.parsing import JSON_VALUES, MARKUP, calls, parse

# What a model may write for a value of each type; text that contains no tags.
_PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=40)
_CONTAINER = st.lists(JSON_VALUES, max_size=3)
_VALUES: dict[str, st.SearchStrategy[object]] = {
    "b": st.booleans(),
    "n": st.integers(-(10**18), 10**18),
    "f": st.floats(allow_nan=False, allow_infinity=False),
    "s": _PLAIN,
    "a": _CONTAINER,
    "o": st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=3),
    "u": st.none() | _PLAIN.filter(lambda text: text not in ("null", "None")),
    "w": _PLAIN.filter(lambda text: text[:1] not in ("{", "[")) | _CONTAINER,
    "e": st.sampled_from(["1", "2"]),
}
_ARGUMENTS = st.fixed_dictionaries({}, optional=_VALUES)


def history(output: Output) -> list[dict[str, object]]:
    """The answer as a client sends it back."""
    tool_calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in output.tool_calls
    ]
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": output.content, "tool_calls": tool_calls},
    ]


def rendered(encoder: ChatEncoder, output: Output) -> str:
    """The last turn of a prompt with the answer in it, without its end."""
    prompt = encoder.encode_chat(history(output), add_generation_prompt=False).text
    return prompt.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")


@pytest.mark.parametrize("dialect", ["qwen3_coder", "hermes"])
@settings(max_examples=500)
@given(arguments=_ARGUMENTS)
def test_values(
    encoder: ChatEncoder,
    xml_encoder: ChatEncoder,
    dialect: DialectName,
    arguments: dict[str, object],
) -> None:
    """Value → template → parser → ingest → template → parser: always the same call.

    500 examples for each dialect, up to nine values in each.
    """
    side = xml_encoder if dialect == "qwen3_coder" else encoder
    given_call = {"function": {"name": "act", "arguments": json.dumps(arguments)}}
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [given_call]},
    ]
    prompt = side.encode_chat(messages, add_generation_prompt=False).text
    written = prompt.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")
    output = parse(written, dialect)
    expected = json.dumps(json.loads(json.dumps(arguments)), ensure_ascii=False)
    assert calls(output) == [("act", without_surrogates(expected))]
    assert rendered(side, output).endswith(rendered(side, parse(rendered(side, output), dialect)))


def without_surrogates(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@pytest.mark.parametrize("dialect", ["qwen3_coder", "hermes"])
@given(text=MARKUP)
def test_whatever_is_emitted_is_taken_back(
    encoder: ChatEncoder, xml_encoder: ChatEncoder, dialect: DialectName, text: str
) -> None:
    """Also what was recovered from broken markup; objects stay objects."""
    output = parse(text, dialect)
    normalized = normalize_messages(history(output))
    if all(c.arguments.startswith("{") for c in output.tool_calls):
        assert normalized.warnings == ()
    for side in (encoder, xml_encoder):
        assert "<|im_start|>assistant" in side.encode_chat(history(output)).text


@pytest.mark.parametrize(
    ("source", "dialect"),
    [
        ("<tool_call>\\n<function=' + call.name", "qwen3_coder"),
        ('<tool_call>{"name": ...}</tool_call>', "hermes"),
        ("{{ messages }}", None),
        ("", None),
    ],
)
def test_choice_by_template(source: str, dialect: DialectName | None) -> None:
    assert choose_dialect(source) == dialect


def test_choice_for_the_test_templates() -> None:
    for name, dialect in (("reasoning", "hermes"), ("xml_calls", "qwen3_coder"), ("strict", None)):
        source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        assert choose_dialect(source) == dialect
