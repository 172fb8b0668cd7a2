"""Calls in Qwen3-Coder's markup: what is one, what its arguments are, what is forgiven."""

from __future__ import annotations

import json

import pytest

from ellm_serve.text.tool_calls import (
    ContentDelta,
    Qwen3CoderDialect,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolSchemas,
    collect,
)
from tests.text.tool_calls.parsing import PROPERTIES, TOOLS, calls, deltas_of, num_arguments, parse


def call(body: str, name: str = "act") -> str:
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def arguments(text: str) -> str:
    """The arguments of the only call in the text."""
    (only,) = parse(text, "qwen3_coder").tool_calls
    return only.arguments


def value_of(key: str, text: str) -> object:
    return json.loads(arguments(call(parameter(key, text))))[key]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("b", "True", True),
        ("b", "false", False),
        ("b", "yes", "yes"),
        ("n", "3", 3),
        ("n", "-12", -12),
        ("n", "3.0", 3),
        ("n", "3.5", "3.5"),
        ("n", "null", None),
        ("n", "1_000", "1_000"),
        ("n", "__import__('os')", "__import__('os')"),
        ("f", "3.0", 3.0),
        ("f", "3", 3),
        ("f", "1e3", 1000.0),
        ("f", "1e999", "1e999"),
        ("f", "NaN", "NaN"),
        ("s", "123", "123"),
        ("s", "null", "null"),
        ("s", "", ""),
        ("s", "\n", "\n"),
        ("s", "}", "}"),
        ("s", ' "quoted" \\ back', ' "quoted" \\ back'),
        ("a", "[1, 2]", [1, 2]),
        ("a", '{"k": 1}', '{"k": 1}'),
        ("a", "[1, 2", "[1, 2"),
        ("a", "[NaN]", "[NaN]"),
        ("a", "[" * 5000, "[" * 5000),
        ("o", '{"k": 1}', {"k": 1}),
        ("o", '{"a":"}"}', {"a": "}"}),
        ("o", "{'k': 1}", "{'k': 1}"),
        ("o", '{"s": "\\ud800"}', {"s": "\ufffd"}),
        ("u", "null", None),
        ("u", "nullable", "nullable"),
        ("u", "nul", "nul"),
        ("u", "", ""),
        ("v", "7", 7),
        ("v", "7 days", "7 days"),
        ("v", " 7", " 7"),
        ("v", "7" * 65, "7" * 65),
        ("w", '{"x":1}', {"x": 1}),
        ("w", "[x]", "[x]"),
        ("w", "7", "7"),
        ("e", "1", "1"),
        ("undeclared", "[1]", "[1]"),
    ],
)
def test_values_have_the_types_of_the_schema(key: str, text: str, value: object) -> None:
    parsed = value_of(key, text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_arguments_are_written_as_by_json_dumps() -> None:
    text = call(
        parameter("s", 'é "x"\n\tnew line\x01')
        + parameter("n", "3")
        + parameter("o", '{"a":[1,2]}')
    )
    expected = {"s": 'é "x"\n\tnew line\x01', "n": 3, "o": {"a": [1, 2]}}
    assert arguments(text) == json.dumps(expected, ensure_ascii=False)


@pytest.mark.parametrize("body", ["", "\n", "  \n\n"])
def test_no_parameters_are_an_empty_object(body: str) -> None:
    assert parse(call(body, "now"), "qwen3_coder").tool_calls[0].arguments == "{}"


def test_order_of_deltas() -> None:
    text = "Hi.\n" + call(parameter("s", "x") + parameter("n", "1")) + "\n" + call("", "now")
    assert deltas_of(text, "qwen3_coder") == [
        *(ContentDelta(char) for char in "Hi."),
        ToolCallStart(0, "call-0", "act"),
        ToolCallArguments(0, '{"s": "'),
        ToolCallArguments(0, "x"),
        ToolCallArguments(0, '", "n": '),
        ToolCallArguments(0, "1}"),
        ToolCallEnd(0, truncated=False),
        ToolCallStart(1, "call-1", "now"),
        ToolCallArguments(1, "{}"),
        ToolCallEnd(1, truncated=False),
    ]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("a\n{}\n{}", "a"),
        ("\n\na \n{}\nb\n{} c\n", "\n\na\nb c"),
        ("{}", None),
        (" \n{}\n", None),
        ("{}Done.", "Done."),
    ],
)
def test_content_around_calls(text: str, content: str | None) -> None:
    output = parse(text.replace("{}", call("", "now")), "qwen3_coder")
    assert output.content == content
    assert len(output.tool_calls) == text.count("{}")


