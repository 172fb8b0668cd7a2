"""Requests of /v1/messages as requests of chat completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ellm_serve.errors import InvalidRequest
from ellm_serve.protocol.chat import ChatCompletionRequest
from ellm_serve.protocol.messages import COUNT_TOKENS, MESSAGES
from ellm_serve.serve.context import RequestContext
from ellm_serve.serve.messages_request import to_chat, to_tokenize

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "description": "does it", "input_schema": {"properties": {}}}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"b": 1, "a": "ä"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "done"}


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": one} for one in texts]


def chat(context: RequestContext | None = None, **body: Any) -> ChatCompletionRequest:
    request = MESSAGES.validate_python(
        {"model": "m", "max_tokens": 2000, "messages": [USER]} | body
    )
    return to_chat(request, context or RequestContext())


def messages(*turns: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    return chat(messages=list(turns), **body).message_dicts()


# --- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("Be brief.", ["Be brief."]),
        (text("One.", "Two."), ["One.", "Two."]),
        (text("x-anthropic-billing-header: cch=ab12c;", "Be brief."), ["Be brief."]),
        (text("x-anthropic-billing-header: cch=ab12c;"), None),
        ("x-anthropic-billing-header: cch=ab12c;", None),
        ("", None),
        (None, None),
    ],
)
def test_system(system: object, expected: list[str] | None) -> None:
    """Blocks are parts of one message; the one that changes with every turn is none of them."""
    opening = [] if expected is None else [{"role": "system", "content": text(*expected)}]
    assert messages(USER, system=system) == [*opening, USER]


def test_calls_and_results() -> None:
    """Results become messages of their own, in order, before what the user says besides."""
    assert messages(
        USER,
        {"role": "assistant", "content": [*text("I look."), USE, {**USE, "id": "t2"}]},
        {
            "role": "user",
            "content": [
                *text("And?"),
                RESULT,
                {"type": "tool_result", "tool_use_id": "t2", "content": text("a", "b")},
                {"type": "tool_result", "tool_use_id": "t3"},
            ],
        },
    )[1:] == [
        {
            "role": "assistant",
            "content": text("I look."),
            "tool_calls": [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"b": 1, "a": "ä"}'},
                }
                for call_id in ("t1", "t2")
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "done"},
        {"role": "tool", "tool_call_id": "t2", "content": text("a", "b")},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": text("And?")},
    ]


def test_thoughts() -> None:
    """They are the reasoning of the message; those that cannot be read are left out."""
    blocks = [
        {"type": "thinking", "thinking": "Hm. ", "signature": "s"},
        {"type": "redacted_thinking", "data": "abc"},
        {"type": "thinking", "thinking": "Yes.", "signature": "s"},
        *text("Yes."),
    ]
    assert messages(USER, {"role": "assistant", "content": blocks})[1] == {
        "role": "assistant",
        "content": text("Yes."),
        "reasoning": "Hm. Yes.",
    }


def test_system_messages_in_between() -> None:
    """They stay where they are, but never between a call and its result."""
    note = {"role": "system", "content": "Note."}
    noise = {"role": "system", "content": "x-anthropic-billing-header: cch=1;"}
    call = {"role": "assistant", "content": [USE]}
    found = messages(USER, note, call, note, noise, {"role": "user", "content": [RESULT]}, note)
    assert [message["role"] for message in found] == [
        "user",
        "system",
        "assistant",
        "tool",
        "system",
        "system",
    ]
    assert messages(USER, call, note)[-1] == {"role": "system", "content": text("Note.")}


def test_images_are_passed_on_to_be_refused() -> None:
    """Also those in the result of a tool."""
    image = {"type": "image", "source": {"type": "base64", "data": "xx"}}
    for content in ([image], [{**RESULT, "content": [image]}]):
        with pytest.raises(InvalidRequest, match="not a multimodal model"):
            chat(messages=[{"role": "user", "content": content}]).refuse_media("m")


def test_a_message_without_anything() -> None:
    assert messages({"role": "user", "content": []}) == [{"role": "user", "content": []}]


# --- fields --------------------------------------------------------------------------------------


def test_sampling() -> None:
    """By the other names."""
    request = chat(
        stop_sequences=["a", "b"], temperature=0.5, top_p=0.9, top_k=7, stream=True, cache_salt="x"
    )
    assert request.requested_max_tokens() == ("max_tokens", 2000)
    assert request.stop_strings == ["a", "b"]
    assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.9, 7)
    assert request.stream and request.cache_salt == "x"
    assert chat().temperature is None


def test_tools() -> None:
    """A schema gets the type it must have; tools that run elsewhere are not offered."""
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    function = {
        "name": "f",
        "description": "does it",
        "parameters": {"type": "object", "properties": {}},
    }
    for tools in ([TOOL], [hosted, {**TOOL, "type": "custom", "cache_control": {}}]):
        request = chat(tools=tools)
        assert request.tool_dicts() == [{"type": "function", "function": function}]
        assert request.chosen_tools == "auto"
    assert chat(tools=[]).tools is None
    assert chat(tools=[hosted]).tools is None
    with pytest.raises(InvalidRequest, match="no input_schema"):
        chat(tools=[{"name": "f"}])


def test_skipped_tools_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """By their type, if that cannot be a text of somebody's."""
    chat(tools=[{"name": "n", "type": "bash_20250124"}, {"name": "n", "type": "My secret"}])
    assert [record.getMessage() for record in caplog.records] == [
        "tools of the type bash_20250124 are not supported and left out",
        "tools of the type unknown are not supported and left out",
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        (None, "auto"),
    ],
)
def test_tool_choice(choice: object, expected: str) -> None:
    assert chat(tools=[TOOL], tool_choice=choice).chosen_tools == expected


