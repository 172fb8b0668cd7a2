"""The built-in model over HTTP, with forms: what it could not do by itself."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from ellm_serve.llm import LLM
from tests.serve.conftest import Server
from tests.serve.test_structured import FORMAT, SCHEMA
from tests.serve.test_tools import NAMED, PARAMETERS, TOOLS

MESSAGES = [{"role": "user", "content": "How warm will it be in Paris?"}]


def ask(server: Server, **body: Any) -> Any:
    body = {"messages": MESSAGES, "max_tokens": 120, "temperature": 1.0} | body
    reply = server.client.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.text
    return reply.json["choices"][0]


@pytest.mark.parametrize("seed", range(4))
def test_json_by_schema(builtin_server: tuple[Server, LLM], seed: int) -> None:
    """Every answer that ends is valid."""
    server, _ = builtin_server
    choice = ask(server, response_format=FORMAT, seed=seed)
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_demanded_calls(builtin_server: tuple[Server, LLM], seed: int, choice: Any) -> None:
    """Of a declared tool, with arguments of its schema if they were not cut off."""
    server, _ = builtin_server
    got = ask(server, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, seed=seed)
    assert got["message"]["content"] == ""
    (call,) = got["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    if got["finish_reason"] != "length" and call["function"]["name"] == "get_weather":
        jsonschema.validate(arguments, PARAMETERS)


def test_free_choice(builtin_server: tuple[Server, LLM]) -> None:
    """The model's dialect is found by its template; what it says is up to the model."""
    server, _ = builtin_server
    got = ask(server, tools=TOOLS, temperature=0.0)
    message = got["message"]
    assert message["content"] or message["tool_calls"]
