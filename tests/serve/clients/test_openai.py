"""The `openai` package drives the service as it drives any other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from ellm_serve.llm import LLM
from tests.serve.client import wait_until
from tests.serve.clients.answers import (
    MAX_TOKENS,
    PROMPTS,
    QUESTIONS,
    answered,
    generated,
    user,
)
from tests.serve.conftest import Gate, MakeServer, Pace, Server

GREEDY: dict[str, Any] = {"model": "builtin", "temperature": 0, "max_tokens": MAX_TOKENS}
# Probabilities are told as they were before penalties.
PLAIN = {"repetition_penalty": 1.0}
STREAM = {"prompt": "hello", "max_tokens": 2, "stream": True}


@pytest.fixture
def client(builtin_server: tuple[Server, LLM]) -> Iterator[OpenAI]:
    """Without a key of its own; the service has none either."""
    with made(builtin_server[0]) as client:
        yield client


@pytest.fixture
def llm(builtin_server: tuple[Server, LLM]) -> LLM:
    return builtin_server[1]


def made(server: Server, **options: Any) -> OpenAI:
    return OpenAI(
        **{"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0, **options}
    )


# --- answers ---------------------------------------------------------------------------------


def test_models(client: OpenAI) -> None:
    """One model, with the length of its context where vLLM has it."""
    [model] = client.models.list()
    assert model.id == "builtin"
    assert model.object == "model"
    assert model.model_extra is not None and model.model_extra["max_model_len"] == 2048


def test_completion(client: OpenAI, llm: LLM) -> None:
    """Greedy text and token counts are those of `LLM.generate`."""
    answer = client.completions.create(prompt=PROMPTS[0], **GREEDY)
    [choice] = answer.choices
    assert choice.text == generated(llm, PROMPTS[0])
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(llm.tokenizer.encode(PROMPTS[0]))
    assert answer.usage.completion_tokens == MAX_TOKENS
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + MAX_TOKENS


def test_completions_of_texts_and_tokens(client: OpenAI, llm: LLM) -> None:
    """A list of prompts, as strings and as token ids, is answered in its order."""
    expected = [generated(llm, prompt) for prompt in PROMPTS[:3]]
    for prompts in (PROMPTS[:3], [llm.tokenizer.encode(prompt) for prompt in PROMPTS[:3]]):
        answer = client.completions.create(prompt=prompts, **GREEDY)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_completion_stream(client: OpenAI, llm: LLM) -> None:
    """Piece by piece the same text, one reason to end, and the counts behind it."""
    chunks = list(
        client.completions.create(
            prompt=PROMPTS[0], stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == generated(llm, PROMPTS[0])
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert len(choices) > MAX_TOKENS // 2
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == MAX_TOKENS


def test_chat(client: OpenAI, llm: LLM) -> None:
    """Greedy text is that of `LLM.chat`."""
    for question in QUESTIONS[:3]:
        answer = client.chat.completions.create(messages=user(question), **GREEDY)
        message = answer.choices[0].message
        assert message.role == "assistant" and message.tool_calls is None
        assert message.content == answered(llm, question)


def test_chat_stream(client: OpenAI, llm: LLM) -> None:
    """The role comes first, the pieces make up the text, the counts come last."""
    chunks = list(
        client.chat.completions.create(
            messages=user(QUESTIONS[1]),
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant" and not deltas[0].content
    assert "".join(delta.content or "" for delta in deltas) == answered(llm, QUESTIONS[1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens > 0
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_clients_own_accumulator(client: OpenAI, llm: LLM) -> None:
    """It puts a stream together and insists on the form of every chunk."""
    with client.chat.completions.stream(messages=user(QUESTIONS[2]), **GREEDY) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == answered(llm, QUESTIONS[2])
    assert "".join(deltas) == final.choices[0].message.content
    assert final.choices[0].finish_reason in ("stop", "length")


def test_several_answers(client: OpenAI) -> None:
    """`n` gives as many, told apart by index; a seed gives the same ones again."""

    def ask(**options: Any) -> list[str | None]:
        answer = client.chat.completions.create(
            model="builtin",
            messages=user(QUESTIONS[4]),
            max_tokens=16,
            temperature=1.5,
            n=3,
            seed=7,
            **options,
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert len(set(first)) > 1
    assert ask() == first


def test_several_answers_in_one_stream(client: OpenAI) -> None:
    """They are mixed, and each ends once."""
    stream = client.completions.create(
        model="builtin", prompt=PROMPTS[0], max_tokens=8, n=3, seed=7, stream=True, temperature=1.0
    )
    texts, ends = ["", "", ""], []
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends += [choice.index] * (choice.finish_reason is not None)
    whole = client.completions.create(
        model="builtin", prompt=PROMPTS[0], max_tokens=8, n=3, seed=7, temperature=1.0
    )
    assert texts == [choice.text for choice in whole.choices]
    assert sorted(ends) == [0, 1, 2]


def test_completion_logprobs(client: OpenAI) -> None:
    """A token, its probability and its rivals for every piece of the text."""
    choice = client.completions.create(
        prompt=PROMPTS[0], logprobs=2, extra_body=PLAIN, **GREEDY
    ).choices[0]
    assert choice.logprobs is not None
    tokens, values = choice.logprobs.tokens, choice.logprobs.token_logprobs
    assert tokens is not None and values is not None and choice.logprobs.top_logprobs is not None
    assert "".join(tokens) == choice.text
    assert len(values) == len(choice.logprobs.top_logprobs) == MAX_TOKENS
    for token, value, rivals in zip(tokens, values, choice.logprobs.top_logprobs, strict=True):
        assert value is not None and value <= 0.0
        assert rivals[token] == value == max(rivals.values())


def test_chat_logprobs(client: OpenAI) -> None:
    """Greedy: what was said is what is most likely; its bytes are the text's."""
    choice = client.chat.completions.create(
        messages=user(QUESTIONS[1]), logprobs=True, top_logprobs=3, extra_body=PLAIN, **GREEDY
    ).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    said = b""
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert entry.top_logprobs[0].token == entry.token
        said += bytes(entry.bytes or [])
    assert choice.message.content is not None
    # The token that ended the answer is among them, and not in the text.
    assert said.startswith(choice.message.content.encode())


