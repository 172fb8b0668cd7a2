"""Random JSON schemas and a model that says anything: every complete answer validates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ellm_serve.engine.engine import Engine
from ellm_serve.errors import InvalidRequest
from ellm_serve.grammar.compiler import GrammarCompiler
from ellm_serve.grammar.schema import json_schema
from ellm_serve.request import FinishReason, Grammar, GrammarKind
from tests.grammar.forms import answers, tokenizer

Schema = dict[str, Any]

_KEYS = st.sampled_from(["a", "b", "name", "é", 'q"uote', "with space", "x-y", "ключ", ""])
_SCALARS = st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=6)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_KEYS, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def _integers(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": "integer"}
    low = draw(st.none() | st.integers(-(10**12), 10**12))
    if low is not None:
        schema[draw(st.sampled_from(["minimum", "exclusiveMinimum"]))] = low
        if draw(st.booleans()):
            schema["maximum"] = low + draw(st.integers(1, 10**6))
    elif draw(st.booleans()):
        schema["multipleOf"] = draw(st.integers(1, 50))
    return schema


@st.composite
def _numbers(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": "number"}
    if draw(st.booleans()):
        low = draw(st.integers(-1000, 1000)) / 4
        # In a range narrower than 1 the library lets an exclusive bound in, if it is whole.
        schema |= {"minimum": low, "exclusiveMaximum": low + draw(st.integers(2, 100)) / 2}
    return schema


@st.composite
def _strings(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": "string"}
    match draw(st.integers(0, 3)):
        case 0:
            schema["pattern"] = draw(
                st.sampled_from(["^[a-z]{2,5}$", "ab+", r"^\d{4}-\d{2}$", "^(x|y\\.)*$", "é"])
            )
        case 1:
            schema["minLength"] = draw(st.integers(0, 4))
            schema["maxLength"] = schema["minLength"] + draw(st.integers(0, 8))
        case 2:
            schema["format"] = draw(st.sampled_from(["date", "uuid", "ipv4", "date-time"]))
    return schema


def _arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    sizes = st.sampled_from([{}, {"minItems": 2}, {"maxItems": 3}, {"minItems": 1, "maxItems": 2}])
    plain = st.builds(lambda items, size: {"type": "array", "items": items, **size}, inner, sizes)
    tuples = st.builds(
        lambda first, rest: {"type": "array", "prefixItems": first, "items": rest, "minItems": 1},
        st.lists(inner, min_size=1, max_size=2),
        inner,
    )
    return plain | tuples


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(_KEYS, inner, max_size=4))
    required = [key for key in properties if draw(st.booleans())]
    rest = draw(st.sampled_from([False, False, None]) | inner)
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    return schema if rest is None else {**schema, "additionalProperties": rest}


_LEAVES = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.just({"type": ["string", "null"], "maxLength": 5}),
    st.just({"$ref": "#/$defs/tree"}),
    st.builds(lambda value: {"const": value}, _VALUES),
    st.builds(lambda values: {"enum": values}, st.lists(_VALUES, min_size=1, max_size=4)),
    _integers(),
    _numbers(),
    _strings(),
)
_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        _arrays(inner),
        _objects(inner),
        st.builds(lambda any_of: {"anyOf": any_of}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=8,
)
_TREE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
    },
    "required": ["value"],
    "additionalProperties": False,
}


def check(schema: Mapping[str, Any], answer: str) -> None:
    """A formatted value by the schema; formats count as well."""
    value = json.loads(answer)
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    validator.validate(value)


@settings(max_examples=150)
@given(schema=_SCHEMAS, seed=st.integers(0, 1000))
def test_complete_answers_validate(
    compiler: GrammarCompiler, engine: Engine, schema: Schema, seed: int
) -> None:
    """None is refused, either: all that is drawn here is supported."""
    whole = {**schema, "$defs": {"tree": _TREE}}
    compiled = compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(whole)))
    for answer, finish in answers(engine, compiled, 3, max_tokens=150):
        assert finish in (FinishReason.STOP, FinishReason.LENGTH)
        if finish is FinishReason.STOP:
            check(whole, answer)


def test_most_answers_are_complete(compiler: GrammarCompiler, engine: Engine) -> None:
    """So the property above is about something."""
    compiled = compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(_PERSON)))
    results = answers(engine, compiled, 40, max_tokens=300)
    complete = [answer for answer, finish in results if finish is FinishReason.STOP]
    assert len(complete) >= 20
    for answer in complete:
        check(_PERSON, answer)
    assert len(set(complete)) == len(complete)


_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "size": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 300}, {"type": "null"}]},
    },
    "required": ["name", "born", "size"],
    "additionalProperties": False,
}


def test_white_space(compiler: GrammarCompiler, engine: Engine) -> None:
    """As the client asks for it: none, its own, and by default no endless blank lines."""
    compact = compiler.compile(json_schema(_PERSON, field="f", whitespace=""))
    results = answers(engine, compact, 8, max_tokens=300)
    complete = [answer for answer, finish in results if finish is FinishReason.STOP]
    assert complete
    for answer in complete:
        strings = re.compile(r'"([^"\\\\]|\\\\.)*"')
        assert not re.search(r"\s", strings.sub("", answer))
    assert follows(compiler, json_schema({"type": "object"}, field="f"), '{\n  "a": 1\n}')
    assert not follows(compiler, json_schema({"type": "object"}, field="f"), '{\n\n"a": 1}')
    own = json_schema({"type": "object"}, field="f", whitespace="_")
    assert follows(compiler, own, '{_"a":_1}') and not follows(compiler, own, '{ "a": 1}')
    with pytest.raises(InvalidRequest, match="unclosed"):
        compiler.compile(json_schema({}, field="f", whitespace="["))


def test_closed_objects(compiler: GrammarCompiler) -> None:
    """Only where properties are listed and nothing is said about others."""
    schema = {
        "properties": {
            "a": {"properties": {}},
            "b": {"properties": {}, "additionalProperties": {}},
        },
        "type": "object",
    }
    closed = json_schema(schema, field="f", closed=True)
    assert json_schema(json.dumps(schema), field="f", closed=True) == closed
    assert not follows(compiler, closed, '{"c": 1}')
    assert not follows(compiler, closed, '{"a": {"x": 1}}')
    assert follows(compiler, closed, '{"b": {"x": 1}}')
    assert follows(compiler, json_schema(schema, field="f"), '{"c": 1}')


@pytest.mark.parametrize("closed", [False, True])
def test_no_json_at_all(closed: bool) -> None:
    """Requests can hold what JSON cannot, and more levels than Python follows."""
    deep: Any = {}
    for _ in range(10_000):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match="more than 64 levels"):
        json_schema(deep, field="f", closed=closed)
    with pytest.raises(InvalidRequest, match="not valid JSON") as refusal:
        json_schema({"const": {1, 2}}, field="f", closed=closed)
    assert refusal.value.param == "f"


def follows(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether the text is a complete answer."""
    matcher = compiler.compile(grammar)._matcher.deep_copy()
    ids = tokenizer().encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
