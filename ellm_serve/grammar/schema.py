"""From a JSON schema as a request has it to a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ellm_serve.errors import InvalidRequest
from ellm_serve.grammar.source import MAX_NESTING
from ellm_serve.request import Grammar, GrammarKind


def json_schema(
    schema: object, *, field: str, whitespace: str | None = None, closed: bool = False
) -> Grammar:
    """A grammar for the values of a schema, which is given as JSON text or as what that holds.

    Args:
        field: the request's field that errors name.
        whitespace: a regex of what may stand between two tokens of JSON, "" for nothing.
        closed: objects have no other properties than those listed, unless the schema says so.

    Raises:
        InvalidRequest: it is no JSON, or nested too deeply.
    """
    try:
        if closed:
            parsed = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
            _close(parsed)
            schema = parsed
        text = schema if isinstance(schema, str) else json.dumps(schema)
    except RecursionError:
        message = f"Grammar error: the JSON schema is nested more than {MAX_NESTING} levels deep"
        raise InvalidRequest(message, field) from None
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"Grammar error: not valid JSON: {error}", field) from None
    return Grammar(GrammarKind.JSON_SCHEMA, text, whitespace, field=field)


def _close(schema: object) -> None:
    """Forbids other properties in every object that lists some, in place."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if isinstance(node.get("properties"), Mapping) or "patternProperties" in node:
                node.setdefault("additionalProperties", False)
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