def test_only_so_much_white_space_is_dropped() -> None:
    output = parse(" " * 1000 + call("", "now"), "qwen3_coder")
    assert output.content == " " * (1000 - 256)


@pytest.mark.parametrize(
    "text",
    [
        "Write `<tool_call>` and `</tool_call>` around it.",
        "Use `<function=act>` for that, then `<parameter=s>`.",
        "Inline: `<function=act></function>` is quoted.",
        "Inline: `<tool_call><function=act></function></tool_call>` is quoted.",
        "One ` in a line.\n`<tool_call><function=now></function></tool_call>` is quoted.",
        "<tool_call> without a function",
        '<tool_call>\n{"name": "act"}\n</tool_call>',
        "<tool_call>\n<function=act> says more",
        "<tool_call>\n<function=>\n</function>",
        "<function=other>\n</function>",
        "<function=act>, the function",
        "a < b, <function, <tool_call",
        "<tool_call><tool_call><tool_call>",
        "<tool_call>" + "\n" * 100 + "<function=act></function>"[:10],
        "<function=" + "x" * 1000 + ">",
        "<tool_call>\n<function=act",
        "<tool_call>\n<function=other>\n<par",
        "  spaces \n\n",
        "",
    ],
)
def test_text_that_only_looks_like_a_call_stays_text(text: str) -> None:
    for pieces in ([text], list(text)):
        output = collect(deltas_of(pieces, "qwen3_coder"))
        assert (output.content or "", output.tool_calls) == (text, ())


def test_a_mention_does_not_hide_the_call_behind_it() -> None:
    output = parse("`<tool_call>` <tool_call>\nso: " + call("", "now"), "qwen3_coder")
    assert output.content == "`<tool_call>` <tool_call>\nso:"
    assert calls(output) == [("now", "{}")]
    assert calls(parse("Run `ls`" + call("", "now"), "qwen3_coder")) == [("now", "{}")]


def test_without_tools_all_is_text() -> None:
    text = "```\n" + call(parameter("s", "x")) + "\n```\n"
    deltas = deltas_of([text], "qwen3_coder", tools=[])
    assert deltas == [ContentDelta(text)]


def test_undeclared_function_in_a_full_element_is_a_call() -> None:
    text = call(parameter("q", "[1]") + parameter("r", "2"), "other")
    assert calls(parse(text, "qwen3_coder")) == [("other", '{"q": "[1]", "r": "2"}')]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # no element around the function, or only its end
        ("<function=act>\n<parameter=n>\n1\n</parameter>\n</function>", {"n": 1}),
        ("<function=act>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>", {"n": 1}),
        # all in one line
        ("<tool_call><function=act><parameter=n>1</parameter></function></tool_call>", {"n": 1}),
        # no </parameter>: the next one, or the end of the call
        (call("<parameter=s>\nx\n<parameter=n>\n1\n</parameter>\n"), {"s": "x", "n": 1}),
        (call("<parameter=s>\nx\n"), {"s": "x"}),
        (call("<parameter=s>\n<parameter=n>\n1\n</parameter>\n"), {"s": "", "n": 1}),
        # no </function>
        ("<tool_call>\n<function=act>\n<parameter=n>\n1\n</parameter>\n</tool_call>", {"n": 1}),
        ("<tool_call>\n<function=act>\n</tool_call>", {}),
        # quotes, no >, twice
        ('<tool_call>\n<function="act">\n<parameter="n">1</parameter>\n</function>', {"n": 1}),
        (call("<parameter=s\nx\n</parameter>\n"), {"s": "x"}),
        (call(parameter("n", "1") + parameter("n", "2") + parameter("s", "y")), {"n": 1, "s": "y"}),
        (call(f"<parameter={'k' * 300}>\nx\n</parameter>\n"), {"k" * 256: "k" * 44 + ">\nx"}),
    ],
)
def test_forgiven_markup(text: str, expected: dict[str, object]) -> None:
    output = parse(text, "qwen3_coder")
    assert [json.loads(c.arguments) for c in output.tool_calls] == [expected]
    assert not output.tool_calls[0].truncated
    assert output.content is None


def test_missing_function_end_before_the_next_call() -> None:
    text = "<tool_call>\n<function=act>\n" + parameter("n", "1") + call("", "now")
    assert calls(parse(text, "qwen3_coder")) == [("act", '{"n": 1}'), ("now", "{}")]


