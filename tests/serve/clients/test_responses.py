"""`openai.responses`: the same package, the newer interface."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from ellm_serve.errors import EngineError
from ellm_serve.llm import LLM
from tests.serve.clients.answers import MAX_TOKENS, QUESTIONS, answer
from tests.serve.conftest import Server
from tests.serve.events import ARGUMENTS, CALL, SCHEMA, Served, served

GREEDY: dict[str, Any] = {"model": "builtin", "temperature": 0, "max_output_tokens": MAX_TOKENS}
ASK: dict[str, Any] = {"model": "qwen3-coder", "input": "How is the weather?"}
TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}]


@pytest.fixture(scope="module")
def service() -> Iterator[Served]:
    with served() as running:
        yield running


@pytest.fixture
def client(service: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{service.client.url}/v1", api_key="none", max_retries=0) as client:
        yield client


# --- the built-in model --------------------------------------------------------------------------


def test_answers_of_the_model(builtin_server: tuple[Server, LLM]) -> None:
    """Whole, streamed and asynchronous: the text is that of `LLM.chat`."""
    server, llm = builtin_server
    answers = [answer(llm, question) for question in QUESTIONS[:3]]
    expected = [one.text for one in answers]
    ends = ["incomplete" if one.finish_reason == "length" else "completed" for one in answers]
    base_url = f"{server.url}/v1"

    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
            asked = [client.responses.create(input=q, **GREEDY) for q in QUESTIONS[:3]]
            return [found.output_text for found in await asyncio.gather(*asked)]

    with OpenAI(base_url=base_url, api_key="none") as client:
        for question, text, end in zip(QUESTIONS, expected, ends, strict=False):
            found = client.responses.create(input=question, **GREEDY)
            assert (found.output_text, found.status) == (text, end)
            events = list(client.responses.create(input=question, stream=True, **GREEDY))
            pieces = [e.delta for e in events if e.type == "response.output_text.delta"]
            assert "".join(pieces) == text and len(pieces) > 1
            assert events[-1].type == f"response.{end}"
    assert asyncio.run(ask()) == expected


def test_going_on(builtin_server: tuple[Server, LLM]) -> None:
    """An answer's id stands for the conversation up to it, whose tokens are there already."""
    server, _ = builtin_server
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        first = client.responses.create(input=QUESTIONS[0], **GREEDY)
        second = client.responses.create(
            input=QUESTIONS[1], previous_response_id=first.id, **GREEDY
        )
        items: Any = [
            {"role": "user", "content": QUESTIONS[0]},
            *first.output,
            {"role": "user", "content": QUESTIONS[1]},
        ]
        again = client.responses.create(input=items, store=False, **GREEDY)
        assert second.output_text == again.output_text
        assert second.usage is not None and first.usage is not None
        assert second.usage.input_tokens > first.usage.total_tokens
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
        assert client.responses.retrieve(second.id).output_text == second.output_text


# --- tools and thoughts --------------------------------------------------------------------------


def test_a_call_and_its_result(service: Served, client: OpenAI) -> None:
    """Two turns of an agent that keeps the items itself, as coding agents do."""
    service.say(f"<think>Hm.</think>Let me check.\n{CALL}")
    first = client.responses.create(tools=TOOLS, store=False, **ASK)
    thought, message, call = first.output
    assert thought.type == "reasoning" and message.type == "message"
    assert first.output_text == "Let me check."
    assert call.type == "function_call" and json.loads(call.arguments) == ARGUMENTS
    items: Any = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": ASK["input"]},
        *first.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    service.say("Sunny.")
    second = client.responses.create(
        model="qwen3-coder",
        input=items,
        tools=TOOLS,
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="thread-1",
    )
    assert second.output_text == "Sunny." and second.status == "completed"


def test_a_streamed_call(service: Served, client: OpenAI) -> None:
    """The client's own accumulation agrees with the answer at the end."""
    service.say(f"<think>Hm.</think>Let me check.\n{CALL}")
    with client.responses.stream(tools=TOOLS, **ASK) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    thought, _, call = final.output
    assert thought.type == "reasoning" and thought.content is not None
    assert thought.content[0].text == "Hm." and final.output_text == "Let me check."
    assert call.type == "function_call" and json.loads(call.arguments) == ARGUMENTS
    for kind in (
        "response.reasoning_text.delta",
        "response.output_text.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
    ):
        assert kind in kinds


class Weather(BaseModel):
    """The form of an answer."""

    city: str
    days: int


def test_parsed() -> None:
    """A model of the client's is a schema here."""
    with served(reasoning_parser="none") as plain:
        plain.say('{"city": "SF", "days": 3}')
        with OpenAI(base_url=f"{plain.client.url}/v1", api_key="none") as client:
            response = client.responses.parse(text_format=Weather, **ASK)
    assert response.output_parsed == Weather(city="SF", days=3)


# --- refusals ------------------------------------------------------------------------------------


def test_refusals(client: OpenAI) -> None:
    """Each is the client's own error."""
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.responses.create(**{**ASK, "model": "nope"})
    with pytest.raises(openai.NotFoundError, match="resp_x"):
        client.responses.retrieve("resp_x")
    with pytest.raises(openai.NotFoundError, match="resp_x"):
        client.responses.create(previous_response_id="resp_x", **ASK)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.create(background=True, **ASK)


def test_cancelling(service: Served, client: OpenAI) -> None:
    """What is answered already cannot be called back."""
    service.say("Yes.")
    answer = client.responses.create(**ASK)
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        client.responses.cancel(answer.id)


def test_failure_after_the_start(service: Served, client: OpenAI) -> None:
    """The last event says why there is no answer."""
    service.say("one two three four five six")
    service.harness.script.gate.clear()
    stream = client.responses.create(stream=True, **ASK)
    service.harness.script.fail = EngineError("no luck")
    service.harness.script.gate.set()
    *_, last = stream
    assert last.type == "response.failed" and last.response.error is not None
    assert "engine failed" in last.response.error.message
