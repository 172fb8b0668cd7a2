"""The shell around every request: ids, refusals, readiness, log lines, documents."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ellm_serve.config import ServeConfig
from ellm_serve.metrics import Metrics
from ellm_serve.serve.context import AppState
from ellm_serve.serve.http import create_app
from ellm_serve.version import __version__
from tests.serve.client import Client, wait_until
from tests.serve.conftest import MakeServer, Pace, ServeApp

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SHORT = {"prompt": "hello", "max_tokens": 2}


def loading(serve_app: ServeApp, **settings: Any) -> tuple[Client, AppState]:
    """A service whose engine is not there yet."""
    config = ServeConfig.from_options(model="m", **settings)
    state = AppState(Metrics("m"))
    return Client(serve_app(create_app(state, config))), state


# --- small routes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/nosuch", 404, {"detail": "Not Found"}),
        ("GET", "/v1/models/builtin", 404, {"detail": "Not Found"}),
        ("GET", "/v1/messages?beta=true", 405, {"detail": "Method Not Allowed"}),
        ("POST", "/reset_prefix_cache", 404, {"detail": "Not Found"}),
        ("GET", "/server_info", 404, {"detail": "Not Found"}),
        ("GET", COMPLETIONS, 405, {"detail": "Method Not Allowed"}),
        ("GET", "/version", 200, {"version": __version__}),
        ("GET", "/load", 200, {"server_load": 0}),
        ("GET", "/ready", 200, {"phase": "ready"}),
    ],
)
def test_small_routes(
    scripted: MakeServer, method: str, path: str, status: int, body: object
) -> None:
    """What is not there is so in Starlette's words, as with vLLM, and not in the envelope."""
    reply = scripted().client.request(method, path)
    assert (reply.status, reply.json) == (status, body)


def test_probes_have_no_body(scripted: MakeServer) -> None:
    """/health, and /ping with both methods."""
    client = scripted().client
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        reply = client.request(method, path)
        assert (reply.status, reply.body) == (200, b"")


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version", "/load", "/metrics"])
def test_head(scripted: MakeServer, path: str) -> None:
    """Scrapers ask with HEAD first."""
    client = scripted().client
    asked, got = client.request("HEAD", path), client.get(path)
    assert (asked.status, asked.body) == (got.status, b"")
    assert asked.headers["content-type"] == got.headers["content-type"] if got.body else True


def test_models(scripted: MakeServer) -> None:
    """A card for each name; a query string changes nothing."""
    client = scripted(served_model_name=["a", "b"]).client
    models = client.get("/v1/models?beta=true").json
    assert models["object"] == "list"
    assert [card["id"] for card in models["data"]] == ["a", "b"]
    assert {card["max_model_len"] for card in models["data"]} == {2048}


def test_server_info_is_for_developers(scripted: MakeServer) -> None:
    """And holds no key."""
    client = scripted(dev_mode=True, api_keys=["sk-secret"]).client
    reply = client.get("/server_info", headers={"Authorization": "Bearer sk-secret"})
    assert reply.json["config"]["model"] == "builtin"
    assert "sk-secret" not in reply.text and "api_key" not in reply.text


# --- request ids -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, SHORT),
        (COMPLETIONS, {**SHORT, "stream": True}),
        (COMPLETIONS, {**SHORT, "temperature": -1}),
        (COMPLETIONS, b"{"),
        ("/nosuch", SHORT),
        ("/v1/models", SHORT),
    ],
)
def test_every_answer_has_the_id(scripted: MakeServer, path: str, body: object) -> None:
    """The client's, or one of ours."""
    client = scripted().client
    reply = client.post(path, body, headers={"X-Request-Id": "my-id/1"})
    assert reply.headers["x-request-id"] == "my-id/1"
    if reply.status == 200:
        assert "cmpl-my-id/1" in reply.text
    assert re.fullmatch(r"[0-9a-f]{32}", client.post(path, body).headers["x-request-id"])


