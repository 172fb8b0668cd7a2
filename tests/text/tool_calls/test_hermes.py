"""Calls as JSON in Hermes' markup: what is one, what its arguments are, what is forgiven."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_serve.text.plain import MAX_DEPTH
from ellm_serve.text.tool_calls import (
    ContentDelta,
    HermesDialect,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from tests.text.tool_calls.parsing import JSON_VALUES, calls, deltas_of, num_arguments, parse


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def with_arguments(text: str) -> str:
    return call('{"name": "act", "arguments": ' + text + "}")


def arguments(text: str) -> str:
    (only,) = parse(text, "hermes").tool_calls
    return only.arguments


def test_order_of_deltas() -> None:
    text = "Hi.\n" + with_arguments('{"s":"x"}') + "\n" + call('{"name": "now"}') + "\n"
    deltas = deltas_of([text], "hermes")
    assert deltas == [
        ContentDelta("Hi."),
        ToolCallStart(0, "call-0", "act"),
        ToolCallArguments(0, '{"s": "x"}'),
        ToolCallEnd(0, truncated=False),
        ToolCallStart(1, "call-1", "now"),
        ToolCallArguments(1, "{}"),
        ToolCallEnd(1, truncated=False),
    ]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"s":"x","n":1}', '{"s": "x", "n": 1}'),
        ('{ "a" : [ 1 , [ ] , { } ] }', '{"a": [1, [], {}]}'),
        ('{"s": "\\u00e9\\ud83d\\ude00\\/"}', '{"s": "é😀/"}'),
        ('{"s": "\\ud83d", "t": "\\ude00\\ud83d\\u0041"}', '{"s": "\ufffd", "t": "\ufffd\ufffdA"}'),
        ('{"f": 1.50, "g": 1E2}', '{"f": 1.5, "g": 100.0}'),
        ('{"h": -0.0, "i": 1e999}', '{"h": -0.0, "i": 1e999}'),
        ('{"s": "}</tool_call>{"}', '{"s": "}</tool_call>{"}'),
        # forgiven
        ('{"s": "a\nb", "p": "C:\\Users\\x"}', '{"s": "a\\nb", "p": "C:\\\\Users\\\\x"}'),
        ('{"s": "\\u12 \\ud8zz"}', '{"s": "\\\\u12 \\\\ud8zz"}'),
        ('{"a": [1, 2,], "b": True, "c": None,}', '{"a": [1, 2], "b": true, "c": null}'),
        # not an object
        ('"{\\"a\\":1}"', '{"a": 1}'),
        ('""', "{}"),
        ("null", "{}"),
        ('"text"', '"text"'),
        ("[1,2]", "[1, 2]"),
        ("1" * 5000, "1" * 5000),
    ],
)  # fmt: skip
def test_arguments_are_written_as_by_json_dumps(written: str, expected: str) -> None:
    assert arguments(with_arguments(written)) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"arguments": {"a": 1}, "name": "act"}', '{"a": 1}'),
        ('{"name": "act", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"id": [1, {"name": "x"}], "name": "act", "arguments": {"a": 1}}', '{"a": 1}'),
        ('{"name": "act", "name": "b", "arguments": {"a": 1}, "arguments": {}}', '{"a": 1}'),
        ('{"name": "act"}', "{}"),
        # braces: one missing, one too many
        ('{"name": "act", "arguments": {"a": 1}', '{"a": 1}'),
        ('{"name": "act", "arguments": {"a": 1}}}', '{"a": 1}'),
    ],
)
def test_members(body: str, expected: str) -> None:
    output = parse(call(body) + "\nDone.", "hermes")
    assert calls(output) == [("act", expected)]
    assert not output.tool_calls[0].truncated
    assert output.content == "\nDone."


@pytest.mark.parametrize(
    "text",
    [
        "Write `<tool_call>` and `</tool_call>` around it.",
        'Like `<tool_call>{"name": "act", "arguments": {}}</tool_call>`.',
        'For example <tool_call>{"name": <function-name>, "arguments": <args>}</tool_call>',
        "<tool_call>[1]</tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": ""}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>\n{"na',
        '<tool_call>\n{"name": "act',
        '<tool_call>{"x": "' + "y" * 20000 + '", "name": "act"}',
        '{"name": "act", "arguments": {}}',
        "a < b <tool <tool_call",
    ],
)
def test_text_that_only_looks_like_a_call_stays_text(text: str) -> None:
    output = parse(text, "hermes")
    assert (output.content, output.tool_calls) == (text, ())


def test_a_broken_call_does_not_hide_the_next_one() -> None:
    text = '<tool_call>{"x": ' + with_arguments("{}")
    output = parse(text, "hermes")
    assert output.content == '<tool_call>{"x":'
    assert calls(output) == [("act", "{}")]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"s": "he said "hi" to"}', '{"s": "he said "}'),
        ('{"a": }', '{"a": null}'),
        ('{"a": tru}', '{"a": null}'),
        ('{"a": [1, tru]}', '{"a": [1, null]}'),
        ('{"a": [1}', '{"a": [1]}'),
        ('{"a" 1}', "{}"),
        ("{'a': 1}", "{}"),
        ('{"a": 01}', '{"a": null}'),
        ('{"a": [1, NaN]}', '{"a": [1, null]}'),
    ],
)
def test_broken_arguments_are_closed_and_the_rest_is_dropped(written: str, expected: str) -> None:
    text = with_arguments(written) + " between " + with_arguments('{"a": 2}')
    output = parse(text, "hermes")
    assert calls(output) == [("act", expected), ("act", '{"a": 2}')]
    assert [c.truncated for c in output.tool_calls] == [True, False]
    assert output.content == " between"


def test_broken_without_an_end() -> None:
    text = '<tool_call>{"name": "act", "arguments": {"a": x <tool_call>{"name": "b"}'
    assert calls(parse(text, "hermes")) == [("act", '{"a": null}'), ("b", "{}")]
    assert parse('<tool_call>{"name": "a", "arguments": {!', "hermes").content is None


@pytest.mark.parametrize(
    ("cut", "expected", "truncated"),
    [
        ('{"name": "act"', "{}", True),
        ('{"name": "act", "argum', "{}", True),
        ('{"name": "act", "arguments": ', "{}", True),
        ('{"name": "act", "arguments": {"a', "{}", True),
        ('{"name": "act", "arguments": {"a": "x\\', '{"a": "x"}', True),
        ('{"name": "act", "arguments": {"a": "x\\ud83d', '{"a": "x"}', True),
        ('{"name": "act", "arguments": {"a": [{"b": "x", ', '{"a": [{"b": "x"}]}', True),
        ('{"name": "act", "arguments": {"a": [1, tr', '{"a": [1, null]}', True),
        ('{"name": "act", "arguments": {"a": [1, 23', '{"a": [1, 23]}', True),
        ('{"name": "act", "arguments": "{\\"a\\": 1', '"{\\"a\\": 1"', True),
        ('{"name": "act", "arguments": {"a": 1}', '{"a": 1}', False),
        ('{"name": "act", "arguments": {"a": 1}}', '{"a": 1}', False),
        ('{"name": "act", "arguments": {"a": 1}}\n</tool_', '{"a": 1}', False),
    ],
)
def test_cut_calls_are_closed_and_marked(cut: str, expected: str, truncated: bool) -> None:
    output = parse("Look:\n<tool_call>\n" + cut, "hermes")
    assert calls(output) == [("act", expected)]
    assert output.tool_calls[0].truncated is truncated


def test_every_cut_gives_valid_json() -> None:
    text = "x" + with_arguments('{"a": [1.5, true, {"b": "c\\n\\u00e9"}, null], "d": {"e": "f"}}')
    for end in range(len(text)):
        for each in parse(text[:end], "hermes").tool_calls:
            json.loads(each.arguments)


def test_depth_is_limited() -> None:
    """What is nested too deep for our own ingest is an error in the JSON."""
    fits = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert arguments(with_arguments('{"a": ' + fits + "}")) == '{"a": ' + fits + "}"
    output = parse(with_arguments('{"a": [' + fits + "]}"), "hermes")
    assert output.tool_calls[0].truncated
    json.loads(output.tool_calls[0].arguments)


def test_long_strings_are_handed_on_while_they_are_written() -> None:
    """All but an escape that is not complete is known at once."""
    dialect = HermesDialect(lambda: "id")
    dialect.push('<tool_call>\n{"name": "act", "arguments": {"s": "')
    value = 'a\\b "c"\n é😀 </tool_call> }\n' * 40
    written, known = 0, 0
    for char in value:
        escaped = json.dumps(char, ensure_ascii=False)[1:-1]
        written += len(escaped)
        for each in escaped:
            known += num_arguments(dialect.push(each))
        assert written == known


def test_what_may_still_be_a_call_is_not_held_for_ever() -> None:
    dialect = HermesDialect(lambda: "id")
    text = '<tool_call>{"x": "' + "y" * 30000
    assert collect(dialect.push(text)).content == text


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4), st.booleans(), st.booleans())
def test_same_as_json_dumps(value: dict[str, object], ascii_only: bool, compact: bool) -> None:
    """Whatever the model's spacing and escapes, arguments are `json.dumps` of what they say."""
    separators = (",", ":") if compact else (" , ", " : ")
    written = json.dumps(value, ensure_ascii=ascii_only, separators=separators)
    assert arguments(with_arguments(written)) == json.dumps(value, ensure_ascii=False)
