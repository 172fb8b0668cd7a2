"""Request bodies: what is accepted, refused or ignored beyond what the recording shows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ellm_serve.errors import InvalidBody, InvalidRequest, RequestError
from ellm_serve.protocol.chat import ChatCompletionRequest
from ellm_serve.protocol.completion import CompletionRequest
from ellm_serve.protocol.fields import IGNORED, REFUSED
from ellm_serve.protocol.tokenize import TokenizeChatRequest, TokenizeCompletionRequest
from ellm_serve.protocol.validation import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, parse_request

USER = [{"role": "user", "content": "hi"}]
TOOL = {"function": {"name": "add", "parameters": {"b": 1, "a": 2}, "strict": True}}


def completion(**fields: Any) -> CompletionRequest:
    """A completion request as it comes off the wire."""
    return parse_request(COMPLETION, json.dumps({"prompt": "x"} | fields).encode())


def chat(**fields: Any) -> ChatCompletionRequest:
    """A chat request as it comes off the wire."""
    return parse_request(CHAT, json.dumps({"messages": USER} | fields).encode())


# --- fields without effect -----------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_refused_fields(name: str) -> None:
    """Declared in a model, refused by name when they ask for something, neutral values pass."""
    models = [
        model for model in (CompletionRequest, ChatCompletionRequest) if name in model.model_fields
    ]
    assert models
    for model in models:
        body: dict[str, Any] = {"prompt": "x", "messages": USER}
        # A switch takes only true; the others take anything.
        value = True if model.model_fields[name].annotation is bool else {"a": 1}
        with pytest.raises(InvalidRequest) as caught:
            model.model_validate(body | {name: value})
        assert caught.value.param == name
        assert REFUSED[name] in caught.value.message
        neutral = False if model.model_fields[name].annotation is bool else None
        model.model_validate(body | {name: neutral})


@pytest.mark.parametrize("name", IGNORED)
def test_ignored_fields(name: str) -> None:
    """Real clients send them with every request."""
    values = {
        "include_reasoning": False,
        "length_penalty": 0.5,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "spaces_between_special_tokens": False,
        "store": True,
        "vllm_xargs": {"a": [1]},
    }
    value = values.get(name, "x")
    completion(**{name: value})
    chat(**{name: value})
    assert name not in REFUSED


def test_unknown_fields() -> None:
    """Ignored, whatever they hold."""
    assert completion(frobnicate={"deep": [None]}).prompt == "x"
    assert chat(frobnicate=float("nan")).message_dicts() == USER


# --- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([0], [[0]]),
    ],
)
def test_forms_of_a_prompt(prompt: object, prompts: object) -> None:
    """One or several, text or ids."""
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", ["", [""], [[]], ["a", ""], [[1], []], None])
def test_empty_prompts(prompt: object) -> None:
    """There is no begin token that could stand in for them."""
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", [[1, "a"], ["a", 1], [[1], "a"], [[1], 2], [1.5], [[[1]]], 5])
def test_mixed_prompts(prompt: object) -> None:
    """Neither one form nor another."""
    with pytest.raises(InvalidBody) as caught:
        completion(prompt=prompt)
    assert (caught.value.param or "").startswith("body.prompt")


# --- chat ----------------------------------------------------------------------------------------


def test_messages_arrive_as_sent() -> None:
    """Keys that were not sent stay away, nulls and unknown keys stay."""
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, "b"]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "x": [1]}]},
        {"role": "tool", "content": "11", "tool_call_id": "c", "cache_control": {"a": None}},
    ]
    assert chat(messages=messages).message_dicts() == messages


def test_deep_values_pass_through() -> None:
    """How deep a template's values may be is decided where they are rendered."""
    deep: list[object] = []
    for _ in range(500):
        deep = [deep]
    messages = [{"role": "user", "content": [{"type": "text", "x": deep}], "y": deep}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": deep}}}]
    request = chat(messages=messages, tools=tools, tool_choice="none")
    assert request.message_dicts() == messages
    assert request.tool_dicts() == tools


@pytest.mark.parametrize("messages", ["hi", [], [5], [{"content": "x"}], [{"role": 1}], None])
def test_bad_messages(messages: object) -> None:
    """Refused with a place, in the schema's words or vLLM's own."""
    with pytest.raises(RequestError) as caught:
        chat(messages=messages)
    assert caught.value.status == 400
    assert caught.value.param is None or caught.value.param.startswith("body.messages")


def test_tools_for_the_template() -> None:
    """With tool_choice none the tools reach the template as they were sent, `type` added."""
    request = chat(tools=[TOOL], tool_choice="none")
    assert request.tool_dicts() == [{"type": "function"} | TOOL]
    assert json.dumps(request.tool_dicts()).index('"b"') < json.dumps(request.tool_dicts()).index(
        '"a"'
    )
    assert chat().tool_dicts() is None


NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        ({}, "auto"),
        ({"tool_choice": None}, "auto"),
        ({"tool_choice": "auto"}, "auto"),
        ({"tool_choice": "none"}, "none"),
        ({"tool_choice": "required"}, "required"),
    ],
)
def test_choices_of_tools(fields: dict[str, str | None], chosen: str) -> None:
    """Tools without a choice mean auto."""
    request = chat(tools=[TOOL], **fields)
    assert request.chosen_tools == chosen
    assert request.named_tool is None


def test_a_named_tool() -> None:
    """Is told apart from the other choices."""
    assert chat(tools=[TOOL], tool_choice=NAMED).named_tool == "add"
    assert chat().chosen_tools == "none"


