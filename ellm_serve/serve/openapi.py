"""Puts into the OpenAPI document what FastAPI cannot see: the bodies that are parsed by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ellm_serve.protocol.messages import COUNT_TOKENS, MESSAGES
from ellm_serve.protocol.responses import RESPONSES
from ellm_serve.protocol.validation import CHAT, COMPLETION, DETOKENIZE, TOKENIZE
from ellm_serve.serve.auth import is_messages

_REFERENCE = "#/components/schemas/{model}"
_BODIES: dict[str, tuple[str, Any]] = {
    "/v1/completions": ("CompletionRequest", COMPLETION),
    "/v1/chat/completions": ("ChatCompletionRequest", CHAT),
    "/v1/responses": ("ResponsesRequest", RESPONSES),
    "/v1/messages": ("MessagesRequest", MESSAGES),
    "/v1/messages/count_tokens": ("CountTokensRequest", COUNT_TOKENS),
    "/tokenize": ("TokenizeRequest", TOKENIZE),
    "/detokenize": ("DetokenizeRequest", DETOKENIZE),
}
_STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_REFUSALS = {
    "400": "the request is not valid",
    "401": "a key is missing",
    "404": "no such model, or no such earlier answer",
    "413": "the body is too large",
    "429": "too many requests are waiting",
    "500": "the server made a mistake",
    "503": "the server is not ready, or no longer",
    "504": "the deadline has passed",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "required": ["message", "type", "param", "code"],
                    "properties": {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                        "code": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                    },
                },
            ]
        }
    },
}
# Anthropic's envelope; the form of a body is refused in the other one.
_MESSAGES_ERROR = {
    "anyOf": [
        {
            "type": "object",
            "required": ["type", "error"],
            "properties": {
                "type": {"const": "error"},
                "error": {
                    "type": "object",
                    "required": ["type", "message"],
                    "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
                },
            },
        },
        {"$ref": _REFERENCE.format(model="ErrorResponse")},
    ]
}


def describe(app: FastAPI) -> None:
    """Makes `app.openapi()` complete; the document is built when it is first asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["ErrorResponse"] = _ERROR
    schemas["MessagesErrorResponse"] = _MESSAGES_ERROR
    for path, (name, adapter) in _BODIES.items():
        schema = adapter.json_schema(ref_template=_REFERENCE)
        schemas |= schema.pop("$defs", {})
        schemas[name] = schema
        operation = document["paths"][path]["post"]
        operation["requestBody"] = {"required": True, "content": _json(_reference(name))}
        envelope = "MessagesErrorResponse" if is_messages(path) else "ErrorResponse"
        operation["responses"] |= _refusals(_REFUSALS, envelope)
        if path in _STREAMS:
            # Events of several kinds; OpenAPI 3.1 has no way to describe them.
            operation["responses"]["200"]["content"]["text/event-stream"] = {}
    earlier = "/v1/responses/{response_id}"
    document["paths"][earlier]["get"]["responses"] |= _refusals(("401", "404"))
    document["paths"][f"{earlier}/cancel"]["post"]["responses"] = _refusals(("400", "401", "404"))
    return document


def _refusals(statuses: Iterable[str], envelope: str = "ErrorResponse") -> dict[str, Any]:
    content = _json(_reference(envelope))
    return {status: {"description": _REFUSALS[status], "content": content} for status in statuses}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=name)}


def _json(schema: dict[str, str]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