def test_stop(client: OpenAI, llm: LLM) -> None:
    """The text ends before the stop string, streamed or not."""
    whole = generated(llm, PROMPTS[0])
    stop = whole[len(whole) // 2 :][:4]
    expected = whole[: whole.index(stop)]
    answer = client.completions.create(prompt=PROMPTS[0], stop=["@@@", stop], **GREEDY)
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "stop"
    stream = client.completions.create(prompt=PROMPTS[0], stop=stop, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_fields_of_vllm(client: OpenAI, llm: LLM) -> None:
    """What OpenAI has no name for goes in `extra_body` and comes back as extra fields."""
    answer = client.completions.create(
        prompt=PROMPTS[0], extra_body={"return_token_ids": True, "ignore_eos": True}, **GREEDY
    )
    extra = answer.choices[0].model_extra
    assert extra is not None
    assert extra["prompt_token_ids"] == llm.tokenizer.encode(PROMPTS[0])
    assert llm.tokenizer.decode(extra["token_ids"]) == answer.choices[0].text


def test_request_id(client: OpenAI) -> None:
    """The client's own id names the answer and comes back; without one there is a new one."""
    raw = client.completions.with_raw_response.create(
        prompt=PROMPTS[0], extra_headers={"X-Request-Id": "mine-1"}, **GREEDY
    )
    assert raw.headers["x-request-id"] == raw.request_id == "mine-1"
    assert raw.parse().id == "cmpl-mine-1"
    answer = client.chat.completions.create(messages=user("Hello"), **GREEDY)
    assert answer._request_id not in (None, "", "mine-1")


# --- company ---------------------------------------------------------------------------------


def test_async(builtin_server: tuple[Server, LLM]) -> None:
    """The asynchronous client gets the same, whole and streamed."""
    server, llm = builtin_server

    async def ask() -> tuple[list[str], str | None, str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            models = [model.id async for model in client.models.list()]
            whole = await client.chat.completions.create(messages=user(QUESTIONS[0]), **GREEDY)
            stream = await client.completions.create(prompt=PROMPTS[1], stream=True, **GREEDY)
            text = "".join([chunk.choices[0].text async for chunk in stream])
            return models, whole.choices[0].message.content, text

    expected = (["builtin"], answered(llm, QUESTIONS[0]), generated(llm, PROMPTS[1]))
    assert asyncio.run(ask()) == expected


def test_eight_clients_at_once(builtin_server: tuple[Server, LLM]) -> None:
    """Each gets the text it gets alone: chats and completions, streamed and whole."""
    server, llm = builtin_server
    meeting = threading.Barrier(len(PROMPTS))

    def ask(index: int) -> str:
        with made(server) as client:
            meeting.wait(30)
            if index % 2:
                answer = client.chat.completions.create(messages=user(QUESTIONS[index]), **GREEDY)
                return answer.choices[0].message.content or ""
            stream = client.completions.create(prompt=PROMPTS[index], stream=True, **GREEDY)
            return "".join(chunk.choices[0].text for chunk in stream)

    expected = [
        answered(llm, QUESTIONS[index]) if index % 2 else generated(llm, PROMPTS[index])
        for index in range(len(PROMPTS))
    ]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for _ in range(2):
            assert list(pool.map(ask, range(len(PROMPTS)))) == expected


def test_eight_asynchronous_streams(builtin_server: tuple[Server, LLM]) -> None:
    """One client, eight streams, none mixed up with another."""
    server, llm = builtin_server

    async def ask(client: AsyncOpenAI, question: str) -> str:
        stream = await client.chat.completions.create(
            messages=user(question), stream=True, **GREEDY
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, question) for question in QUESTIONS))

    expected = [answered(llm, question) for question in QUESTIONS]
    assert asyncio.run(ask_all()) == expected


def test_leaving_a_stream(scripted: MakeServer) -> None:
    """Closing it half-way ends the generation behind it."""
    server = scripted(executor={"before": Pace(decode=0.01)})
    with (
        made(server) as client,
        client.completions.create(
            model="builtin", prompt="hello", max_tokens=2000, stream=True
        ) as stream,
    ):
        assert next(iter(stream)).choices[0].text
    wait_until(lambda: server.engine.stats().num_decoding == 0, "the row to be free")
    assert server.engine.stats().steps.num_output_tokens < 1000


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"prompt": "x " * 4000}, "input_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"n": "two"}, "body.n"),
        ({"temperature": 3, "stream": True}, "temperature"),
    ],
)
def test_bad_request(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    """The error tells the field, also when a stream was asked for."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{**GREEDY, "prompt": "hello"} | fields)
    assert caught.value.param == param
    assert caught.value.status_code == 400
    assert caught.value.request_id


def test_model_not_found(client: OpenAI) -> None:
    """The error names what there is."""
    with pytest.raises(openai.NotFoundError, match="builtin") as caught:
        client.chat.completions.create(model="gpt-4", messages=user("Hello"))
    assert caught.value.param == "model"


def test_keys(scripted: MakeServer) -> None:
    """With the key as without keys; any other is refused."""
    server = scripted(api_keys=["secret"])
    with made(server) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with pytest.raises(openai.AuthenticationError):
            stranger.completions.create(model="builtin", prompt="hello")
    with made(server, api_key="secret") as client:
        assert client.completions.create(model="builtin", prompt="hello").choices[0].text


def test_overload(scripted: MakeServer) -> None:
    """A full queue is a RateLimitError that says when to come back; a patient client does."""
    gate = Gate("prefill")
    server = scripted(executor={"before": gate}, engine={"max_queued_requests": 1})
    ask: dict[str, Any] = {"model": "builtin", "prompt": "hello", "max_tokens": 2}
    with ExitStack() as stack:
        streams = [stack.enter_context(server.client.open("/v1/completions", STREAM))]
        stack.callback(gate.open)
        assert gate.reached.wait(30)
        streams += [stack.enter_context(server.client.open("/v1/completions", STREAM))]
        wait_until(lambda: server.engine.stats().num_waiting == 1, "one in the queue")
        with made(server) as hasty, pytest.raises(openai.RateLimitError) as caught:
            hasty.completions.create(**ask)
        assert caught.value.code == "server_overloaded"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        patient = stack.enter_context(made(server, max_retries=2))
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(patient.completions.create, **ask)
            wait_until(
                lambda: (
                    server.client.metric(
                        "vllm:admission_rejections_total", reason="max_num_queued_reqs"
                    )
                    == 2
                ),
                "the second refusal",
            )
            gate.open()
            assert answer.result(60).choices[0].text
        for stream in streams:
            assert list(stream.events())[-1] == "[DONE]"
    assert server.client.metric("ellm:client_retries_total") >= 1


def test_draining(scripted: MakeServer) -> None:
    """A service that is about to go says 503, which the client takes for a server's error."""
    server = scripted()
    server.state.draining = True
    with made(server) as client, pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="builtin", messages=user("Hello"))
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1
