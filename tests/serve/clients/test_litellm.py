"""LiteLLM drives the service through its `hosted_vllm` provider."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from ellm_serve.llm import LLM
from tests.serve.client import wait_until
from tests.serve.clients.answers import (
    MAX_TOKENS,
    PROMPTS,
    QUESTIONS,
    answer,
    answered,
    generated,
    user,
)
from tests.serve.clients.conftest import Fence
from tests.serve.conftest import Gate, MakeServer, Server

pytestmark = [
    # Its own types and its use of pydantic, in the first stream.
    pytest.mark.filterwarnings("ignore:Item '.*' on TypedDict class 'ChatCompletion:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:Accessing the 'model_(computed_)?fields' attribute:DeprecationWarning"
    ),
]

STREAM = {"prompt": "hello", "max_tokens": 2, "stream": True}


@pytest.fixture(scope="module")
def litellm(offline: Fence) -> Any:
    """The package, imported when its switches are set: it would fetch a list of prices."""
    import litellm

    return litellm


@pytest.fixture
def llm(builtin_server: tuple[Server, LLM]) -> LLM:
    return builtin_server[1]


def to(server: Server, **options: Any) -> dict[str, Any]:
    """Arguments of every call."""
    return {
        "model": "hosted_vllm/builtin",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "max_retries": 0,
        **options,
    }


@pytest.fixture
def target(builtin_server: tuple[Server, LLM]) -> dict[str, Any]:
    return to(builtin_server[0])


def test_completion(litellm: Any, target: dict[str, Any], llm: LLM) -> None:
    """The text of `LLM.chat`, with its counts."""
    reply = litellm.completion(messages=user(QUESTIONS[1]), **target)
    expected = answer(llm, QUESTIONS[1])
    assert reply.choices[0].message.content == expected.text
    assert reply.choices[0].finish_reason == expected.finish_reason.value
    assert reply.usage.completion_tokens == expected.usage.num_output_tokens


def test_stream(litellm: Any, target: dict[str, Any], llm: LLM) -> None:
    """Pieces add up to the same text; counts come last."""
    chunks = list(
        litellm.completion(
            messages=user(QUESTIONS[2]),
            stream=True,
            stream_options={"include_usage": True},
            **target,
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answered(llm, QUESTIONS[2])
    assert chunks[-1].usage.completion_tokens > 0
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt.choices[0].message.content == text


def test_async(litellm: Any, target: dict[str, Any], llm: LLM) -> None:
    """Eight at once, half of them streamed: each gets the text it gets alone."""

    async def ask(index: int) -> str:
        messages = user(QUESTIONS[index])
        if index % 2:
            reply = await litellm.acompletion(messages=messages, **target)
            return str(reply.choices[0].message.content)
        stream = await litellm.acompletion(messages=messages, stream=True, **target)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        return await asyncio.gather(*(ask(index) for index in range(len(QUESTIONS))))

    assert asyncio.run(ask_all()) == [answered(llm, question) for question in QUESTIONS]


def test_text_completion(litellm: Any, target: dict[str, Any], llm: LLM) -> None:
    """The endpoint of plain texts."""
    reply = litellm.text_completion(prompt=PROMPTS[0], **target)
    assert reply.choices[0].text == generated(llm, PROMPTS[0])


def test_threads(litellm: Any, target: dict[str, Any], llm: LLM) -> None:
    """Eight threads at once."""

    def ask(question: str) -> str:
        reply = litellm.completion(messages=user(question), **target)
        return str(reply.choices[0].message.content)

    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        answers = list(pool.map(ask, QUESTIONS))
    assert answers == [answered(llm, question) for question in QUESTIONS]


@pytest.mark.parametrize("stream", [False, True])
def test_context_window(litellm: Any, target: dict[str, Any], stream: bool) -> None:
    """A prompt that is too long is known as such: routers look for a model with more room."""
    with pytest.raises(litellm.ContextWindowExceededError, match="2048 tokens"):
        litellm.completion(messages=user("word " * 4000), stream=stream, **target)


def test_refusals(litellm: Any, target: dict[str, Any]) -> None:
    """Each is LiteLLM's own kind of error."""
    with pytest.raises(litellm.BadRequestError, match="temperature must be in"):
        litellm.completion(messages=user("Hello"), **target | {"temperature": 3})
    with pytest.raises(litellm.NotFoundError, match="`gpt-4` does not exist"):
        litellm.completion(messages=user("Hello"), **target | {"model": "hosted_vllm/gpt-4"})


def test_key(litellm: Any, scripted: MakeServer) -> None:
    """Without the key the error says so."""
    server = scripted(api_keys=["secret"])
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=user("Hello"), **to(server))
    reply = litellm.completion(messages=user("Hello"), **to(server, api_key="secret"))
    assert reply.choices[0].message.content


def test_overload(litellm: Any, scripted: MakeServer) -> None:
    """A full queue is a RateLimitError, which routers wait for as long as we say."""
    gate = Gate("prefill")
    server = scripted(executor={"before": gate}, engine={"max_queued_requests": 1})
    with ExitStack() as stack:
        stack.enter_context(server.client.open("/v1/completions", STREAM))
        stack.callback(gate.open)
        assert gate.reached.wait(30)
        stack.enter_context(server.client.open("/v1/completions", STREAM))
        wait_until(lambda: server.engine.stats().num_waiting == 1, "one in the queue")
        with pytest.raises(litellm.RateLimitError) as caught:
            litellm.completion(messages=user("Hello"), **to(server))
    assert int(caught.value.litellm_response_headers["retry-after"]) >= 1
