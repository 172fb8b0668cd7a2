"""Requests of /v1/responses as requests of chat completions."""

from __future__ import annotations

from typing import Any

import pytest

from ellm_serve.errors import InvalidRequest
from ellm_serve.protocol.chat import ChatCompletionRequest
from ellm_serve.protocol.responses import RESPONSES
from ellm_serve.serve.context import RequestContext
from ellm_serve.serve.responses_request import to_chat, to_messages

TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {}, "strict": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}


def item(role: str, kind: str, *texts: str) -> dict[str, Any]:
    parts = [{"type": kind, "text": text, "annotations": []} for text in texts]
    return {"type": "message", "role": role, "content": parts}


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def call(call_id: str = "c1") -> dict[str, Any]:
    function = {"name": "f", "arguments": '{"a": 1}'}
    return {"id": call_id, "type": "function", "function": function}


def chat(
    context: RequestContext | None = None, history: Any = (), **body: Any
) -> ChatCompletionRequest:
    request = RESPONSES.validate_python({"input": "hi"} | body)
    return to_chat(request, history, to_messages(request.input), context or RequestContext(), 2048)


# --- items ---------------------------------------------------------------------------------------


def test_text() -> None:
    """A plain text is the user's; instructions come before everything else."""
    history = [{"role": "user", "content": "before"}]
    assert chat(history=history, instructions="Be brief.").message_dicts() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "before"},
        {"role": "user", "content": "hi"},
    ]


def test_messages() -> None:
    """With a type and without; every role, every kind of text."""
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert to_messages(
        [
            item("developer", "input_text", "a", "b"),
            {"role": "user", "content": "c"},
            item("assistant", "output_text", "d"),
            item("system", "text", "e"),
            refusal,
        ]
    ) == [
        {"role": "developer", "content": said("a", "b")},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": said("d")},
        {"role": "system", "content": said("e")},
        {"role": "assistant", "content": said("No.")},
    ]


def test_thought_text_and_calls_are_one_message() -> None:
    """As the model said them in one go."""
    assert to_messages(
        [
            {"role": "user", "content": "hi"},
            THOUGHT,
            item("assistant", "output_text", "I look."),
            CALL,
            {**CALL, "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "x"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "y"}],
            },
            CALL,
        ]
    )[1:] == [
        {
            "role": "assistant",
            "content": said("I look."),
            "reasoning": "Hm.",
            "tool_calls": [call(), call("c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
        {"role": "tool", "tool_call_id": "c2", "content": said("y")},
        {"role": "assistant", "content": "", "tool_calls": [call()]},
    ]


def test_two_messages_stay_two() -> None:
    """Only a thought opens one that is still to be said."""
    one, two = item("assistant", "output_text", "1"), item("assistant", "output_text", "2")
    assert [message["content"] for message in to_messages([one, two])] == [said("1"), said("2")]


def test_custom_calls_of_earlier_turns() -> None:
    """They are shown as calls, with the text that was their input."""
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** x"}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}
    first, second = to_messages([custom, output])
    assert first["tool_calls"][0]["function"] == {"name": "patch", "arguments": "*** x"}
    assert second == {"role": "tool", "tool_call_id": "c", "content": "ok"}


def test_thoughts_without_text() -> None:
    """An encrypted one, or a summary, is nothing to a model here."""
    summary = [{"type": "summary_text", "text": "s"}]
    hidden = {"type": "reasoning", "id": "r", "summary": summary, "encrypted_content": "x"}
    assert to_messages([hidden, {"role": "user", "content": "a"}]) == [
        {"role": "user", "content": "a"}
    ]


def test_what_happened_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    """Is left out, and that is logged."""
    search = {"type": "web_search_call", "id": "w", "status": "completed"}
    assert len(to_messages([search, {"role": "user", "content": "a"}])) == 1
    assert "web_search_call" in caplog.text


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"type": "alien"}, "input[0].type"),
        ({"type": None}, "input[0].type"),
        ({"type": ["message"]}, "input[0].type"),
        ({"type": "item_reference", "id": "msg_1"}, "input[0].type"),
        ({"content": "no role"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": ["x"]}, "input[0].content[0]"),
        (
            {"role": "user", "content": [{"type": "input_file", "file_id": "x"}]},
            "input[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({**CALL, "arguments": {"a": 1}}, "input[0].arguments"),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
        (
            {"type": "function_call_output", "call_id": "c", "output": {"a": 1}},
            "input[0].output",
        ),
    ],
)
def test_bad_items(bad: dict[str, Any], param: str) -> None:
    """What and where."""
    with pytest.raises(InvalidRequest) as caught:
        to_messages([bad])
    assert caught.value.param == param


def test_images_are_passed_on_to_be_refused() -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
    with pytest.raises(InvalidRequest, match="not a multimodal model"):
        chat(input=[image]).refuse_media("m")


# --- fields --------------------------------------------------------------------------------------


def test_sampling() -> None:
    """The same names, but for the limit."""
    request = chat(
        max_output_tokens=7, temperature=0.5, top_p=0.9, top_k=3, seed=4, stop=["a"], priority=2
    )
    assert request.max_tokens == 7
    assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.9, 3)
    assert (request.seed, request.stop_strings, request.priority) == (4, ["a"], 2)
    assert chat().max_tokens is None


def test_a_limit_that_nothing_reaches() -> None:
    """Is as good as none; clients ask for more than small models have."""
    assert chat(max_output_tokens=2047).max_tokens == 2047
    assert chat(max_output_tokens=2048).max_tokens is None


def test_truncation() -> None:
    """ "auto" cuts the conversation's start."""
    assert chat(truncation="auto").truncate_prompt_tokens == -1
    assert chat(truncation="disabled").truncate_prompt_tokens is None


def test_tools(caplog: pytest.LogCaptureFixture) -> None:
    """Functions are offered; what runs elsewhere, or takes no JSON, is not."""
    others = [{"type": "web_search"}, {"type": "custom", "name": "patch"}, {}]
    request = chat(tools=[*others, TOOL])
    function = {"name": "f", "description": "d", "parameters": {}, "strict": True}
    assert request.tool_dicts() == [{"type": "function", "function": function}]
    assert request.chosen_tools == "auto"
    assert [word in caplog.text for word in ("web_search", "custom", "unknown")] == [True] * 3
    assert chat(tools=others).tools is None
    assert chat(tools=[]).tools is None
    with pytest.raises(InvalidRequest) as caught:
        chat(tools=[{"type": "function"}])
    assert caught.value.param == "tools[0].name"


def test_tool_choice() -> None:
    """By word, by name, or a set of which the model may choose."""
    other = {**TOOL, "name": "g"}
    for word in ("auto", "required", "none"):
        assert chat(tools=[TOOL], tool_choice=word).chosen_tools == word
    named = {"type": "function", "name": "f"}
    assert chat(tools=[TOOL], tool_choice=named).named_tool == "f"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{**named, "name": "g"}]}
    request = chat(tools=[TOOL, other], tool_choice=allowed)
    assert request.chosen_tools == "required"
    assert [tool["function"]["name"] for tool in request.tool_dicts() or []] == ["g"]
    assert chat(tools=[TOOL], parallel_tool_calls=False).parallel_tool_calls is False
    with pytest.raises(InvalidRequest, match="'custom' is not supported"):
        chat(tools=[TOOL], tool_choice={"type": "custom", "name": "x"})


