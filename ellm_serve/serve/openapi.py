"""Puts into the OpenAPI document what FastAPI cannot see: the bodies that are parsed by hand."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ellm_serve.protocol.validation import CHAT, COMPLETION, DETOKENIZE, TOKENIZE

_REFERENCE = "#/components/schemas/{model}"
_BODIES: dict[str, tuple[str, Any]] = {
    "/v1/completions": ("CompletionRequest", COMPLETION),
    "/v1/chat/completions": ("ChatCompletionRequest", CHAT),
    "/tokenize": ("TokenizeRequest", TOKENIZE),
    "/detokenize": ("DetokenizeRequest", DETOKENIZE),
}
_STREAMS = ("/v1/completions", "/v1/chat/completions")
_REFUSALS = {
    "400": "the request is not valid",
    "401": "a key is missing",
    "404": "no such model",
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
    for path, (name, adapter) in _BODIES.items():
        schema = adapter.json_schema(ref_template=_REFERENCE)
        schemas |= schema.pop("$defs", {})
        schemas[name] = schema
        operation = document["paths"][path]["post"]
        operation["requestBody"] = {"required": True, "content": _json(_reference(name))}
        for status, reason in _REFUSALS.items():
            operation["responses"][status] = {
                "description": reason,
                "content": _json(_reference("ErrorResponse")),
            }
        if path in _STREAMS:
            operation["responses"]["200"]["content"]["text/event-stream"] = {
                "schema": {"type": "string"}
            }
    return document


def _reference(name: str) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=name)}


def _json(schema: dict[str, str]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
