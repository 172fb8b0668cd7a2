"""Calls of tools: whole and in pieces, in both dialects, as requests choose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ellm_serve.errors import InvalidRequest
from tests.serve.cuttings import cut
from tests.serve.frames import Told, read
from tests.serve.scripted import IM_END, Harness, harness, run, tokenizer

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "noargs"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}

CODER = """Let me check.
<tool_call>
<function=get_weather>
<parameter=city>
São "Paulo"
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>
<tool_call>
<function=noargs>
</function>
</tool_call>"""
HERMES = (
    'Let me check.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "São \\"Paulo\\"",'
    ' "days": 3}}\n</tool_call>\n<tool_call>\n{"name": "noargs", "arguments": {}}\n</tool_call>'
)
FIRST = ("get_weather", {"city": 'São "Paulo"', "days": 3})
SECOND: tuple[str, dict[str, Any]] = ("noargs", {})


@pytest.fixture(scope="module", params=["qwen3_coder", "hermes"])
def served(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """One for each dialect."""
    with harness(tool_call_parser=request.param) as scripted:
        yield scripted


@pytest.fixture(scope="module")
def coder() -> Iterator[Harness]:
    with harness(tool_call_parser="qwen3_coder") as scripted:
        yield scripted


def text_of(served: Harness) -> str:
    """Content and two calls, as the dialect has them."""
    return CODER if served.config.tool_call_parser == "qwen3_coder" else HERMES


def whole(served: Harness, **body: Any) -> Any:
    return run(served.chat(**{"tools": TOOLS} | body))


def streamed(served: Harness, **body: Any) -> Told:
    async def ask() -> Told:
        return await read(await served.chat(stream=True, **{"tools": TOOLS} | body))

    return run(ask())


def calls_in(message: Any) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or ()
    ]


def message_of(told: Told) -> dict[str, Any]:
    """What a client puts together from a stream's deltas."""
    message: dict[str, Any] = {"content": None, "reasoning": None}
    calls: list[dict[str, str]] = []
    for choice in told.choices:
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function"
                calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            else:
                assert call["index"] == len(calls) - 1
                calls[-1]["arguments"] += call["function"]["arguments"]
        for name in ("content", "reasoning"):
            if choice["delta"].get(name):
                message[name] = (message[name] or "") + choice["delta"][name]
    return message | {"tool_calls": calls}


def test_cuttings_spell_the_text() -> None:
    """Each in other tokens; if not, the tests below would show less than they seem to."""
    found = [cut(CODER, seed) for seed in range(8)]
    assert {tokenizer.decode(token_ids) for token_ids in found} == {CODER}
    assert len({tuple(token_ids) for token_ids in found}) == 8