def test_named_tool() -> None:
    """And whether there may be more than one call."""
    request = chat(tools=[TOOL], tool_choice={"type": "tool", "name": "f"})
    assert request.named_tool == "f" and request.parallel_tool_calls
    single = {"type": "auto", "disable_parallel_tool_use": True}
    assert chat(tools=[TOOL], tool_choice=single).parallel_tool_calls is False


def test_tool_choice_without_tools() -> None:
    """Only one that asks for a call is refused."""
    for kind in ("auto", "none"):
        assert chat(tool_choice={"type": kind}, tools=[]).chosen_tools == "none"
    for choice in ({"type": "any"}, {"type": "tool", "name": "f"}):
        with pytest.raises(InvalidRequest, match="`tools` must be set"):
            chat(tool_choice=choice)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        (
            {"output_config": {"effort": "high"}},
            {"reasoning_effort": "high", "enable_thinking": True},
        ),
        (
            {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
        (
            {
                "thinking": {"type": "disabled"},
                "chat_template_kwargs": {"enable_thinking": True, "x": 1},
            },
            {"enable_thinking": True, "x": 1},
        ),
    ],
)
def test_thinking(body: dict[str, Any], expected: object) -> None:
    """It is up to the template; the count of tokens goes by the same variables."""
    assert chat(**body).chat_template_kwargs == expected
    request = COUNT_TOKENS.validate_python({"model": "m", "messages": [USER]} | body)
    assert to_tokenize(request).chat_template_kwargs == expected


@pytest.mark.parametrize("budget", [1023, 2000, 5000])
def test_thinking_budget(budget: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(thinking={"type": "enabled", "budget_tokens": budget})
    assert caught.value.param == "thinking.budget_tokens"


def test_output_format() -> None:
    """A schema to follow."""
    form = {"type": "json_schema", "schema": {"type": "object"}}
    request = chat(output_config={"format": form})
    assert request.response_format is not None
    assert request.response_format.model_dump(by_alias=True, exclude_unset=True) == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}},
    }


def test_bad_values_name_their_field() -> None:
    """What the body's form does not tell is refused where it becomes a chat request."""
    with pytest.raises(InvalidRequest) as caught:
        chat(cache_salt="a/b")
    assert caught.value.param == "cache_salt"


# --- sessions ------------------------------------------------------------------------------------

USER_ID = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "s-json"})


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        (USER_ID, "s-json"),
        ("user_ab12_account__session_0f-9a", "0f-9a"),
        ("user-17", None),
        ("", None),
        ('{"session_id": 5}', None),
        ('["session_id"]', None),
        ('{"session_id": "two words"}', None),
        ('{"session_id": "' + "x" * 257 + '"}', None),
        ("[" * 100_000, None),
        (None, None),
    ],
)
def test_session_of_the_metadata(user_id: str | None, session: str | None) -> None:
    """In both spellings; what cannot be one is none."""
    assert chat(metadata={"user_id": user_id}).session_id == session


def test_order_of_sessions() -> None:
    """The metadata come last."""
    body: dict[str, Any] = {"metadata": {"user_id": USER_ID}}
    assert chat(RequestContext(session_id="header"), **body).session_id is None
    assert chat(vllm_xargs={"session_id": "x"}, **body).session_id is None
    assert chat(RequestContext(session_id="header"), session_id="own", **body).session_id == "own"