def test_no_tools_and_no_choice() -> None:
    """What SDKs send with every request."""
    assert chat(tool_choice="none").tools is None
    assert chat(tool_choice=None, tools=None).tools is None


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        ({"type": "function", "function": "add"}, "tool_choice.function"),
        (5, "tool_choice"),
        (["auto"], "tool_choice"),
        ("x" * 10_000, "tool_choice"),
    ],
)
def test_bad_tool_choices(choice: object, param: str) -> None:
    """Each with its own text, and no long value comes back."""
    with pytest.raises(InvalidRequest) as caught:
        chat(tools=[TOOL], tool_choice=choice)
    assert caught.value.param == param
    assert len(caught.value.message) < 500


def test_variables_of_the_template() -> None:
    """The request's before the server's; effort decides on thinking unless told otherwise."""
    server = {"enable_thinking": False, "style": "x"}
    assert chat().template_variables(server) == server
    request = chat(chat_template_kwargs={"style": "y"}, documents=[{"text": "d"}])
    assert request.template_variables(server) == {
        "enable_thinking": False,
        "style": "y",
        "documents": [{"text": "d"}],
    }
    low = {"reasoning_effort": "low", "enable_thinking": True}
    assert chat(reasoning_effort="low").template_variables({}) == low
    none = chat(reasoning_effort="none").template_variables({})
    assert none == {"reasoning_effort": "none", "enable_thinking": False}
    kept = chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert kept.template_variables({})["enable_thinking"] is True


def test_end_of_the_prompt() -> None:
    """Both flags in one body contradict each other; continuing alone wins over the default."""
    assert chat().opens_answer()
    assert not chat(add_generation_prompt=False).opens_answer()
    assert not chat(continue_final_message=True).opens_answer()
    with pytest.raises(InvalidRequest, match="Cannot set both"):
        chat(continue_final_message=True, add_generation_prompt=True)


def test_templates_of_the_request() -> None:
    """Also through the template's variables."""
    for fields in (
        {"chat_template": ""},
        {"chat_template": "x"},
        {"chat_template_kwargs": {"chat_template": "x"}},
    ):
        with pytest.raises(InvalidRequest, match="untrusted chat template"):
            chat(**fields).refuse_untrusted_template()
    chat(chat_template_kwargs={"x": 1}).refuse_untrusted_template()


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "video_url"])
def test_media(kind: str) -> None:
    """In any message; text parts pass."""
    parts = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "x"}}]
    request = chat(messages=[*USER, {"role": "user", "content": parts}])
    with pytest.raises(InvalidRequest, match="^m is not a multimodal model$"):
        request.refuse_media("m")
    chat(messages=[{"role": "user", "content": parts[:1]}]).refuse_media("m")


# --- identifiers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"request_id": "a b"},
        {"request_id": "a\r\nX-Evil: 1"},
        {"request_id": "é"},
        {"request_id": "x" * 257},
        {"session_id": "x" * 257},
        {"session_id": 5},
        {"priority": 1 << 63},
        {"truncate_prompt_tokens": -2},
        {"truncation_side": "middle"},
    ],
)
def test_identifiers_and_small_fields(fields: dict[str, Any]) -> None:
    """What ends in headers, logs and tables is short and printable."""
    with pytest.raises(InvalidBody) as caught:
        chat(**fields)
    assert caught.value.param == f"body.{next(iter(fields))}"


@pytest.mark.parametrize("salt", ["a@b", "a\\b", "a\0b", "x" * 129, "", 5])
def test_salts(salt: object) -> None:
    """They join a key, so they cannot hold its separators."""
    with pytest.raises(InvalidRequest) as caught:
        chat(cache_salt=salt)
    assert caught.value.param == "cache_salt"


def test_good_identifiers() -> None:
    """The limits themselves are allowed; a session's name may be any text."""
    request = chat(request_id="x" * 256, session_id="é" * 256, cache_salt="x" * 128, priority=-5)
    assert (request.priority, request.session_id) == (-5, "é" * 256)


# --- tokenize ------------------------------------------------------------------------------------


def test_the_two_forms_of_tokenize() -> None:
    """A prompt or a conversation."""
    prompt = parse_request(TOKENIZE, b'{"prompt": "x", "return_token_strs": true}')
    assert isinstance(prompt, TokenizeCompletionRequest)
    assert (prompt.add_special_tokens, prompt.return_token_strs) == (True, True)
    body = json.dumps({"messages": USER, "tools": [TOOL], "add_generation_prompt": False})
    talk = parse_request(TOKENIZE, body.encode())
    assert isinstance(talk, TokenizeChatRequest)
    assert (talk.add_special_tokens, talk.opens_answer()) == (False, False)
    assert talk.tool_dicts() == [{"type": "function"} | TOOL]
    with pytest.raises(InvalidRequest, match="only text is served"):
        parse_request(TOKENIZE, b'{"messages": [{"role": "user"}], "mm_processor_kwargs": {}}')


def test_detokenize() -> None:
    """Ids are whole and not negative; which of them exist is the tokenizer's business."""
    assert parse_request(DETOKENIZE, b'{"tokens": [0, 99999]}').tokens == [0, 99999]
    for body in (b'{"tokens": [-1]}', b'{"tokens": "x"}', b"{}", b'{"tokens": [1.5]}'):
        with pytest.raises(InvalidBody):
            parse_request(DETOKENIZE, body)
