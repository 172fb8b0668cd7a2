"""The form that a request wants its answer to have: `response_format` and `structured_outputs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ellm_serve.errors import InvalidRequest, shortened
from ellm_serve.protocol.fields import named, unsupported
from ellm_serve.request import Grammar, GrammarKind

# Fields of `structured_outputs` that name a form; a request may have one.
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# vLLM lists these among the others where it shows what was given.
_UNSHOWN = {"_backend": None, "_backend_was_auto": False}


class JsonSchemaFormat(BaseModel):
    """A schema. With `strict` false, keywords that cannot be enforced are ignored."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's way to ask for JSON."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """vLLM's way to ask for a form. `json` is a schema, as an object or as text.

    disable_any_whitespace, whitespace_pattern: what may stand between two tokens of JSON.
    disable_additional_properties: objects have no properties but those that the schema lists.
    """

    model_config = ConfigDict(extra="forbid")

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def given(self) -> dict[str, Any]:
        """The fields that name a form, as far as they are set."""
        fields = {name: self._field(name) for name in _KINDS}
        return {name: value for name, value in fields.items() if value not in (None, False)}

    @property
    def whitespace(self) -> str | None:
        """For `request.Grammar`."""
        return "" if self.disable_any_whitespace else self.whitespace_pattern

    def shown(self) -> str:
        """The fields of one that names no form, as vLLM shows them."""
        fields: dict[str, object] = dict.fromkeys(_KINDS[:-1])
        fields |= {
            "disable_any_whitespace": self.disable_any_whitespace,
            "disable_additional_properties": self.disable_additional_properties,
            "whitespace_pattern": self.whitespace_pattern and shortened(self.whitespace_pattern),
            "structural_tag": None,
        }
        return str(fields | _UNSHOWN)

    def _field(self, name: str) -> Any:
        return self.json_ if name == "json" else getattr(self, name)


def check_raw_structured(data: Mapping[str, Any]) -> None:
    """vLLM's check of `structured_outputs` before its types are known."""
    wanted = data.get("structured_outputs")
    if not isinstance(wanted, Mapping):
        return
    if sum(wanted.get(kind) is not None for kind in ("json", "regex", "choice")) > 1:
        raise named(
            "You can only use one kind of constraints for structured outputs ('json', 'regex' or"
            " 'choice').",
            "structured_outputs",
        )


def check_structured(
    response_format: BaseModel | None, structured_outputs: StructuredOutputs | None
) -> None:
    """Refuses what is asked for twice, not at all, or not served.

    Raises:
        InvalidRequest: the form cannot be had.
    """
    is_json = is_json_format(response_format)
    if response_format is not None and not isinstance(response_format, ResponseFormat):
        raise unsupported("response_format", "structural tags are not served")
    given = [] if structured_outputs is None else list(structured_outputs.given())
    if "structural_tag" in given:
        raise unsupported("structured_outputs", "structural tags are not served")
    if len(given) + is_json > 1:
        kinds = [*given, *(["response_format"] if is_json else [])]
        raise InvalidRequest(
            "You can only use one kind of structured outputs constraint but multiple are"
            f" specified: {', '.join(kinds)}"
        )
    if structured_outputs is not None and not given and not is_json:
        raise InvalidRequest(
            "You must use one kind of structured outputs constraint but none are specified:"
            f" {structured_outputs.shown()}"
        )


def is_json_format(response_format: BaseModel | None) -> bool:
    """Whether it is one for JSON."""
    return isinstance(response_format, ResponseFormat) and response_format.type != "text"


def requested_grammar(
    response_format: BaseModel | None, outputs: StructuredOutputs | None
) -> Grammar:
    """The form of a checked request that has one in mind. For a large schema this takes a while.

    Raises:
        InvalidRequest: there is no schema, or it is nested too deeply.
    """
    if outputs is not None and (given := outputs.given()):
        ((kind, value),) = given.items()
        return _grammar(kind, value, outputs)
    assert isinstance(response_format, ResponseFormat)
    return _json_grammar(response_format, None if outputs is None else outputs.whitespace)


def _grammar(kind: str, value: Any, outputs: StructuredOutputs) -> Grammar:
    match kind:
        case "regex":
            return Grammar(GrammarKind.REGEX, value)
        case "choice":
            return Grammar(GrammarKind.CHOICE, json.dumps(value))
        case "grammar":
            return Grammar(GrammarKind.GRAMMAR, value)
        case "json_object":
            return Grammar(GrammarKind.JSON_OBJECT, whitespace=outputs.whitespace)
    text = value if isinstance(value, str) else _written(value, None)
    if outputs.disable_additional_properties:
        text = _closed(text)
    return Grammar(GrammarKind.JSON_SCHEMA, text, outputs.whitespace)


def _json_grammar(response_format: ResponseFormat, whitespace: str | None) -> Grammar:
    field = "response_format"
    if response_format.type == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT, whitespace=whitespace, field=field)
    wanted = response_format.json_schema
    if wanted is None or wanted.schema_ is None:
        raise named("`response_format.json_schema` must have a `schema`.", field)
    text = _written(wanted.schema_, field)
    return Grammar(GrammarKind.JSON_SCHEMA, text, whitespace, wanted.strict is False, field)


def _written(schema: object, field: str | None) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest("The JSON schema is nested too deeply.", field) from None


def _closed(text: str) -> str:
    """A schema whose objects have no properties but those that it lists."""
    try:
        schema = json.loads(text)
        _close(schema)
        return json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest("The JSON schema is nested too deeply.") from None
    except ValueError as error:
        raise InvalidRequest(f"Grammar error: not valid JSON: {error}") from None


def _close(value: object) -> None:
    if isinstance(value, dict):
        if "properties" in value or "patternProperties" in value:
            value.setdefault("additionalProperties", False)
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _close(item)
