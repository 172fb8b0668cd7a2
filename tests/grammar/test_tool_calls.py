"""Constrained tool calls: whatever the model says, our own parser reads calls of declared tools."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from ellm_serve.engine.engine import Engine
from ellm_serve.errors import InvalidRequest
from ellm_serve.grammar.compiler import GrammarCompiler
from ellm_serve.grammar.tools import tools_grammar
from ellm_serve.request import FinishReason
from ellm_serve.text.tool_calls import DialectName, Output, collect, create_dialect
from tests.grammar.forms import EOS, AnyModel, answers, bounds, tokenizer

DIALECTS: tuple[DialectName, ...] = ("hermes", "qwen3_coder")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "place": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "exact": {"type": ["boolean", "null"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "days", "place"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "number", "minimum": -90, "maximum": 90}},
            "required": ["lat"],
            "additionalProperties": False,
        }
    },
}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """On a model that says anything, but knows how an element ends."""
    with Engine(AnyModel(bounds(), "\n</parameter>"), eos_token_ids=[EOS]) as engine:
        yield engine


TOOLS = [tool("get_weather", WEATHER), tool("noargs", {"type": "object", "properties": {}})]


def parse(dialect: DialectName, tools: list[dict[str, Any]], answer: str) -> Output:
    ids = map("call{}".format, itertools.count())
    parser = create_dialect(dialect, tools, lambda: next(ids))
    return collect([*parser.push(answer), *parser.finish()])


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_every_call_is_one_of_a_declared_tool(
    compiler: GrammarCompiler, engine: Engine, dialect: DialectName, temperature: float
) -> None:
    """With all that it requires, typed as declared; nothing but calls."""
    compiled = compiler.compile(tools_grammar(TOOLS, dialect, tokenizer()))
    results = answers(engine, compiled, 24, max_tokens=400, temperature=temperature)
    complete = [answer for answer, finish in results if finish is FinishReason.STOP]
    assert len(complete) >= 6
    names = set()
    for answer in complete:
        output = parse(dialect, TOOLS, answer)
        assert not output.content and output.tool_calls
        for call in output.tool_calls:
            names.add(call.name)
            arguments = json.loads(call.arguments)
            jsonschema.validate(arguments, WEATHER if call.name == "get_weather" else {})
            if call.name == "noargs":
                assert arguments == {}
    assert names == {"get_weather", "noargs"}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_named_tool_is_called_once(
    compiler: GrammarCompiler, engine: Engine, dialect: DialectName
) -> None:
    """One tool and no parallel calls: that is what a named choice asks for."""
    grammar = tools_grammar(TOOLS[:1], dialect, tokenizer(), parallel=False)
    results = answers(engine, compiler.compile(grammar), 8, max_tokens=400)
    complete = [answer for answer, finish in results if finish is FinishReason.STOP]
    assert complete
    for answer in complete:
        assert [call.name for call in parse(dialect, TOOLS, answer).tool_calls] == ["get_weather"]


def test_several_calls_are_possible(compiler: GrammarCompiler, engine: Engine) -> None:
    """Unless they are forbidden."""
    grammar = tools_grammar(TOOLS[1:], "hermes", tokenizer())
    results = answers(engine, compiler.compile(grammar), 16, max_tokens=400)
    counts = {len(parse("hermes", TOOLS, answer).tool_calls) for answer, _ in results}
    assert max(counts) > 1


def follows(
    compiler: GrammarCompiler, dialect: DialectName, tool: dict[str, Any], text: str
) -> bool:
    """Whether the text is a complete answer by the grammar."""
    compiled = compiler.compile(tools_grammar([tool], dialect, tokenizer(), parallel=False))
    matcher = compiled._matcher.deep_copy()
    ids = tokenizer().encode(text, allow_special=True)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def coder(body: str) -> str:
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "text", "<b>\n\n</b> </function>", "3"], ["a</parameter>\nb"]),
        ({"type": "string", "enum": ["x", "y z"]}, ["x", "y z"], ["z", ""]),
        ({"const": "only"}, ["only"], ["other"]),
        ({"type": "integer"}, ["3", "-12"], ["3.5", '"3"', "three"]),
        ({"type": "boolean"}, ["true", "false"], ["yes"]),
        ({"type": ["integer", "null"]}, ["1", "null"], ["x"]),
        ({"type": "object"}, ["{}", '{"a": [1, "x"]}'], ["[]", "{"]),
        ({"type": "array", "items": {"type": "string"}}, ['["a", "b"]'], ["[1]"]),
        ({}, ["anything"], []),
        ({"$ref": "#/$defs/small"}, ["1"], ["9", "x"]),
        ({"type": "integer", "unknown": True, "uniqueItems": True}, ["3"], ["x"]),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_values_of_the_xml_dialect(
    compiler: GrammarCompiler, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    """As a model writes them: bare words for strings, JSON for the rest."""
    parameters = {
        "type": "object",
        "properties": {"p": schema},
        "required": ["p"],
        "$defs": {"small": {"type": "integer", "maximum": 5}},
    }
    for value in good:
        text = coder(f"<parameter=p>\n{value}\n</parameter>\n")
        assert follows(compiler, "qwen3_coder", tool("f", parameters), text), value
        (call,) = parse("qwen3_coder", [tool("f", parameters)], text).tool_calls
        jsonschema.validate(json.loads(call.arguments), parameters)
    for value in bad:
        text = coder(f"<parameter=p>\n{value}\n</parameter>\n")
        assert not follows(compiler, "qwen3_coder", tool("f", parameters), text), value


def test_parameters_come_in_their_order(compiler: GrammarCompiler) -> None:
    """Required ones must come, others may, unknown ones may not."""
    parameters = {
        "properties": {"a": {"type": "integer"}, "b": {}, "c": {"type": "integer"}},
        "required": ["c"],
    }

    def call(**values: str) -> bool:
        body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
        return follows(compiler, "qwen3_coder", tool("f", parameters), coder(body))

    assert call(c="1") and call(a="1", c="2") and call(a="1", b="x", c="2")
    assert not call() and not call(a="1") and not call(c="1", a="1") and not call(c="1", d="1")


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_tool_without_parameters(
    compiler: GrammarCompiler, dialect: DialectName, parameters: object
) -> None:
    """Its arguments are an empty object."""
    text = {"hermes": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'}
    assert follows(compiler, dialect, tool("f", parameters), text.get(dialect, coder("")))
    other = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert not follows(compiler, dialect, tool("f", parameters), other)


def test_what_cannot_be_written_is_refused(compiler: GrammarCompiler) -> None:
    """Names with tags in them, schemas that are none."""
    with pytest.raises(InvalidRequest, match="cannot write the name"):
        tools_grammar([tool("a>b")], "qwen3_coder", tokenizer())
    with pytest.raises(InvalidRequest, match="cannot write the parameter"):
        bad = {"properties": {"a\nb": {}}, "required": ["a\nb"]}
        tools_grammar([tool("f", bad)], "qwen3_coder", tokenizer())
    typo = {"properties": {"a": {"type": "foo"}}}
    with pytest.raises(InvalidRequest) as refusal:
        compiler.compile(tools_grammar([tool("name_it", typo)], "hermes", tokenizer()))
    assert "Invalid type: foo" in refusal.value.message
    assert "name_it" in refusal.value.message
    assert refusal.value.param == "tools"


def test_a_hundred_tools(compiler: GrammarCompiler, engine: Engine) -> None:
    """As agents send them."""
    tools = [tool(f"tool_{i}", WEATHER) for i in range(100)]
    for dialect in DIALECTS:
        compiled = compiler.compile(tools_grammar(tools, dialect, tokenizer()))
        results = answers(engine, compiled, 4, max_tokens=400)
        assert all(parse(dialect, tools, answer).tool_calls for answer, _ in results)
