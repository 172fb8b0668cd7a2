"""The `anthropic` package drives the service as it drives its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from ellm_serve.errors import EngineError
from ellm_serve.llm import LLM
from tests.serve.clients.answers import MAX_TOKENS, QUESTIONS, answered, user
from tests.serve.conftest import Server
from tests.serve.events import ARGUMENTS, CALL, SCHEMA, Served, served

KEY = "sekret"
# The package has no name for the temperature any more.
GREEDY: dict[str, Any] = {
    "model": "builtin",
    "max_tokens": MAX_TOKENS,
    "extra_body": {"temperature": 0},
}
ASK: dict[str, Any] = {
    "model": "qwen3-coder",
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "How is the weather?"}],
}
TOOLS: Any = [{"name": "get_weather", "description": "w", "input_schema": SCHEMA}]


@pytest.fixture(autouse=True)
def no_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a developer's shell may say about other servers."""
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def service() -> Iterator[Served]:
    """With a key, and a model that says what it is told."""
    with served(api_keys=[KEY]) as running:
        yield running


@pytest.fixture
def client(service: Served) -> Iterator[Anthropic]:
    """It sends its key as `x-api-key`."""
    with Anthropic(base_url=service.client.url, api_key=KEY, max_retries=0) as client:
        yield client


# --- the built-in model --------------------------------------------------------------------------


def test_answers_of_the_model(builtin_server: tuple[Server, LLM]) -> None:
    """Whole, streamed and asynchronous: the text is that of `LLM.chat`."""
    server, llm = builtin_server
    expected = [answered(llm, question) for question in QUESTIONS[:3]]
    conversations: list[Any] = [user(question) for question in QUESTIONS[:3]]

    async def ask() -> list[str]:
        async with AsyncAnthropic(base_url=server.url, api_key="none") as client:
            answers = [client.messages.create(messages=m, **GREEDY) for m in conversations]
            return [text_of(answer) for answer in await asyncio.gather(*answers)]

    with Anthropic(base_url=server.url, api_key="none") as client:
        for messages, text in zip(conversations, expected, strict=True):
            assert text_of(client.messages.create(messages=messages, **GREEDY)) == text
            with client.messages.stream(messages=messages, **GREEDY) as stream:
                assert "".join(stream.text_stream) == text
                assert text_of(stream.get_final_message()) == text
    assert asyncio.run(ask()) == expected


def text_of(message: Any) -> str:
    [block] = message.content
    assert block.type == "text"
    return str(block.text)


# --- tools and thoughts --------------------------------------------------------------------------


def test_a_call_and_its_result(service: Served, client: Anthropic) -> None:
    """Two turns of an agent, whole: the answer goes back as it came."""
    service.say(f"Let me check.\n{CALL}")
    first = client.messages.create(tools=TOOLS, **ASK)
    assert first.stop_reason == "tool_use"
    text, use = first.content
    assert text.type == "text" and text.text == "Let me check."
    assert use.type == "tool_use" and use.input == ARGUMENTS
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    service.say("Sunny.")
    second = client.messages.create(tools=TOOLS, **{**ASK, "messages": turns})
    assert text_of(second) == "Sunny." and second.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model="qwen3-coder", messages=turns, tools=TOOLS)
    usage = second.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_streamed_call(service: Served, client: Anthropic) -> None:
    """The client puts the pieces of the input together."""
    service.say(f"Let me check.\n{CALL}")
    with client.messages.stream(tools=TOOLS, **ASK) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    text, use = message.content
    assert text.type == "text" and text.text == "Let me check."
    assert use.type == "tool_use" and use.input == ARGUMENTS
    assert message.stop_reason == "tool_use"
    assert kinds.count("content_block_stop") == 2 and "input_json" in kinds


def test_a_thought(service: Served, client: Anthropic) -> None:
    """A block of its own, streamed or not; it may be sent back."""
    service.say("<think>I think so.</think>Yes.")
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    ask = {**ASK, "max_tokens": 1500, "thinking": thinking}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        thought, text = message.content
        assert thought.type == "thinking" and thought.thinking == "I think so."
        assert text.type == "text" and text.text == "Yes."
        assert thought.signature
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": streamed.content},
        {"role": "user", "content": "Sure?"},
    ]
    service.say("Sure.")
    assert text_of(client.messages.create(**{**ask, "messages": turns})) == "Sure."


def test_stop_sequences(service: Served, client: Anthropic) -> None:
    service.say("One, two, three")
    message = client.messages.create(stop_sequences=["two"], **ASK)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "two")
    with client.messages.stream(stop_sequences=["two"], **ASK) as stream:
        assert stream.get_final_message().stop_sequence == "two"


def test_beta(service: Served, client: Anthropic) -> None:
    """The same under the path that agents use, with what they send besides."""
    service.say("Yes.")
    message = client.beta.messages.create(
        betas=["context-management-2025-06-27"],
        context_management={"edits": []},
        thinking={"type": "adaptive"},
        system=[{"type": "text", "text": "Brief.", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "user_1_account__session_2"},
        **ASK,
    )
    assert text_of(message) == "Yes."


# --- refusals ------------------------------------------------------------------------------------


def test_refusals(service: Served, client: Anthropic) -> None:
    """Each is the client's own error, with the message that was sent."""
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**ASK, "model": "nope"})
    assert missing.value.type == "not_found_error" and "nope" in str(missing.value)
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(extra_body={"temperature": 7.0}, **ASK)
    assert bad.value.type == "invalid_request_error"
    with (
        Anthropic(base_url=service.client.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError) as locked,
    ):
        stranger.messages.create(**ASK)
    assert locked.value.type == "authentication_error"


def test_a_token_in_place_of_a_key(service: Served) -> None:
    """Agents behind a gateway send `Authorization`."""
    service.say("Yes.")
    with Anthropic(base_url=service.client.url, auth_token=KEY, max_retries=0) as client:
        assert text_of(client.messages.create(**ASK)) == "Yes."


def test_failure_after_the_start(service: Served, client: Anthropic) -> None:
    """The client raises instead of taking the part for the whole."""
    service.say("one two three four five six")
    service.harness.script.gate.clear()
    with client.messages.stream(**ASK) as stream:
        service.harness.script.fail = EngineError("no luck")
        service.harness.script.gate.set()
        with pytest.raises(anthropic.APIStatusError) as failed:
            stream.until_done()
    assert "engine failed" in str(failed.value)
