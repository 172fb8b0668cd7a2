"""Types of tool parameters: from the JSON schema of a tool, and from text to a value of the type.

For models that write bare text for every value. Nothing is ever evaluated, and no text is an error:
what is no value of its type stays the text it is. Text rules, by type:
* string: any text. A parameter that the tool does not declare is a string.
* null: `null` or `None`; also taken for a value of another type than string.
* boolean: `true`, `false`, in any case. integer, number: as in JSON, a `+` and zeros in front
  are forgiven; an integer may be written as `3.0`.
* object, array: JSON of that type.
* Several types: the first that fits, in the order null, integer, number, boolean, object, array,
  string; if string is among them, the text must be the value to the letter.
* No type given: JSON objects and arrays are parsed, all else is a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from ellm_serve.errors import InvalidRequest
from ellm_serve.text.plain import Json, plain_json

STRING = frozenset({"string"})
_UNTYPED = frozenset({"object", "array", "string"})

_BRANCHES = ("anyOf", "oneOf", "allOf")
# Names from other languages that tool definitions use instead of JSON schema's.
_ALIASES = {
    "str": "string",
    "text": "string",
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "object", "array"})

_NULLS = ("null", "None")
_BOOLEANS = {"true": True, "false": False}
_INTEGER = re.compile(r"[+-]?[0-9]+(\.0+)?")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_NUMBER_SO_FAR = re.compile(r"[+-]?[0-9]*\.?[0-9]*([eE][+-]?[0-9]*)?")
# Longer ones are no numbers but, say, keys; they stay text.
_MAX_NUMBER_CHARS = 64


class ToolSchemas:
    """The declared tools of a request, in OpenAI's nested or flat form."""

    def __init__(self, tools: Sequence[Mapping[str, object]]) -> None:
        self._parameters: dict[str, Mapping[str, object]] = {}
        for tool in tools:
            function = _mapping(tool.get("function", tool))
            name = function.get("name")
            if isinstance(name, str):
                self._parameters[name] = _mapping(function.get("parameters"))

    def __contains__(self, tool: str) -> bool:
        return tool in self._parameters

    def declares(self, tool: str, parameter: str) -> bool:
        """Whether the tool has this parameter; an unknown tool may have any."""
        return tool not in self or parameter in self._properties(tool)

    def types(self, tool: str, parameter: str) -> frozenset[str]:
        """The JSON types that the parameter may have."""
        properties = self._properties(tool)
        if parameter not in properties:
            return STRING
        return schema_types(properties[parameter], self._parameters[tool])

    def _properties(self, tool: str) -> Mapping[str, object]:
        return _mapping(self._parameters.get(tool, {}).get("properties"))


def schema_types(schema: object, root: Mapping[str, object]) -> frozenset[str]:
    """The JSON types that a schema names, itself or in its branches and references."""
    types: set[str] = set()
    waiting, seen = [schema], set[int]()
    while waiting:
        node = _mapping(waiting.pop())
        if id(node) in seen:
            continue
        seen.add(id(node))
        types |= _own_types(node)
        for key in _BRANCHES:
            branches = node.get(key)
            waiting += branches if isinstance(branches, list | tuple) else []
        if isinstance(reference := node.get("$ref"), str):
            waiting.append(_resolve(reference, root))
    return frozenset(types) if types - {"null"} else frozenset(types | _UNTYPED)


def _own_types(schema: Mapping[str, object]) -> set[str]:
    """The types that a schema names, references and branches left aside."""
    named = schema.get("type")
    names = named if isinstance(named, list | tuple) else [named]
    types = {_ALIASES.get(name, name) for name in names if isinstance(name, str)} & _TYPES
    if not types:
        members = schema.get("enum")
        types |= {_type_of(m) for m in (members if isinstance(members, list | tuple) else ())}
        types |= {_type_of(schema["const"])} if "const" in schema else set()
    if not types:
        types |= {"object"} if "properties" in schema else set()
        types |= {"array"} if "items" in schema else set()
    return types | ({"null"} if schema.get("nullable") is True else set())


def _resolve(reference: str, root: Mapping[str, object]) -> object:
    """The schema at a JSON pointer within the same document; None if there is none."""
    if not reference.startswith("#"):
        return None
    node: object = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list | tuple):
            node = dict(enumerate(node)).get(int(key)) if key.isdecimal() else None
        else:
            node = _mapping(node).get(key)
    return node


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
        case _:
            return "object"


def may_become_typed(text: str, types: frozenset[str]) -> bool:
    """Whether text that starts like this may be a value of one of the types other than string.

    False stays False for every text that starts the same, and `convert` gives a string for it.
    """
    return not text or any(kind in types and may_be(text) for kind, may_be in _MAY_BE.items())


def convert(text: str, types: frozenset[str]) -> Json:
    """The value that the text stands for."""
    if "string" in types and not may_become_typed(text, types):
        return text
    bare = text.strip()
    if "string" not in types and bare in _NULLS:
        return None
    for kind, read in _READERS.items():
        if kind in types:
            try:
                return read(bare)
            except (ValueError, RecursionError, InvalidRequest):
                continue
    return text


def _read_null(text: str) -> Json:
    if text not in _NULLS:
        raise ValueError(text)
    return None


def _read_boolean(text: str) -> Json:
    if text.lower() not in _BOOLEANS:
        raise ValueError(text)
    return _BOOLEANS[text.lower()]


def _read_integer(text: str) -> Json:
    if len(text) > _MAX_NUMBER_CHARS or not _INTEGER.fullmatch(text):
        raise ValueError(text)
    return int(text.partition(".")[0])


def _read_number(text: str) -> Json:
    if len(text) > _MAX_NUMBER_CHARS or not _NUMBER.fullmatch(text):
        raise ValueError(text)
    value = float(text) if set(text) & set(".eE") else int(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(text)
    return value


def _read_container(kind: type[dict[str, Json]] | type[list[Json]]) -> Callable[[str], Json]:
    def read(text: str) -> Json:
        value = plain_json(json.loads(text), "value", depth=1)  # it is within the arguments
        if not isinstance(value, kind):
            raise ValueError(text)
        json.dumps(value, allow_nan=False)  # ValueError for NaN and infinities
        return value

    return read


_READERS: dict[str, Callable[[str], Json]] = {
    "null": _read_null,
    "integer": _read_integer,
    "number": _read_number,
    "boolean": _read_boolean,
    "object": _read_container(dict),
    "array": _read_container(list),
}


def _may_be_number(text: str) -> bool:
    return len(text) <= _MAX_NUMBER_CHARS and _NUMBER_SO_FAR.fullmatch(text) is not None


_MAY_BE: dict[str, Callable[[str], bool]] = {
    "null": lambda text: any(word.startswith(text) for word in _NULLS),
    "integer": _may_be_number,
    "number": _may_be_number,
    "boolean": lambda text: any(word.startswith(text.lower()) for word in _BOOLEANS),
    "object": lambda text: text.startswith("{"),
    "array": lambda text: text.startswith("["),
}
