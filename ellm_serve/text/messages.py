"""From messages as clients send them to messages as chat templates expect them.

The wire format has arguments as a JSON string, content as null or as a list of parts, and the role
`developer`; templates know none of these. Whatever this server may have sent out earlier must be
accepted here again, so a tool call with broken arguments becomes one raw-text argument.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ellm_serve.errors import InvalidRequest
from ellm_serve.text.plain import Json, plain_json

Message = dict[str, Json]

# The name under which arguments that are no JSON object reach the template.
RAW_ARGUMENTS = "arguments"

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


@dataclass(frozen=True, slots=True)
class NormalizedMessages:
    """Messages for a template, and what had to be bent for it (for the log)."""

    messages: list[Message]
    warnings: tuple[str, ...] = ()


def normalize_messages(messages: Sequence[Mapping[str, object]]) -> NormalizedMessages:
    """Checks the messages of one conversation and brings them to the template's form."""
    if isinstance(messages, str) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", "messages")
    warnings: list[str] = []
    normalized = [
        _normalize(message, f"messages[{i}]", warnings) for i, message in enumerate(messages)
    ]
    return NormalizedMessages(normalized, tuple(warnings))


def _normalize(message: Mapping[str, object], param: str, warnings: list[str]) -> Message:
    plain = plain_json(message, param)
    if not isinstance(plain, dict):
        raise InvalidRequest(f"{param} must be an object", param)
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{param}.role must be a non-empty string", f"{param}.role")
    # Nulls mean "absent" on the wire, and an empty list of calls is no call.
    result: Message = {key: value for key, value in plain.items() if value is not None}
    if result.get("tool_calls") == []:
        del result["tool_calls"]
    result["role"] = "system" if role == "developer" else role
    result["content"] = _content_text(plain.get("content"), f"{param}.content")
    if "reasoning" in result:
        # Two names are in use for the same field; templates read this one.
        result.setdefault("reasoning_content", result["reasoning"])
    if "tool_calls" in result:
        calls = _list(result["tool_calls"], f"{param}.tool_calls")
        result["tool_calls"] = [
            _tool_call(call, f"{param}.tool_calls[{i}]", warnings) for i, call in enumerate(calls)
        ]
    return result


def _content_text(content: Json, param: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = _list(content, param)
    return "\n".join(_part_text(part, f"{param}[{i}]") for i, part in enumerate(parts))


def _part_text(part: Json, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidRequest(f"{param} must be an object with a type", param)
    field = _TEXT_PARTS.get(kind)
    if field is None:
        raise InvalidRequest(
            f"{param} is of type {kind!r}, but this model takes only text", f"{param}.type"
        )
    text = part.get(field)
    if not isinstance(text, str):
        raise InvalidRequest(f"{param}.{field} must be a string", f"{param}.{field}")
    return text


def _tool_call(call: Json, param: str, warnings: list[str]) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidRequest(f"{param} must be an object with a function", param)
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{param}.function.name must be a string", f"{param}.function.name")
    arguments = _arguments(function.get("arguments"), f"{param}.function.arguments", warnings)
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(value: Json, param: str, warnings: list[str]) -> dict[str, Json]:
    """The arguments as an object, in the order of the JSON text."""
    decoded = _decode(value, param) if isinstance(value, str) else value
    if decoded is None or decoded == "":
        return {}
    if isinstance(decoded, dict):
        return decoded
    warnings.append(f"{param} is not a JSON object; passed on as raw text")
    raw = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return {RAW_ARGUMENTS: raw}


def _decode(text: str, param: str) -> Json:
    if not text.strip():
        return None
    try:
        return plain_json(json.loads(text), param)
    except (ValueError, RecursionError, InvalidRequest):
        # Broken, or nested beyond reason: the text itself still is something to show the model.
        return text


def _list(value: Json, param: str) -> list[Json]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{param} must be a list", param)
    return value
