"""Keys: without one nothing is told, with one everything is as without keys."""

from __future__ import annotations

import hashlib
import json
import logging

import pytest
from starlette.routing import BaseRoute

from ellm_serve.config import ServeConfig
from ellm_serve.metrics import Metrics
from ellm_serve.protocol.messages import UNAUTHORIZED
from ellm_serve.serve.auth import KeyRing
from ellm_serve.serve.context import AppState
from ellm_serve.serve.http import create_app
from tests.serve.client import Client
from tests.serve.conftest import MakeServer, ServeApp

KEY, OTHER = "sk-first-secret", "sk-zweiter-schlüssel"
OPEN = {"/health", "/ready", "/ping", "/metrics"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": "Bearer " + key.encode().decode("latin-1")}


def paths(routes: list[BaseRoute]) -> list[tuple[str, str]]:
    """Every method and path of an application."""
    found = []
    for route in routes:
        path, methods = getattr(route, "path", None), getattr(route, "methods", None)
        assert isinstance(path, str) and methods, f"a route this test does not know: {route!r}"
        found += [(method, path) for method in sorted(methods)]
    return found


def refusal(path: str) -> bytes:
    """What a request without a key is told: clients of Anthropic's interface in its own words."""
    if path.startswith("/v1/messages"):
        return json.dumps(UNAUTHORIZED, separators=(",", ":")).encode()
    return b'{"error":"Unauthorized"}'


@pytest.mark.parametrize("metrics_open", [True, False])
def test_every_route_needs_a_key(serve_app: ServeApp, metrics_open: bool) -> None:
    """All there are, documents included; the few open ones are named here."""
    config = ServeConfig.from_options(
        model="m", api_keys=[KEY, OTHER], metrics_open=metrics_open, dev_mode=True
    )
    app = create_app(AppState(Metrics("m")), config)
    client = Client(serve_app(app))
    routes = paths(app.routes)
    allowed = OPEN if metrics_open else OPEN - {"/metrics"}
    assert {"/v1/completions", "/openapi.json", "/docs", "/server_info"} <= {p for _, p in routes}
    for method, path in routes:
        for headers in ({}, bearer("sk-wrong"), bearer(""), {"Authorization": KEY}):
            reply = client.request(method, path, headers=headers)
            if path in allowed:
                assert reply.status != 401, (method, path)
            else:
                assert reply.status == 401, (method, path)
                assert reply.body == (b"" if method == "HEAD" else refusal(path))
        for key in (KEY, OTHER):
            assert client.request(method, path, headers=bearer(key)).status != 401


@pytest.mark.parametrize(
    "path",
    [
        "/nosuch",
        "/health/",
        "//health",
        "/health/../v1/models",
        "/%68ealth/x",
        "/v1/models?x=/health",
        "/HEALTH",
    ],
)
def test_paths_that_are_not_routes_need_one_too(serve_app: ServeApp, path: str) -> None:
    """An open path is one that is spelled like it."""
    config = ServeConfig.from_options(model="m", api_keys=[KEY])
    client = Client(serve_app(create_app(AppState(Metrics("m")), config)))
    assert client.get(path).status == 401
    assert client.request("OPTIONS", path).status == 401


def test_a_prefix_does_not_open_anything(serve_app: ServeApp) -> None:
    """Behind a proxy's prefix the same paths are open, and no others."""
    config = ServeConfig.from_options(model="m", api_keys=[KEY], root_path="/llm")
    client = Client(serve_app(create_app(AppState(Metrics("m")), config)))
    assert client.get("/llm/health").status == 200
    assert client.get("/health").status == 200
    assert client.get("/llm/v1/models").status == 401
    assert client.get("/llm/llm/health").status == 401


def test_forms_of_the_header() -> None:
    """The scheme in any case, as HTTP has it; x-api-key only where Anthropic's clients send it."""
    ring = KeyRing([KEY], ["/health"])
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert ring.principal("/v1/models", {"authorization": f"{scheme} {KEY}"})
    assert ring.principal("/v1/models", {"authorization": f"Basic {KEY}"}) is None
    assert ring.principal("/v1/models", {"authorization": KEY}) is None
    assert ring.principal("/v1/models", {"x-api-key": KEY}) is None
    assert ring.principal("/v1/messages", {"x-api-key": KEY})
    assert ring.principal("/v1/messages/count_tokens", {"x-api-key": KEY})
    assert ring.principal("/v1/messages", {"x-api-key": "sk-wrong"}) is None
    assert ring.principal("/v1/messages2", {"x-api-key": KEY}) is None
    both = {"authorization": "Bearer sk-wrong", "x-api-key": KEY}
    assert ring.principal("/v1/messages", both) and ring.principal("/v1/models", both) is None
    assert ring.principal("/health", {}) == ""


def test_principals() -> None:
    """One name per key, made from it and not it; none where keys are not asked for."""
    ring = KeyRing([KEY, OTHER], [])
    names = [
        ring.principal("/x", {k.lower(): v for k, v in bearer(key).items()}) for key in (KEY, OTHER)
    ]
    assert names == [hashlib.sha256(key.encode()).hexdigest()[:16] for key in (KEY, OTHER)]
    assert KeyRing([], []).principal("/x", {"authorization": f"Bearer {KEY}"}) == ""


def test_sessions_of_another_key_are_not_found(scripted: MakeServer) -> None:
    """The same prompt under the same session id is reused for its own key only."""
    client = scripted(api_keys=[KEY, OTHER]).client
    body = {"prompt": [300] * 200, "max_tokens": 2}

    def cached(key: str) -> int:
        headers = {**bearer(key), "X-Session-Id": "s"}
        usage = client.post("/v1/completions", body, headers=headers).json["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(KEY) == 0
    assert cached(KEY) > 150
    assert cached(OTHER) == 0


def test_keys_and_prompts_are_never_logged(
    scripted: MakeServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the access log nor when a handler breaks over them, at any level."""
    caplog.set_level(logging.DEBUG)
    server = scripted(api_keys=[KEY])
    client = server.client
    secret = "the launch code is tulip"
    prompt = {"prompt": secret, "max_tokens": 2, "user": "tulip"}
    assert client.post("/v1/completions", prompt, headers=bearer(KEY)).status == 200
    assert client.post("/v1/completions", prompt, headers=bearer("sk-wrong")).status == 401
    assert client.post(f"/v1/completions?api_key={KEY}", prompt).status == 401
    bad = {"prompt": {"tulip": secret}, "temperature": "tulip"}
    assert client.post("/v1/completions", bad, headers=bearer(KEY)).status == 400

    async def broken(*arguments: object) -> None:
        raise ValueError(f"cannot do {arguments[1]}")

    monkeypatch.setattr(type(server.state.service), "complete", broken)
    reply = client.post("/v1/completions", prompt, headers=bearer(KEY))
    assert reply.status == 500 and "tulip" not in reply.text
    assert reply.json["error"]["type"] == "InternalServerError"
    written = [record.getMessage() for record in caplog.records]
    written += [record.exc_text or "" for record in caplog.records]
    assert any("POST /v1/completions 200" in line for line in written)
    assert any("ValueError" in line for line in written), "the fault itself must be logged"
    for line in written:
        assert "tulip" not in line and KEY not in line and "sk-wrong" not in line
