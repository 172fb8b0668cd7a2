"""LangChain's `ChatOpenAI` drives the service as it drives any other."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from ellm_serve.llm import LLM
from tests.serve.clients.answers import MAX_TOKENS, QUESTIONS, answer, answered, greedy
from tests.serve.conftest import Server


@pytest.fixture
def llm(builtin_server: tuple[Server, LLM]) -> LLM:
    return builtin_server[1]


def made(server: Server, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        **{
            "base_url": f"{server.url}/v1",
            "api_key": SecretStr("none"),
            "model": "builtin",
            "temperature": 0.0,
            "max_tokens": MAX_TOKENS,
            "max_retries": 0,
            **options,
        }
    )


@pytest.fixture
def chat(builtin_server: tuple[Server, LLM]) -> ChatOpenAI:
    return made(builtin_server[0])


def test_invoke(chat: ChatOpenAI, llm: LLM) -> None:
    """The text of `LLM.chat`, with counts and the reason why it ended."""
    message = chat.invoke(QUESTIONS[1])
    assert isinstance(message, AIMessage)
    expected = answer(llm, QUESTIONS[1])
    assert message.content == expected.text
    assert message.response_metadata["finish_reason"] == expected.finish_reason.value
    assert message.response_metadata["model_name"] == "builtin"
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] == expected.usage.num_output_tokens


def test_conversation(chat: ChatOpenAI, llm: LLM) -> None:
    """Messages of every role arrive as such."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTIONS[0]},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": QUESTIONS[2]},
    ]
    message = chat.invoke(
        [
            SystemMessage("Be brief."),
            HumanMessage(QUESTIONS[0]),
            AIMessage("Hi."),
            HumanMessage([{"type": "text", "text": QUESTIONS[2]}]),
        ]
    )
    assert message.content == llm.chat(messages, greedy(llm)).text


def test_stream(chat: ChatOpenAI, llm: LLM) -> None:
    """Pieces add up to the same message."""
    pieces = list(chat.stream(QUESTIONS[2], stream_usage=True))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert isinstance(whole, AIMessageChunk)
    assert len(pieces) > 4
    assert whole.content == answered(llm, QUESTIONS[2])
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 0


def test_async(chat: ChatOpenAI, llm: LLM) -> None:
    """Whole and streamed."""

    async def ask() -> tuple[object, str]:
        whole = await chat.ainvoke(QUESTIONS[0])
        pieces = [str(piece.content) async for piece in chat.astream(QUESTIONS[3])]
        return whole.content, "".join(pieces)

    assert asyncio.run(ask()) == (answered(llm, QUESTIONS[0]), answered(llm, QUESTIONS[3]))


def test_batch(chat: ChatOpenAI, llm: LLM) -> None:
    """Eight at once: each gets the text it gets alone."""
    messages = chat.batch(list(QUESTIONS), {"max_concurrency": len(QUESTIONS)})
    assert [message.content for message in messages] == [
        answered(llm, question) for question in QUESTIONS
    ]


def test_chain_with_stop(chat: ChatOpenAI, llm: LLM) -> None:
    """A prompt template and a bound stop string."""
    whole = answered(llm, QUESTIONS[1])
    stop = whole[len(whole) // 2 :][:3]
    chain = ChatPromptTemplate.from_messages([("user", "{question}")]) | chat.bind(stop=[stop])
    assert chain.invoke({"question": QUESTIONS[1]}).content == whole[: whole.index(stop)]


def test_logprobs(builtin_server: tuple[Server, LLM]) -> None:
    """They come through in the message's metadata."""
    message = made(builtin_server[0], logprobs=True, top_logprobs=2).invoke(QUESTIONS[4])
    content = message.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == message.content
    assert len(content) == MAX_TOKENS
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


def test_refusals(builtin_server: tuple[Server, LLM]) -> None:
    """They are the errors of the `openai` package, with the service's own words."""
    server, _ = builtin_server
    with pytest.raises(openai.BadRequestError, match="temperature must be in"):
        made(server, temperature=3.0).invoke("Hello")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
        list(made(server).stream("word " * 4000))
    with pytest.raises(openai.NotFoundError, match="`gpt-4` does not exist"):
        made(server, model="gpt-4").invoke("Hello")
