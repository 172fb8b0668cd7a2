"""Chat: roles and texts, whole and in pieces, and what a request may say about its prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ellm_serve.errors import InvalidRequest
from tests.serve.frames import Told, read
from tests.serve.scripted import IM_END, Harness, harness, run, tokenizer

TEXT = "Hello there, world. 世界 🙂 This is a test."
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def served() -> Iterator[Harness]:
    with harness() as scripted:
        yield scripted


def whole(served: Harness, **body: Any) -> Any:
    return run(served.chat(**body))


def streamed(served: Harness, **body: Any) -> Told:
    async def ask() -> Told:
        return await read(await served.chat(stream=True, **body))

    return run(ask())


@pytest.mark.parametrize(
    ("options", "text", "end"),
    [
        ({}, TEXT, ("stop", None)),
        ({"stop": "世界"}, "Hello there, world. ", ("stop", "世界")),
        ({"max_tokens": 3}, "Hell", ("length", None)),
        ({"max_tokens": 30, "max_completion_tokens": 3}, "Hell", ("length", None)),
        ({"stop_token_ids": [13]}, "Hello there, world", ("stop", 13)),
    ],
)
def test_text_and_end(
    served: Harness, options: dict[str, Any], text: str, end: tuple[str, object]
) -> None:
    """The same whole and in pieces."""
    served.say(TEXT, IM_END)
    (choice,) = whole(served, **options).choices
    assert choice.message.role == "assistant" and choice.message.content == text
    assert (choice.finish_reason, choice.stop_reason) == end
    told = streamed(served, **options)
    assert told.text() == text and told.ends() == [(0, *end)] and told.done


def test_an_empty_answer(served: Harness) -> None:
    """Has empty text and not none."""
    served.script.say([IM_END])
    assert whole(served).choices[0].message.content == ""
    told = streamed(served)
    assert [choice["delta"] for choice in told.choices] == [
        {"role": "assistant", "content": ""},
        {},
    ]


def test_roles_come_first_and_once(served: Harness) -> None:
    """One for each answer, before any text."""
    served.say(TEXT, IM_END)
    told = streamed(served, n=3, temperature=1.0)
    deltas = [choice["delta"] for choice in told.choices]
    assert deltas[:3] == [{"role": "assistant", "content": ""}] * 3
    assert [choice["index"] for choice in told.choices[:3]] == [0, 1, 2]
    assert all("role" not in delta for delta in deltas[3:])
    assert [told.text(index) for index in range(3)] == [TEXT] * 3
    assert sorted(told.ends()) == [(index, "stop", None) for index in range(3)]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in told.chunks}) == 1


def test_no_chunk_without_anything_in_it(served: Harness) -> None:
    """A piece of a character waits for the rest; its ids and log-probabilities come with it."""
    served.say("🙂🙂", IM_END)
    told = streamed(served, logprobs=True, top_logprobs=2, return_token_ids=True)
    content = told.choices[1:]
    assert all(choice["delta"].get("content") for choice in content[:-1])
    assert [token for choice in content for token in choice["token_ids"]] == [
        *tokenizer.encode("🙂🙂"),
        IM_END,
    ]
    entries = [entry for choice in content for entry in choice["logprobs"]["content"]]
    assert len(entries) == 9


def test_logprobs_have_true_bytes(served: Harness) -> None:
    """Together they are the message, although no single one is a character."""
    served.say("世🙂", IM_END)
    body = {"logprobs": True, "top_logprobs": 3}
    entries = whole(served, **body).choices[0].logprobs.content
    *said, end = entries
    data = bytes(byte for entry in said for byte in entry.bytes)
    assert data.decode() == "世🙂"
    assert [entry.token for entry in said] == ["\ufffd"] * len(said)
    assert (end.token, bytes(end.bytes)) == ("<|im_end|>", b"<|im_end|>")
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].bytes == entry.bytes
    told = [one["logprobs"]["content"] for one in streamed(served, **body).choices[1:]]
    assert [entry for piece in told for entry in piece] == [one.model_dump() for one in entries]


@pytest.mark.parametrize(("top", "count"), [(None, 0), (0, 0), (1, 1)])
def test_how_many_alternatives(served: Harness, top: int | None, count: int) -> None:
    """As many as asked for, the token itself among them."""
    served.say("Hi", IM_END)
    entries = whole(served, logprobs=True, top_logprobs=top).choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in entries] == [count] * 3


def test_prompt_logprobs(served: Harness) -> None:
    """One entry for each token of the prompt, none for the first."""
    served.say("Hi", IM_END)
    answer = whole(served, prompt_logprobs=2)
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens == 12
    assert answer.prompt_logprobs[0] is None
    assert all(len(entry) in (2, 3) for entry in answer.prompt_logprobs[1:])
    assert answer.prompt_logprobs[1][1878].decoded_token == "user"


# --- prompts -------------------------------------------------------------------------------------


def prompt_of(served: Harness, **body: Any) -> str:
    served.script.say([IM_END])
    return str(whole(served, return_prompt_text=True, **body).prompt_text)


def test_prompt_text_and_ids(served: Harness) -> None:
    """What the template made of the messages; in a stream it comes with the role."""
    served.script.say([IM_END])
    body = {"return_prompt_text": True, "return_token_ids": True}
    answer = whole(served, **body)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert answer.prompt_text == text
    assert answer.prompt_token_ids == tokenizer.encode(text, allow_special=True)
    first, *rest = streamed(served, **body).chunks
    assert (first["prompt_text"], first["prompt_token_ids"]) == (text, answer.prompt_token_ids)
    assert all("prompt_text" not in chunk for chunk in rest)


def test_to_continue_a_message(served: Harness) -> None:
    """The prompt ends within it; with echo the answer begins with it."""
    messages = [USER, {"role": "assistant", "content": "The capital is"}]
    body = {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
    }
    assert prompt_of(served, **body).endswith("<|im_start|>assistant\nThe capital is")
    served.say(" here", IM_END)
    assert whole(served, **body).choices[0].message.content == "The capital is here"
    told = streamed(served, **body)
    assert told.text() == "The capital is here"
    assert told.choices[1]["delta"] == {"content": "The capital is"}


def test_echo_of_another_role(served: Harness) -> None:
    """Is none: the answer is the assistant's."""
    served.say("Hello", IM_END)
    assert whole(served, echo=True).choices[0].message.content == "Hello"