def test_two_functions_in_one_element() -> None:
    text = "<tool_call>\n<function=x>\n</function>\n<function=y>\n</function>\n</tool_call>\nEnd"
    output = parse(text, "qwen3_coder")
    assert calls(output) == [("x", "{}"), ("y", "{}")]
    assert output.content == "\nEnd"


def test_an_element_is_over_when_text_comes() -> None:
    rest = "<function=y> says more <function=z>\n</function>\n</tool_call>"
    output = parse("<tool_call>\n<function=x>\n</function>" + rest, "qwen3_coder")
    assert calls(output) == [("x", "{}")]
    assert output.content == rest


@pytest.mark.parametrize(
    "value",
    [
        "close with </parameter>, then go on",
        "</para</parameter",
        "x <parameter=n> in a line",
        "\n<parameter=unknown>\nx",
        "\n<parameter=s>\nx",
        "</function>\n</function> x </tool_call>, <tool_call>",
        "if a < b:\n    <b>\n\n",
        "<function=act>\n",
        "tail <",
    ],
)
def test_values_may_mention_tags(value: str) -> None:
    assert value_of("s", value) == value
    assert calls(parse(call(parameter("s", value) + parameter("n", "1")), "qwen3_coder")) == [
        ("act", json.dumps({"s": value, "n": 1}))
    ]


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ("<tool_call>\n<function=act>", {}),
        ("<tool_call>\n<function=act>\n<param", {}),
        ("<tool_call>\n<function=act>\n<parameter=s", {}),
        ("<tool_call>\n<function=act>\n<parameter=s>", {"s": ""}),
        ("<tool_call>\n<function=act>\n<parameter=s>\nab", {"s": "ab"}),
        ("<tool_call>\n<function=act>\n<parameter=s>\nab\n</para", {"s": "ab"}),
        ("<tool_call>\n<function=act>\n<parameter=n>\n1", {"n": 1}),
        ('<tool_call>\n<function=act>\n<parameter=o>\n{"a": [', {"o": '{"a": ['}),
        ("<tool_call>\n<function=act>\n<parameter=u>\nnu", {"u": "nu"}),
        ("<tool_call>\n<function=act>\n<parameter=n>\n1\n</parameter>\n", {"n": 1}),
        ("<tool_call>\n<function=act>\n<parameter=n>\n1\n</parameter>\n</func", {"n": 1}),
    ],
)
def test_cut_calls_are_closed_and_marked(cut: str, expected: dict[str, object]) -> None:
    output = parse("Look:\n" + cut, "qwen3_coder")
    assert output.content == "Look:"
    assert [json.loads(c.arguments) for c in output.tool_calls] == [expected]
    assert output.tool_calls[0].truncated


def test_every_cut_gives_valid_json() -> None:
    text = "x" + call("".join(parameter(key, '{"a": [1, "2"]}') for key in PROPERTIES)) * 2
    for end in range(len(text)):
        for each in parse(text[:end], "qwen3_coder").tool_calls:
            assert isinstance(json.loads(each.arguments), dict)


def test_long_strings_are_handed_on_while_they_are_written() -> None:
    """Never more than a closing tag is held back, whatever the text looks like."""
    value = 'a\\b "c"\n é😀 </para </parameter x <parameter= <tool_call> </function>.\n\n' * 40
    dialect = Qwen3CoderDialect(ToolSchemas(TOOLS), lambda: "id")
    dialect.push("<tool_call>\n<function=act>\n<parameter=s>\n")
    written, known = 0, 0
    for char in value:
        written += len(json.dumps(char, ensure_ascii=False)) - 2
        known += num_arguments(dialect.push(char))
        assert written - known <= 2 * len("</parameter>")
    assert written > 2000


@pytest.mark.parametrize("key", ["u", "v", "w"])
def test_strings_of_several_types_stream_once_they_are_strings(key: str) -> None:
    dialect = Qwen3CoderDialect(ToolSchemas(TOOLS), lambda: "id")
    dialect.push(f"<tool_call>\n<function=act>\n<parameter={key}>\n")
    assert num_arguments(dialect.push("words")) == len('"words')


def test_typed_values_wait_until_they_are_complete() -> None:
    dialect = Qwen3CoderDialect(ToolSchemas(TOOLS), lambda: "id")
    dialect.push("<tool_call>\n<function=act>\n<parameter=n>\n")
    assert num_arguments(dialect.push("12")) == 0
    assert dialect.push("3\n</parameter>\n</function>") == [
        ToolCallArguments(0, "123}"),
        ToolCallEnd(0, truncated=False),
    ]
