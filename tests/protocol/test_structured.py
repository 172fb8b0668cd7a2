"""Forms of answers: which are asked for, and how that is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ellm_serve.errors import InvalidRequest, RequestError
from ellm_serve.protocol.completion import CompletionRequest
from ellm_serve.protocol.validation import COMPLETION, parse_request
from ellm_serve.request import Grammar, GrammarKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}}
TEXT = json.dumps(SCHEMA)


def ask(**body: Any) -> CompletionRequest:
    request = parse_request(COMPLETION, json.dumps({"prompt": "x"} | body).encode())
    assert isinstance(request, CompletionRequest)
    return request


@pytest.mark.parametrize(
    ("outputs", "grammar"),
    [
        ({"json": SCHEMA}, Grammar(GrammarKind.JSON_SCHEMA, TEXT)),
        ({"json": TEXT}, Grammar(GrammarKind.JSON_SCHEMA, TEXT)),
        ({"json": {}}, Grammar(GrammarKind.JSON_SCHEMA, "{}")),
        (
            {"json": SCHEMA, "disable_any_whitespace": True},
            Grammar(GrammarKind.JSON_SCHEMA, TEXT, ""),
        ),
        (
            {"json_object": True, "whitespace_pattern": " ?"},
            Grammar(GrammarKind.JSON_OBJECT, "", " ?"),
        ),
        ({"regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
        ({"choice": ["a", "b"]}, Grammar(GrammarKind.CHOICE, '["a", "b"]')),
        ({"grammar": "start: X"}, Grammar(GrammarKind.GRAMMAR, "start: X")),
        ({"regex": "a", "json_object": False}, Grammar(GrammarKind.REGEX, "a")),
    ],
)
def test_structured_outputs(outputs: dict[str, Any], grammar: Grammar) -> None:
    request = ask(structured_outputs=outputs)
    assert request.has_form and request.grammar() == grammar


@pytest.mark.parametrize(
    ("wanted", "grammar"),
    [
        ({"type": "json_object"}, Grammar(GrammarKind.JSON_OBJECT)),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            Grammar(GrammarKind.JSON_SCHEMA, TEXT),
        ),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": False},
            },
            Grammar(GrammarKind.JSON_SCHEMA, TEXT, lenient=True),
        ),
    ],
)
def test_response_format(wanted: dict[str, Any], grammar: Grammar) -> None:
    request = ask(response_format=wanted)
    assert request.has_form and request.grammar() == grammar
    assert request.grammar().field == "response_format"


@pytest.mark.parametrize("wanted", [None, {"type": "text"}])
def test_plain_text_has_no_form(wanted: object) -> None:
    assert not ask(response_format=wanted, structured_outputs=None).has_form


def test_white_space_beside_a_response_format() -> None:
    """The two fields may be sent together, if only one names a form."""
    options = {"disable_any_whitespace": True}
    request = ask(response_format={"type": "json_object"}, structured_outputs=options)
    assert request.grammar() == Grammar(GrammarKind.JSON_OBJECT, "", "")


@pytest.mark.parametrize("schema", [SCHEMA, TEXT])
def test_additional_properties_can_be_ruled_out(schema: object) -> None:
    """On all levels, where the schema does not say anything about them."""
    options = {"json": schema, "disable_additional_properties": True}
    closed = json.loads(ask(structured_outputs=options).grammar().text)
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "You can only use one kind of constraints for structured outputs ('json', 'regex' or"
            " 'choice'). (parameter=structured_outputs)",
        ),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "multiple are specified: regex"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "multiple are specified: regex, response_format",
        ),
        ({"structured_outputs": {"json_object": False}}, "none are specified: {'json': None"),
        ({"structured_outputs": {"structural_tag": "x"}}, "is not supported"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "is not supported"),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
            "is not supported",
        ),
        ({"structured_outputs": {"jsn": {}}}, "Extra inputs are not permitted"),
    ],
)
def test_what_is_refused(body: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError) as caught:
        ask(**body)
    assert caught.value.status == 400
    assert text in caught.value.message and len(caught.value.message) < 1000


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        {"structured_outputs": {"json": "{", "disable_additional_properties": True}},
        {"structured_outputs": {"json": "[" * 9999, "disable_additional_properties": True}},
    ],
)
def test_schemas_that_cannot_be_read(body: dict[str, Any]) -> None:
    """Known when the grammar is written down."""
    request = ask(**body)
    with pytest.raises(InvalidRequest):
        request.grammar()