def test_tool_choice_without_tools() -> None:
    """Only one that asks for a call is refused."""
    for word in ("auto", "none"):
        assert chat(tool_choice=word).chosen_tools == "none"
    for choice in ("required", {"type": "function", "name": "f"}):
        with pytest.raises(InvalidRequest, match="`tools` must be set"):
            chat(tool_choice=choice)


def test_reasoning() -> None:
    """The effort; what else there is has no effect."""
    assert chat(reasoning={"effort": "low", "summary": "auto"}).reasoning_effort == "low"
    assert chat(reasoning={"summary": "auto"}).reasoning_effort is None


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True},
            {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
            },
        ),
    ],
)
def test_text_format(form: object, expected: object) -> None:
    """It is chat's response_format."""
    found = chat(text={"format": form, "verbosity": "low"}).response_format
    dumped = None if found is None else found.model_dump(by_alias=True, exclude_unset=True)
    assert dumped == expected


def test_format_without_schema() -> None:
    with pytest.raises(InvalidRequest, match="must have a schema"):
        chat(text={"format": {"type": "json_schema", "name": "n"}})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
    ],
)
def test_refused_fields(body: dict[str, Any], param: str) -> None:
    """By name, and not ignored."""
    with pytest.raises(InvalidRequest) as caught:
        chat(**body)
    assert caught.value.param == param


def test_agents_fields() -> None:
    """What a coding agent sends with every request is fine."""
    chat(
        store=False,
        background=False,
        include=["reasoning.encrypted_content"],
        service_tier="auto",
        client_metadata={"x": "y"},
        text={"verbosity": "low"},
        stream_options={"include_obfuscation": False},
    )


def test_order_of_sessions() -> None:
    """The cache's key comes last."""
    body = {"prompt_cache_key": "key"}
    assert chat(**body).session_id == "key"
    assert chat(RequestContext(session_id="header"), **body).session_id is None
    assert chat(vllm_xargs={"session_id": "x"}, **body).session_id is None
    assert chat(session_id="own", **body).session_id == "own"
    assert chat(prompt_cache_key="two words").session_id is None
