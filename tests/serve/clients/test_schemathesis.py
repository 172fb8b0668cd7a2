"""Requests made up from our own OpenAPI document: nothing that is sent is answered with a 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.config import (
    GenerationConfig,
    ProjectConfig,
    ProjectsConfig,
    SchemathesisConfig,
)
from schemathesis.specs.openapi.checks import response_schema_conformance

from ellm_serve.config import ServeConfig
from ellm_serve.llm import LLM
from ellm_serve.metrics import Metrics
from ellm_serve.serve.context import AppState
from ellm_serve.serve.http import create_app
from ellm_serve.serve.service import Service
from tests.serve.conftest import BUILTIN, serving

# When an example fails, it is shown in full.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Generating overly large repr:hypothesis.errors.HypothesisWarning"
)

# One short context: an answer is short, however many tokens are asked for.
CONFIG = ServeConfig.from_options(model="builtin", sequence_length=64, batch_size=4)
# Made-up requests per operation, besides those that try the edges of each field.
EXAMPLES = 40
TIMEOUT_S = 60
# Empty or plain text, of which the document says nothing.
WITHOUT_SCHEMA = ("/health", "/ping", "/metrics")
# Answered as they are; test cases add one field to them.
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def f(", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4},
    "/v1/messages": {
        "model": "builtin",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
    },
    "/v1/messages/count_tokens": {
        "model": "builtin",
        "messages": [{"role": "user", "content": "Hi"}],
    },
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [718]},
}
# Streams, and what is in the last event of each.
STREAMS = {
    "/v1/completions": "data: [DONE]",
    "/v1/chat/completions": "data: [DONE]",
    "/v1/responses": "event: response.",
    "/v1/messages": "event: message_stop",
}


def document() -> Any:
    """The same requests every time, valid ones and others."""
    app = create_app(AppState(Metrics(CONFIG.names[0])), CONFIG)
    generation = GenerationConfig(max_examples=EXAMPLES, deterministic=True, no_shrink=True)
    projects = ProjectsConfig(default=ProjectConfig(generation=generation))
    return schemathesis.openapi.from_dict(
        app.openapi(), config=SchemathesisConfig(projects=projects)
    )


DOCUMENT = document()
SCHEMAS = DOCUMENT.raw_schema["components"]["schemas"]
KNOWN = {name for schema in SCHEMAS.values() for name in schema.get("properties", ())}


@pytest.fixture(scope="module")
def service(compiled_kernels: None) -> Iterator[tuple[str, LLM]]:
    """Where the service is, and what is behind it."""
    with LLM("builtin", sequence_length=64, batch_size=4) as llm:
        state = AppState(Metrics(CONFIG.names[0]))
        state.service = Service.create(llm.engine, BUILTIN, CONFIG, state.metrics)
        with serving(create_app(state, CONFIG)) as url:
            yield url, llm


@pytest.fixture(scope="module")
def tried() -> set[str]:
    """Fields that have been sent, with their values."""
    return set()


@DOCUMENT.parametrize()
def test_no_server_error(case: schemathesis.Case, service: tuple[str, LLM]) -> None:
    """Whole requests, valid and not; an answer has the form that the document gives it."""
    checks = [not_a_server_error]
    if case.path not in WITHOUT_SCHEMA:
        checks.append(response_schema_conformance)
    with requests.Session() as session:
        response = case.call(base_url=service[0], session=session, timeout=TIMEOUT_S)
        case.validate_response(response, checks=checks)


@DOCUMENT.include(path=list(PLAIN), method="POST").parametrize()
def test_every_field_alone(
    case: schemathesis.Case, service: tuple[str, LLM], tried: set[str]
) -> None:
    """A request that is made up whole fails at its first bad field; here each field has its turn,
    in a request that is fine without it."""
    if not isinstance(case.body, dict):
        return
    for name, value in case.body.items():
        key = json.dumps([case.path, name, value])
        if name not in KNOWN or key in tried:
            continue
        # About every other one is streamed: refusals are to come before the stream.
        streamed = {"stream": True} if case.path in STREAMS and len(key) % 2 else {}
        send(service[0], case.path, {**PLAIN[case.path], **streamed, name: value})
        tried.add(key)


def send(url: str, path: str, body: dict[str, Any]) -> None:
    """Reads the answer to its end: it is one, or a refusal that says why."""
    with requests.post(url + path, json=body, timeout=TIMEOUT_S) as response:
        assert response.status_code < 500, f"{response.status_code} {response.text} for {body}"
        assert "InternalServerError" not in response.text, f"{response.text} for {body}"
        if response.status_code >= 400:
            assert response.json()["error"]["message"]
        elif response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.split("\n\n")[-2].startswith(STREAMS[path])


def test_it_lives(service: tuple[str, LLM]) -> None:
    """After all that the engine answers as before."""
    url, llm = service
    body = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}
    text = requests.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S).json()
    sampling = llm.sampling(max_tokens=8, temperature=0.0)
    assert text["choices"][0]["text"] == llm.generate("def f(", sampling)[0].text
    stats = llm.engine.stats()
    assert (stats.num_waiting, stats.num_prefilling, stats.num_decoding) == (0, 0, 0)
