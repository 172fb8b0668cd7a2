"""The error envelope: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from typing import Any

from ellm_serve.errors import EngineError, Overloaded, RequestError, Unavailable


def error_status(error: BaseException) -> int:
    """The HTTP status; 500 for anything that was not raised on purpose."""
    return error.status if isinstance(error, RequestError | EngineError) else 500


def error_headers(error: BaseException) -> dict[str, str]:
    """Headers that go with the status: when to come back, in whole seconds."""
    if isinstance(error, Overloaded | Unavailable):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    return {}


def error_body(error: BaseException) -> dict[str, Any]:
    """The envelope. Only a RequestError's own message is shown; `code` is the status, as in vLLM,
    unless the error has a word of its own.
    """
    message, kind, param = "Internal server error.", "InternalServerError", None
    code: int | str = error_status(error)
    if isinstance(error, RequestError):
        message, kind, param = error.message, error.kind, error.param
        code = error.code or code
    elif isinstance(error, EngineError):
        message, kind = error.public, error.kind
    return {
        "error": {
            "message": _encodable(message),
            "type": kind,
            "param": None if param is None else _encodable(param),
            "code": code,
        }
    }


def _encodable(text: str) -> str:
    """Text that has a UTF-8 form, whatever the client put into it."""
    return text.encode("utf-8", "replace").decode()
