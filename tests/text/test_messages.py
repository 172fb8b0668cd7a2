"""Wire messages become template messages; what was once sent out is always taken back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_serve.errors import InvalidRequest
from ellm_serve.text import ChatEncoder, normalize_messages
from ellm_serve.text.messages import RAW_ARGUMENTS


def _one(message: dict[str, Any]) -> dict[str, Any]:
    return normalize_messages([message]).messages[0]


def _call(arguments: object) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _arguments(arguments: object) -> Any:
    return _one(_call(arguments))["tool_calls"][0]["function"]["arguments"]


def test_arguments_are_decoded_in_order() -> None:
    """Templates walk through the arguments as a mapping; the wire has them as a string."""
    decoded = _arguments('{"y": 4, "x": "Größe", "a": {"c": 1, "b": 2}}')
    assert (
        json.dumps(decoded, ensure_ascii=False) == '{"y": 4, "x": "Größe", "a": {"c": 1, "b": 2}}'
    )
    assert _arguments({"y": 1}) == {"y": 1}


@pytest.mark.parametrize("nothing", ["", "null", None, "{}", {}, " "])
def test_no_arguments(nothing: object) -> None:
    assert _arguments(nothing) == {}


@pytest.mark.parametrize("broken", ["[1]", '{"cmd": "ls', "x", "17", '"text"', "[" * 5000, "{" * 9])
def test_broken_arguments_become_one_text(broken: str) -> None:
    """One call that came out broken had made every later turn of the conversation fail."""
    assert _arguments(broken) == {RAW_ARGUMENTS: broken}
    (warning,) = normalize_messages([_call(broken)]).warnings
    assert "messages[0].tool_calls[0].function.arguments" in warning


@given(st.text(max_size=30))
def test_any_arguments_render(encoder: ChatEncoder, xml_encoder: ChatEncoder, text: str) -> None:
    messages = [{"role": "user", "content": "go"}, _call(text), {"role": "tool", "content": "11"}]
    for each in (encoder, xml_encoder):
        assert "add" in each.encode_chat(messages).text


def test_string_and_dict_arguments_are_the_same(encoder: ChatEncoder) -> None:
    user = {"role": "user", "content": "go"}
    given_string = encoder.encode_chat([user, _call('{"x": 4, "y": "ü"}')])
    given_dict = encoder.encode_chat([user, _call({"x": 4, "y": "ü"})])
    assert given_string == given_dict
    assert '"arguments": {"x": 4, "y": "ü"}' in given_string.text


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_content(role: str) -> None:
    """Null content was dropped or printed as "None"; part lists were printed as Python lists."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert _one({"role": role, "content": parts})["content"] == "a\nb"
    assert _one({"role": role, "content": None})["content"] == ""
    assert _one({"role": role})["content"] == ""
    assert _one({"role": role, "content": []})["content"] == ""
    assert _one({"role": role, "content": " as is "})["content"] == " as is "


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video"])
def test_other_parts_are_refused_by_name(kind: str) -> None:
    content = [{"type": "text", "text": "a"}, {"type": kind, kind: {}}]
    with pytest.raises(InvalidRequest, match=kind) as caught:
        normalize_messages([{"role": "user", "content": "x"}, {"role": "user", "content": content}])
    assert caught.value.param == "messages[1].content[1].type"


def test_developer_is_system(encoder: ChatEncoder) -> None:
    def prompt(role: str) -> str:
        return encoder.encode_chat(
            [{"role": role, "content": "Be kind."}, {"role": "user", "content": "Hi"}]
        ).text

    assert prompt("developer") == prompt("system")


def test_nulls_and_empty_calls_are_absent() -> None:
    """SDKs send every field of their message class, also the unused ones."""
    message = {"role": "assistant", "content": "a", "tool_calls": [], "name": None, "refusal": None}
    assert _one(message) == {"role": "assistant", "content": "a"}
    reasoning = _one({"role": "assistant", "content": "a", "reasoning": "why"})
    assert reasoning["reasoning_content"] == "why"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        ([{"role": "user", "content": "x", "extra": object()}], "messages[0]"),
    ],
)
def test_refusals(messages: Any, param: str) -> None:
    """Each names its place, for a client that built hundreds of messages."""
    with pytest.raises(InvalidRequest) as caught:
        normalize_messages(messages)
    assert caught.value.param == param


def test_deep_nesting_is_refused() -> None:
    """Python's recursion limit is not for clients to reach."""
    value: Any = []
    for _ in range(2000):
        value = [value]
    with pytest.raises(InvalidRequest, match="nested"):
        normalize_messages([{"role": "user", "content": "x", "extra": value}])


def test_input_is_not_changed() -> None:
    """A retry sends the same objects again."""
    message = _call('{"x": 1}')
    before = json.dumps(message)
    normalize_messages([message])
    assert json.dumps(message) == before
