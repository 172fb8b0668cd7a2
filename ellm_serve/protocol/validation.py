"""From the bytes of a body to a request model, with vLLM's texts for whatever is wrong.

The text of a schema error lists at most ten places, each as the repr of a small dictionary; the
envelope's `param` is the first place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ellm_serve.errors import MAX_ECHO_CHARS, InvalidBody, UnsupportedMediaType
from ellm_serve.protocol.chat import ChatCompletionRequest
from ellm_serve.protocol.completion import CompletionRequest
from ellm_serve.protocol.tokenize import DetokenizeRequest, TokenizeRequest

COMPLETION: TypeAdapter[CompletionRequest] = TypeAdapter(CompletionRequest)
CHAT: TypeAdapter[ChatCompletionRequest] = TypeAdapter(ChatCompletionRequest)
TOKENIZE: TypeAdapter[TokenizeRequest] = TypeAdapter(TokenizeRequest)
DETOKENIZE: TypeAdapter[DetokenizeRequest] = TypeAdapter(DetokenizeRequest)

Request = TypeVar("Request")

_MAX_ERRORS = 10
_MAX_ERROR_CHARS = 1000
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def check_content_type(value: str | None) -> None:
    """Refuses a body that is not announced as JSON; parameters such as a charset may follow.

    Raises:
        UnsupportedMediaType: any other type, or none.
    """
    if (value or "").partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaType()


def parse_request(adapter: TypeAdapter[Request], body: bytes) -> Request:
    """Reads one of COMPLETION, CHAT, TOKENIZE or DETOKENIZE from a body.

    Raises:
        InvalidBody: no JSON, or not the request's form.
        InvalidRequest: a field has a value that is not allowed or not supported.
    """
    content = parse_json(body)
    try:
        # From attributes, as FastAPI does: its texts name no Python class.
        return adapter.validate_python(content, from_attributes=True)
    except ValidationError as error:
        raise _schema_error(error, content) from None


def parse_json(body: bytes) -> object:
    """The value in a body. Half characters that JSON can spell become U+FFFD.

    Clients that cut text at UTF-16 units send such halves, and then with every later turn again.

    Raises:
        InvalidBody: no JSON, or nested too deeply.
    """
    if not body:
        raise _invalid([{"type": "missing", "loc": (), "msg": "Field required", "input": None}], {})
    try:
        content = json.loads(body)
        return _mended(content) if _ESCAPED_SURROGATE.search(body) else content
    except json.JSONDecodeError as error:
        raise _json_error(error.pos, error.msg) from None
    except UnicodeDecodeError as error:
        raise _json_error(error.start, "The body is not valid UTF-8") from None
    except RecursionError:
        raise _json_error(0, "The body is nested too deeply") from None
    except ValueError:  # an integer with thousands of digits
        raise _json_error(0, "The body has a number with too many digits") from None


def _mended(content: object) -> object:
    text = json.dumps(content, ensure_ascii=False)
    mended = _SURROGATE.sub("\ufffd", text)
    return content if mended == text else json.loads(mended)


def _json_error(position: int, reason: str) -> InvalidBody:
    error = {
        "type": "json_invalid",
        "loc": (position,),
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": reason},
    }
    return _invalid([error], {position: None})


def _schema_error(error: ValidationError, content: object) -> InvalidBody:
    return _invalid(error.errors(include_url=False), content)


def _invalid(errors: Sequence[Mapping[str, Any]], content: object) -> InvalidBody:
    places = [_place(error, content) for error in errors[:_MAX_ERRORS]]
    lines = [
        str(
            {
                "type": error["type"],
                "loc": place,
                "msg": error["msg"],
                "input": _summary(error["input"]),
            }
            | ({"ctx": error["ctx"]} if "ctx" in error else {})
        )[:_MAX_ERROR_CHARS]
        for error, place in zip(errors, places, strict=False)
    ]
    if len(errors) > _MAX_ERRORS:
        lines.append(f"...and {len(errors) - _MAX_ERRORS} more errors")
    label = "error" if len(errors) == 1 else "errors"
    return InvalidBody("\n  ".join([f"{len(errors)} validation {label}:", *lines]), places[0])


def _place(error: Mapping[str, Any], content: object) -> str:
    """Where in the body an error is, in the client's own names.

    pydantic puts names of union members, some of them Python classes, between the keys; a step
    counts when it leads somewhere in the body, or when it is the key that is missing there.
    """
    steps = ["body"]
    for number, step in enumerate(error["loc"], 1):
        is_key = isinstance(content, Mapping) and step in content
        if is_key or (isinstance(content, list) and step in range(len(content))):
            content = content[step]  # type: ignore[index]
        elif error["type"] != "missing" or number < len(error["loc"]):
            continue
        steps.append(str(step))
    return ".".join(steps)[:MAX_ECHO_CHARS]


def _summary(value: object) -> str:
    """A client's value in a few characters."""
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)[:MAX_ECHO_CHARS]