def test_quoted_control_tokens_are_text(served: Harness) -> None:
    """A user who writes one does not end the turn."""
    messages = [{"role": "user", "content": "<|im_end|>"}]
    served.script.say([IM_END])
    ids = whole(served, messages=messages, return_token_ids=True).prompt_token_ids
    assert ids.count(IM_END) == 1


def test_an_agents_noise_is_left_out(served: Harness) -> None:
    """A block that changes with every request would keep the rest from being reused."""
    system = {
        "role": "system",
        "content": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1f3e"},
            {"type": "text", "text": "Be brief."},
        ],
    }
    text = prompt_of(served, messages=[system, USER])
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_template_variables(tmp_path: Path) -> None:
    """The server's, the request's over them, and what the reasoning effort means."""
    file = tmp_path / "template.jinja"
    file.write_text("{{ style }}|{{ enable_thinking }}|{{ messages[0].content }}", encoding="utf-8")
    defaults = {"style": "plain", "enable_thinking": True}
    with harness(chat_template=str(file), default_chat_template_kwargs=defaults) as served:
        assert prompt_of(served) == "plain|True|hi"
        assert prompt_of(served, chat_template_kwargs={"style": "rich"}) == "rich|True|hi"
        kwargs = {"enable_thinking": False}
        assert prompt_of(served, chat_template_kwargs=kwargs) == "plain|False|hi"


@pytest.mark.parametrize(
    "body",
    [{"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}],
)
def test_templates_of_requests(served: Harness, body: dict[str, Any]) -> None:
    """Are refused unless the server trusts them."""
    with pytest.raises(InvalidRequest, match="untrusted chat template"):
        run(served.chat(**body))
    with harness(trust_request_chat_template=True) as trusting:
        assert prompt_of(trusting, **body) == "1"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"messages": [{"role": "user", "content": "hello " * 3000}]},
            "at least 2049 input tokens",
        ),
        ({"messages": [{"role": "user", "content": "x" * 70_000}]}, "contains 70000 characters"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not a multimodal"),
        ({"messages": [{"role": "user", "content": [{"type": "what"}]}]}, "takes only text"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"max_tokens": 5000}, "cannot be greater than max_model_len"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_come_first(
    served: Harness, body: dict[str, Any], message: str, stream: bool
) -> None:
    """Before anything is generated, streamed or not."""
    with pytest.raises(Exception, match=message):
        run(served.chat(stream=stream, **body))


def test_a_long_conversation_can_be_cut(served: Harness) -> None:
    """If that is asked for, its end is kept."""
    served.script.say([IM_END])
    messages = [{"role": "user", "content": "hello " * 30_000}]
    answer = whole(served, messages=messages, truncate_prompt_tokens=8, return_token_ids=True)
    end = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", allow_special=True)
    assert len(answer.prompt_token_ids) == 8
    assert answer.prompt_token_ids[-len(end) :] == end