def test_ids_can_be_left_out(scripted: MakeServer) -> None:
    """As vLLM does unless it is told otherwise."""
    client = scripted(enable_request_id_headers=False).client
    reply = client.post(COMPLETIONS, SHORT, headers={"X-Request-Id": "mine"})
    assert "x-request-id" not in reply.headers and reply.json["id"] == "cmpl-mine"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Request-Id", "x" * 129),
        ("X-Request-Id", "a b"),
        ("X-Session-Id", "x" * 10_000),
        ("X-Session-Id", "sitzung-\xfc"),
        ("X-Request-Timeout", "soon"),
        ("X-Request-Timeout", "-1"),
        ("X-Request-Timeout", "nan"),
        ("X-Request-Timeout", "inf"),
        ("X-Vllm-Priority", "high"),
        ("X-Vllm-Priority", "9999999999"),
    ],
)
def test_headers_are_checked(scripted: MakeServer, name: str, value: str) -> None:
    """400 with the header as `param`."""
    reply = scripted().client.post(COMPLETIONS, SHORT, headers={name: value})
    assert reply.status == 400
    assert reply.json["error"]["param"] == name
    assert value not in reply.text or len(value) < 10


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_refusals_come_before_a_stream(scripted: MakeServer, stream: bool) -> None:
    """With their status and the envelope, also when a stream was asked for."""
    reply = scripted().client.post(COMPLETIONS, {**SHORT, "top_p": 2.0, "stream": stream})
    assert reply.status == 400 and reply.headers["content-type"] == "application/json"
    error = reply.json["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", "top_p", 400)


def test_only_json(scripted: MakeServer) -> None:
    """vLLM's answer is 400, not 415."""
    client = scripted().client
    body = json.dumps(SHORT).encode()
    for kind, status in (
        ("text/plain", 400),
        ("application/x-www-form-urlencoded", 400),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
    ):
        assert client.post(COMPLETIONS, body, headers={"Content-Type": kind}).status == status


def test_deadline(scripted: MakeServer) -> None:
    """504 when the answer is not complete in time; the row is free again."""
    server = scripted(executor={"before": Pace(decode=0.01)})
    headers = {"X-Request-Timeout": "0.2"}
    reply = server.client.post(COMPLETIONS, {**SHORT, "max_tokens": 2000}, headers=headers)
    assert reply.status == 504 and reply.json["error"]["code"] == 504
    wait_until(lambda: server.engine.stats().num_decoding == 0, "a free row")
    assert server.client.post(COMPLETIONS, SHORT, headers=headers).status == 200


def test_deadline_of_the_server(scripted: MakeServer) -> None:
    """For those who name none."""
    server = scripted(executor={"before": Pace(decode=0.01)}, request_timeout_s=0.2)
    body = {**SHORT, "max_tokens": 300}
    assert server.client.post(COMPLETIONS, body).status == 504
    headers = {"X-Request-Timeout": "60"}
    assert server.client.post(COMPLETIONS, body, headers=headers).status == 200


# --- life --------------------------------------------------------------------------------------


def test_before_the_engine_is_there(serve_app: ServeApp) -> None:
    """Alive but not ready; requests are told when to come back; metrics are there, at 0."""
    client, state = loading(serve_app)
    state.phase, state.progress = "loading", {"shard": 3, "shards": 16}
    assert client.get("/health").status == 200
    ready = client.get("/ready")
    assert ready.status == 503
    assert ready.json == {"phase": "loading", "progress": {"shard": 3, "shards": 16}}
    for reply in (client.post(COMPLETIONS, SHORT), client.get("/v1/models")):
        assert reply.status == 503 and int(reply.headers["retry-after"]) >= 1
        error = reply.json["error"]
        assert error["type"] == "ServiceUnavailableError" and "loading" in error["message"]
    assert client.get("/version").status == 200
    assert client.metric("vllm:num_requests_running") == 0


def test_failed(serve_app: ServeApp) -> None:
    """Not alive any more, so that somebody restarts it."""
    client, state = loading(serve_app)
    state.failed = "no memory"
    health = client.get("/health")
    assert (health.status, health.json["reason"]) == (503, "no memory")
    assert client.get("/ready").json["phase"] == "failed"
    assert client.post(COMPLETIONS, SHORT).status == 503


