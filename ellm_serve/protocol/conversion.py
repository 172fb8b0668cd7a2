"""Requests of other interfaces as requests of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ellm_serve.errors import MAX_ECHO_CHARS, InvalidRequest

Request = TypeVar("Request", bound=BaseModel)


def converted(model: type[Request], values: Mapping[str, Any]) -> Request:
    """A request made of values that another one had; those that are None were not sent.

    Raises:
        InvalidRequest: a value is not allowed. Its form has been checked before, so what is told is
            only what is wrong and where.
    """
    try:
        return model.model_validate({k: v for k, v in values.items() if v is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = str(next(iter(first["loc"]), ""))[:MAX_ECHO_CHARS]
        raise InvalidRequest(f"{field}: {first['msg']}", field or None) from None
