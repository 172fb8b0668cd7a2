"""Which types a parameter may have, by its JSON schema."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_serve.text.tool_calls.schema import (
    ToolSchemas,
    convert,
    may_become_typed,
    schema_types,
)

UNTYPED = {"object", "array", "string"}
ROOT: dict[str, object] = {
    "$defs": {
        "Color": {"enum": ["red", "green"]},
        "Size": {"type": "integer"},
        "Either": {"oneOf": [{"$ref": "#/$defs/Color"}, {"$ref": "#/$defs/Size"}]},
        "a/b": {"type": "boolean"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}}},
        "List": [{"type": "null"}, {"type": "array"}],
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "str"}, {"string"}),
        ({"type": "any"}, UNTYPED),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"nullable": True}, UNTYPED | {"null"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"oneOf": [{"type": "number"}, {"anyOf": [{"type": "array"}]}]}, {"number", "array"}),
        ({"allOf": [{"$ref": "#/$defs/Size"}], "default": 3}, {"integer"}),
        ({"enum": ["1", "2"]}, {"string"}),
        ({"enum": [1, 2.5, None, True, [], {}]},
         {"integer", "number", "null", "boolean", "array", "object"}),
        ({"type": "integer", "enum": ["1"]}, {"integer"}),
        ({"const": "x"}, {"string"}),
        ({"properties": {"a": {}}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"$ref": "#/$defs/Either"}, {"string", "integer"}),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
        ({"$ref": "#/$defs/Tree"}, {"object"}),
        ({"$ref": "#/$defs/List/1"}, {"array"}),
        ({"$ref": "#/$defs/List/7"}, UNTYPED),
        ({"$ref": "#/$defs/Loop"}, UNTYPED),
        ({"$ref": "#/nowhere"}, UNTYPED),
        ({"$ref": "https://example.com/schema"}, UNTYPED),
        ({"$ref": "#"}, UNTYPED),
        ({}, UNTYPED),
        (True, UNTYPED),
        (None, UNTYPED),
        ({"type": 7, "anyOf": "x", "enum": 3}, UNTYPED),
    ],
)  # fmt: skip
def test_types(schema: object, types: set[str]) -> None:
    assert schema_types(schema, ROOT) == types


_FUNCTION = {"name": "f", "parameters": {"properties": {"a": {"type": "null"}}}}


@pytest.mark.parametrize(
    "tool", [{"type": "function", "function": _FUNCTION}, {"type": "function", **_FUNCTION}]
)
def test_tools_in_both_forms(tool: dict[str, object]) -> None:
    schemas = ToolSchemas([tool])
    assert "f" in schemas and "g" not in schemas
    assert "null" in schemas.types("f", "a")
    assert schemas.types("f", "b") == schemas.types("g", "a") == {"string"}
    assert [schemas.declares(*each) for each in (("f", "a"), ("f", "b"), ("g", "x"))] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    "tool", [{}, {"function": 3}, {"name": 4}, {"name": "f", "parameters": []}, {"name": "f"}]
)
def test_odd_tools_do_no_harm(tool: dict[str, object]) -> None:
    assert ToolSchemas([tool]).types("f", "x") == {"string"}


def test_a_schema_of_references_to_references_is_read_once() -> None:
    """Each level names the next one ten times: 10^30 paths."""
    levels: dict[str, object] = {
        f"L{i}": {"anyOf": [{"$ref": f"#/$defs/L{i + 1}"}] * 10} for i in range(30)
    }
    root = {"$defs": {**levels, "L30": {"type": "integer"}}}
    assert schema_types({"$ref": "#/$defs/L0"}, root) == {"integer"}


TEXTS = st.one_of(
    st.text(max_size=8),
    st.text(alphabet="0123456789+-.eE ", max_size=70),
    st.sampled_from(["null", "None", "True", "false", "[1]", '{"a": 1}', "nul", "[", "{}x"]),
)


@given(TEXTS, st.sets(st.sampled_from(["null", "boolean", "integer", "number", "object", "array"])))
def test_what_cannot_be_typed_stays_a_string(text: str, types: set[str]) -> None:
    """The early decision that a value is a string agrees with the one on the whole text."""
    with_string = frozenset({*types, "string"})
    for end in range(len(text) + 1):
        if not may_become_typed(text[:end], with_string):
            assert convert(text, with_string) == text
            assert not may_become_typed(text, with_string)
            break