def test_engine_that_stopped(scripted: MakeServer) -> None:
    """Liveness looks at the engine, not only at this process."""
    server = scripted()
    server.engine.close()
    assert server.client.get("/health").status == 503
    assert server.client.get("/ready").status == 503
    reply = server.client.post(COMPLETIONS, SHORT)
    assert reply.status == 503 and int(reply.headers["retry-after"]) >= 1


def test_draining(scripted: MakeServer) -> None:
    """New requests are refused, the running stream comes to its end."""
    server = scripted(executor={"before": Pace(decode=0.01)})
    with server.client.open(COMPLETIONS, {**SHORT, "max_tokens": 50, "stream": True}) as stream:
        events = stream.events()
        next(events)
        server.state.draining = True
        ready = server.client.get("/ready")
        assert ready.status == 503
        assert ready.json == {"phase": "draining", "progress": {"open_requests": 1}}
        assert server.client.get("/health").status == 200
        refused = server.client.post(COMPLETIONS, SHORT)
        assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
        assert server.client.get("/load").json == {"server_load": 1}
        assert list(events)[-1] == "[DONE]"
    wait_until(lambda: server.state.num_open == 0, "no open request")


# --- browsers and documents --------------------------------------------------------------------


PREFLIGHT = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}


def test_no_cross_origin_calls(scripted: MakeServer) -> None:
    """Unless asked for."""
    client = scripted().client
    reply = client.post(COMPLETIONS, SHORT, headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in reply.headers
    assert client.request("OPTIONS", COMPLETIONS, headers=PREFLIGHT).status == 405


def test_cross_origin_calls(scripted: MakeServer) -> None:
    """A browser asks without a key; a refusal can be read by the page."""
    client = scripted(allowed_origins=["https://a.example"], api_keys=["k"]).client
    asked = client.request("OPTIONS", COMPLETIONS, headers=PREFLIGHT)
    assert asked.status == 200
    assert asked.headers["access-control-allow-origin"] == "https://a.example"
    refused = client.post(COMPLETIONS, SHORT, headers={"Origin": "https://a.example"})
    assert refused.status == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    other = client.post(COMPLETIONS, SHORT, headers={"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


def references(value: object) -> set[str]:
    """All that is referred to in a document."""
    if isinstance(value, dict):
        own = {str(value["$ref"])} if "$ref" in value else set()
        return own.union(*(references(item) for item in value.values()))
    if isinstance(value, list):
        return set().union(*(references(item) for item in value))
    return set()


def test_openapi(scripted: MakeServer) -> None:
    """Bodies, answers and refusals are described, and every reference leads somewhere."""
    document = scripted().client.get("/openapi.json").json
    for path, model in (
        (COMPLETIONS, "Completion"),
        (CHAT, "ChatCompletion"),
        ("/tokenize", "Tokenize"),
        ("/detokenize", "Detokenize"),
    ):
        operation = document["paths"][path]["post"]
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{model}Request"}
        answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
        assert answer == {"$ref": f"#/components/schemas/{model}Response"}
        assert {"400", "401", "404", "413", "429", "503"} <= operation["responses"].keys()
    schemas = document["components"]["schemas"]
    assert {"prompt", "max_tokens", "stream"} <= schemas["CompletionRequest"]["properties"].keys()
    assert references(document) <= {f"#/components/schemas/{name}" for name in schemas}


def test_documents_can_be_left_out(scripted: MakeServer) -> None:
    """All three of them."""
    client = scripted(disable_docs=True).client
    assert [client.get(p).status for p in ("/openapi.json", "/docs", "/redoc")] == [404] * 3


def test_prefix_of_a_proxy(scripted: MakeServer) -> None:
    """The document names the prefix; paths are found with and without it."""
    client = scripted(root_path="/llm").client
    assert client.get("/llm/version").status == client.get("/version").status == 200
    assert client.get("/openapi.json").json["servers"] == [{"url": "/llm"}]
