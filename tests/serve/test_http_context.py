"""What headers say about a request."""

from __future__ import annotations

import time

import pytest

from ellm_serve.serve.context import RequestContext


def read(timeout_s: float | None = None, **headers: str) -> RequestContext:
    context = RequestContext()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    context.read_headers(named, timeout_s)
    return context


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({}, None),
        ({"x_session_id": "a", "x_claude_code_session_id": "b"}, "a"),
        ({"x_session_id": "", "session_id": "b"}, "b"),
        ({"x_claude_code_session_id": "b", "x_session_affinity": "c"}, "b"),
        ({"x_session_affinity": "c", "session_id": "d"}, "c"),
        ({"session_id": "d", "x_acme_session_id": "e"}, "d"),
        ({"x_acme_session_id": "e", "x_correlation_id": "f"}, "e"),
        ({"x_correlation_id": "f", "x_openwebui_chat_id": "g"}, "f"),
        ({"x_smg_routing_key": "g"}, "g"),
        ({"x_dynamo_parent_session_id": "p", "x_dynamo_session_id": "h"}, "h"),
        ({"x_dynamo_parent_session_id": "p"}, None),
        ({"x_openwebui_chat_id": "i"}, "i"),
        ({"x_correlation_id": "x" * 300, "x_smg_routing_key": "g"}, "g"),
        ({"x_request_id": "r", "x_user_id": "u"}, None),
    ],
)
def test_sessions(headers: dict[str, str], session: str | None) -> None:
    """The most telling header wins; those for other ends are passed over when unusable."""
    assert read(**headers).session_id == session


def test_deadlines() -> None:
    """The client's, or else the server's, from the time of arrival."""
    assert read().deadline is None
    own, server = read(x_request_timeout="1.5", timeout_s=9), read(timeout_s=9)
    assert own.deadline == own.received + 1.5
    assert server.deadline == server.received + 9
    assert own.received <= time.monotonic()


def test_the_rest() -> None:
    """Priority, ids, times."""
    context = read(x_vllm_priority="-3", x_request_id="r", x_ellm_token_times="1")
    assert (context.priority, context.request_id, context.answer_id) == (-3, "r", "r")
    assert context.token_times
    plain = read(x_ellm_token_times="0")
    assert (plain.priority, plain.request_id, plain.token_times) == (None, None, False)
    assert plain.answer_id != read().answer_id