@pytest.mark.parametrize("seed", range(8))
def test_streamed_is_whole(served: Harness, seed: int) -> None:
    """However the text is cut into tokens, content and calls are the same, to the letter."""
    served.script.say([*cut(text_of(served), seed), IM_END])
    (choice,) = whole(served).choices
    assert choice.message.content == "Let me check."
    assert calls_in(choice.message) == [FIRST, SECOND]
    told = streamed(served)
    message = message_of(told)
    assert message["content"] == choice.message.content
    assert [(call["name"], call["arguments"]) for call in message["tool_calls"]] == [
        (call.function.name, call.function.arguments) for call in choice.message.tool_calls
    ]
    assert choice.finish_reason == "tool_calls" and told.ends() == [(0, "tool_calls", None)]
    ids = [call.id for call in choice.message.tool_calls]
    ids += [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 4 and all(one.startswith("chatcmpl-tool-") for one in ids)


@pytest.mark.parametrize("max_tokens", range(1, 60, 7))
def test_a_cut_call(served: Harness, max_tokens: int) -> None:
    """Its arguments are valid JSON, and the reason is the limit; the same in pieces."""
    served.script.say([*cut(text_of(served), 0), IM_END])
    (choice,) = whole(served, max_tokens=max_tokens).choices
    told = streamed(served, max_tokens=max_tokens)
    assert choice.finish_reason == "length" and told.ends() == [(0, "length", None)]
    calls = calls_in(choice.message)
    message = message_of(told)
    assert message["content"] == choice.message.content
    assert [json.loads(call["arguments"]) for call in message["tool_calls"]] == [
        arguments for _, arguments in calls
    ]


def test_long_strings_arrive_while_they_are_written(served: Harness) -> None:
    """Not at their end: most of the pieces are a few characters long."""
    letter = "wörd " * 300
    text = text_of(served).replace("Paulo", letter)
    served.script.say([*cut(text, 0), IM_END])
    served.script.pause_s = 0.001
    try:
        told = streamed(served)
    finally:
        served.script.pause_s = 0.0
    pieces = [
        call["function"]["arguments"]
        for choice in told.choices
        for call in choice["delta"].get("tool_calls", ())
        if "arguments" in call["function"]
    ]
    assert len(pieces) > 100
    assert message_of(told)["tool_calls"][0]["arguments"].count("wörd") == 300


def test_only_one_call(served: Harness) -> None:
    """Without parallel calls the answer ends with the first; the rest is not generated."""
    token_ids = [*cut(text_of(served), 0), IM_END]
    served.script.say(token_ids)
    for body in ({"parallel_tool_calls": False}, {"parallel_tool_calls": False, "n": 2, "seed": 1}):
        body |= {"temperature": 1.0} if "n" in body else {}
        response = whole(served, **body)
        for choice in response.choices:
            assert calls_in(choice.message) == [FIRST]
            assert choice.finish_reason == "tool_calls"
        assert response.usage.completion_tokens < len(token_ids) * len(response.choices) - 10
    told = streamed(served, parallel_tool_calls=False)
    assert [call["name"] for call in message_of(told)["tool_calls"]] == ["get_weather"]
    assert told.ends() == [(0, "tool_calls", None)]


def test_no_call_may_be_made(served: Harness) -> None:
    """Calls are taken out of the text, which is an answer like any other."""
    served.script.say([*cut(text_of(served), 0), IM_END])
    (choice,) = whole(served, tool_choice="none").choices
    assert choice.message.content == "Let me check." and choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    told = streamed(served, tool_choice="none")
    assert message_of(told) == {"content": "Let me check.", "reasoning": None, "tool_calls": []}
    assert told.ends() == [(0, "stop", None)]


def test_without_tools_all_is_text(served: Harness) -> None:
    """Byte for byte."""
    text = text_of(served)
    served.script.say([*cut(text, 0), IM_END])
    assert whole(served, tools=None).choices[0].message.content == text
    assert streamed(served, tools=None).text() == text


@pytest.mark.parametrize("text", ["Use `<tool_call>` like this.", "1 < 2 <tool", "<tool_call> no"])
def test_tags_that_are_only_mentioned(served: Harness, text: str) -> None:
    """Are content."""
    served.say(text, IM_END)
    (choice,) = whole(served).choices
    assert choice.message.content == text and choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert message_of(streamed(served))["content"] == text


@pytest.mark.parametrize("text", ["", "Hi"])
def test_content_with_and_without_calls(coder: Harness, text: str) -> None:
    """It is null where only calls are, and a text otherwise."""
    call = "<tool_call>\n<function=noargs>\n</function>\n</tool_call>"
    for said, content in ((text, text), (text + call, text or None)):
        coder.script.say([*cut(said, 0), IM_END])
        body = whole(coder).choices[0].message.model_dump()
        assert body["content"] == content
        assert ("tool_calls" in body) == (said != text)


# --- demanded calls ------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("stream", [False, True])
def test_demanded_calls(served: Harness, choice: Any, stream: bool) -> None:
    """Whatever the model would say, it calls a tool; content is empty but not null."""
    served.say("I would rather talk.", IM_END)
    body = {"tool_choice": choice, "max_tokens": 400, "logit_bias": {"39": -100}}
    if stream:
        told = streamed(served, **body)
        calls = [(one["name"], one["arguments"]) for one in message_of(told)["tool_calls"]]
    else:
        (got,) = whole(served, **body).choices
        assert got.message.content == ""
        calls = [(one.function.name, one.function.arguments) for one in got.message.tool_calls]
    assert calls
    for name, arguments in calls:
        assert name in ("get_weather", "noargs") if choice == "required" else name == "get_weather"
        assert isinstance(json.loads(arguments), dict)
    if choice is NAMED:
        assert len(calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_that_ends(served: Harness, stream: bool) -> None:
    """`required` counts as a call; one asked for by name ends with "stop", as in vLLM."""
    start = text_of(served).index("<tool_call>")
    served.script.say([*cut(text_of(served)[start:], 0), IM_END])
    for choice, reason in (("required", "tool_calls"), (NAMED, "stop")):
        if stream:
            told = streamed(served, tool_choice=choice)
            assert told.ends() == [(0, reason, None)]
            found = [
                (c["name"], json.loads(c["arguments"])) for c in message_of(told)["tool_calls"]
            ]
        else:
            (got,) = whole(served, tool_choice=choice).choices
            assert got.finish_reason == reason
            found = calls_in(got.message)
        assert found == ([FIRST, SECOND] if choice == "required" else [FIRST])


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_that_is_cut_off(served: Harness, choice: Any, stream: bool) -> None:
    """Its markup is not shown as text, however little of it there is."""
    for max_tokens in range(1, 12):
        served.say("I would rather talk.", IM_END)
        body = {"tool_choice": choice, "max_tokens": max_tokens}
        if stream:
            told = streamed(served, **body)
            assert not message_of(told).get("content")
        else:
            (got,) = whole(served, **body).choices
            assert (got.message.content, got.finish_reason) == ("", "length")


def test_choices_that_cannot_be_served() -> None:
    """A server that cannot read calls, or may not let the model choose, says so."""
    with harness(tool_call_parser="none") as served:
        for choice in ("auto", "required", NAMED):
            with pytest.raises(InvalidRequest, match="--tool-call-parser to be set"):
                whole(served, tool_choice=choice)
        served.say("Hi", IM_END)
        assert whole(served, tool_choice="none").choices[0].message.content == "Hi"
    with harness(tool_call_parser="hermes", enable_auto_tool_choice=False) as served:
        with pytest.raises(InvalidRequest, match="requires --enable-auto-tool-choice"):
            whole(served)
        assert whole(served, tool_choice="required", max_tokens=5).choices


def test_a_form_and_a_demanded_call(coder: Harness) -> None:
    """Cannot both be had."""
    with pytest.raises(InvalidRequest, match="constraints for structured outputs or tools"):
        whole(coder, tool_choice="required", structured_outputs={"regex": "a"})


# --- what goes with calls ------------------------------------------------------------------------


def test_ids_and_log_probabilities_of_every_token(served: Harness) -> None:
    """Those of tags as well, each once."""
    token_ids = [*cut(text_of(served), 0), IM_END]
    served.script.say(token_ids)
    body = {"logprobs": True, "return_token_ids": True}
    (choice,) = whole(served, **body).choices
    assert choice.token_ids == token_ids
    assert len(choice.logprobs.content) == len(token_ids)
    told = streamed(served, **body)
    assert [one for c in told.choices[1:] for one in c["token_ids"] or ()] == token_ids
    entries = [one for c in told.choices[1:] if c["logprobs"] for one in c["logprobs"]["content"]]
    assert len(entries) == len(token_ids)


@pytest.mark.parametrize("stop", ["days", "São", "get_weather"])
def test_stop_strings_do_not_count_in_calls(served: Harness, stop: str) -> None:
    """They would break what they were not meant for."""
    served.script.say([*cut(text_of(served), 0), IM_END])
    (choice,) = whole(served, stop=stop).choices
    assert calls_in(choice.message) == [FIRST, SECOND] and choice.stop_reason is None


@pytest.mark.parametrize("seed", range(4))
def test_stop_strings_count_in_content(served: Harness, seed: int) -> None:
    served.script.say([*cut(text_of(served), seed), IM_END])
    (choice,) = whole(served, stop=["check"]).choices
    assert choice.message.content == "Let me " and choice.message.tool_calls is None
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "check")
    told = streamed(served, stop=["check"])
    assert told.text() == "Let me " and told.ends() == [(0, "stop", "check")]


def test_what_was_said_is_taken_back(served: Harness) -> None:
    """Whatever form a client gives to the history of a call."""
    served.script.say([*cut(text_of(served), 0), IM_END])
    message = whole(served).choices[0].message.model_dump()
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": content}
        for call, content in zip(
            message["tool_calls"], ["sunny", [{"type": "text", "text": "now"}]], strict=True
        )
    ]
    served.say("Fine.", IM_END)
    history = [{"role": "user", "content": "hi"}, message, *results]
    assert whole(served, messages=history).choices[0].message.content == "Fine."
    bare = {"role": "assistant", "tool_calls": message["tool_calls"]}
    parts = {**message, "content": [{"type": "text", "text": "a"}], "reasoning": None}
    for variant in (bare, parts, {**bare, "content": None}):
        served.say("Fine.", IM_END)
        history = [{"role": "developer", "content": "d"}, history[-4], variant, *results]
        assert whole(served, messages=history).choices[0].message.content == "Fine."


def test_tools_may_be_left_out_of_the_prompt() -> None:
    """If the server is set up so, and no call may be made."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | length if tools }}"
    with harness(
        tool_call_parser="hermes",
        exclude_tools_when_tool_choice_none=True,
        trust_request_chat_template=True,
    ) as served:
        body = {"chat_template": template, "return_prompt_text": True, "max_tokens": 1}
        assert whole(served, tool_choice="none", **body).prompt_text == "hi"
        assert whole(served, **body).prompt_text == "hi2"
