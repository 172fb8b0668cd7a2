"""The envelope of every error, and what it does not tell."""

from __future__ import annotations

import pytest

from ellm_serve.errors import (
    MAX_ECHO_CHARS,
    BodyTooLarge,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    KVExhausted,
    ModelNotFound,
    Overloaded,
    Unavailable,
    WorkerDied,
    shortened,
)
from ellm_serve.protocol.errors import error_body, error_headers, error_status


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (InvalidRequest("m", "p"), 400, "BadRequestError", "p", 400),
        (ContextLengthExceeded(5, 4), 400, "BadRequestError", "input_tokens", 400),
        (ModelNotFound("m", ["a"]), 404, "NotFoundError", "model", 404),
        (BodyTooLarge(10), 413, "Request Entity Too Large", None, 413),
        (Overloaded("m", 1.5), 429, "Too Many Requests", None, "server_overloaded"),
        (Unavailable("m", 0.1), 503, "ServiceUnavailableError", None, 503),
        (DeadlineExceeded("m"), 504, "Gateway Timeout", None, 504),
        (EngineError("secret"), 500, "InternalServerError", None, 500),
        (KVExhausted("secret"), 503, "ServiceUnavailableError", None, 503),
        (WorkerDied("secret"), 503, "ServiceUnavailableError", None, 503),
        (RuntimeError("secret"), 500, "InternalServerError", None, 500),
    ],
)
def test_envelopes(
    error: Exception, status: int, kind: str, param: str | None, code: int | str
) -> None:
    """Four keys in vLLM's order; what went wrong inside stays inside."""
    body = error_body(error)["error"]
    assert list(body) == ["message", "type", "param", "code"]
    assert (error_status(error), body["type"], body["param"], body["code"]) == (
        status,
        kind,
        param,
        code,
    )
    assert body["message"]
    assert "secret" not in body["message"]


def test_when_to_come_back() -> None:
    """Whole seconds, never 0."""
    assert error_headers(Overloaded("m", 1.2)) == {"Retry-After": "2"}
    assert error_headers(Unavailable("m", 0.0)) == {"Retry-After": "1"}
    assert error_headers(InvalidRequest("m")) == {}


def test_values_in_messages() -> None:
    """With a value the message names both, with None as well; without one it stays as it is."""
    assert InvalidRequest("m.", "p").message == "m."
    assert InvalidRequest("m.", "p", None).message == "m. (parameter=p, value=None)"
    assert InvalidRequest("m.", "p", [1]).message == "m. (parameter=p, value=[1])"
    long = InvalidRequest("m.", "p", "x" * 100_000).message
    assert len(long) < MAX_ECHO_CHARS + 50


def test_shortened() -> None:
    """Short values are whole; long ones end in dots."""
    assert shortened(["abc"]) == "['abc']"
    assert shortened("x" * MAX_ECHO_CHARS) == "x" * MAX_ECHO_CHARS
    assert shortened("x" * (MAX_ECHO_CHARS + 1)) == "x" * MAX_ECHO_CHARS + "..."
    assert shortened([1] * 10**6).startswith("[1, 1, ")
    assert len(shortened({"a": ["x" * 10**6] * 100})) <= MAX_ECHO_CHARS + 3
    assert shortened([2, -3, 1.5, None, {"b": "c"}]) == "[2, -3, 1.5, None, {'b': 'c'}]"
    assert len(shortened(10**4000)) <= MAX_ECHO_CHARS + 3
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert shortened(deep) == "[[[[...]]]]"


def test_unencodable_text() -> None:
    """Half a character in a client's value does not break the answer to it."""
    body = error_body(InvalidRequest("x\ud800", "p\ud800"))["error"]
    assert (body["message"], body["param"]) == ("x?", "p?")
