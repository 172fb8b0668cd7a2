"""/v1/messages and /v1/messages/count_tokens over HTTP, with a model that says what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ellm_serve.errors import EngineError
from ellm_serve.protocol.messages import MessagesResponse
from ellm_serve.serve.messages import _Blocks
from tests.serve.client import wait_until
from tests.serve.events import ARGUMENTS, CALL, SCHEMA, Served, events, served

PATH = "/v1/messages"
FAILED = "The engine failed while it worked on this request."
TOOLS = [{"name": "get_weather", "description": "w", "input_schema": SCHEMA}]
BODY: dict[str, Any] = {
    "model": "qwen3-coder",
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "hi"}],
}


@pytest.fixture(scope="module")
def service() -> Iterator[Served]:
    with served() as running:
        yield running


def told(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer that the events of a stream make up, as a client puts it together."""
    start, *rest = stream
    assert start["type"] == "message_start"
    message: dict[str, Any] = dict(start["message"])
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
                is_open = True
            case "content_block_delta":
                assert is_open and event["index"] == len(blocks) - 1
                add(blocks[-1], event["delta"])
            case "content_block_stop":
                assert is_open and event["index"] == len(blocks) - 1
                is_open = False
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    assert not is_open and rest[-1] == {"type": "message_stop"}
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    return {k: v for k, v in message.items() if v is not None} | {"content": blocks}


def add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    field = {
        "text_delta": "text",
        "thinking_delta": "thinking",
        "input_json_delta": "partial_json",
        "signature_delta": "signature",
    }[delta["type"]]
    key = "json" if field == "partial_json" else field
    block[key] = block.get(key, "") + delta[field]


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what is new every time: names and what was cached."""
    blocks = [
        {k: v for k, v in block.items() if k not in ("id", "signature")}
        for block in answer["content"]
    ]
    usage = answer["usage"]
    prompt = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    counts = {"prompt": prompt, "output": usage["output_tokens"]}
    return {**answer, "id": "", "content": blocks, "usage": counts}


def both(service: Served, **body: Any) -> dict[str, Any]:
    """The whole answer, after checking that a stream tells the same."""
    reply = service.client.post(PATH, {**BODY, **body})
    assert reply.status == 200, reply.text
    answer: dict[str, Any] = reply.json
    assert MessagesResponse.model_validate(answer).model_dump_json() == reply.text
    assert plain(told(service.stream(PATH, {**BODY, **body}))) == plain(answer)
    return answer


# --- answers -------------------------------------------------------------------------------------


def test_text(service: Served) -> None:
    """One block; clients are told why it ended and what it took."""
    ids = service.say("Hello, wörld")
    answer = both(service)
    assert answer["content"] == [{"type": "text", "text": "Hello, wörld"}]
    assert (answer["stop_reason"], answer["model"]) == ("end_turn", "qwen3-coder")
    assert answer["usage"]["output_tokens"] == len(ids)
    assert "stop_sequence" not in answer


def test_call(service: Served) -> None:
    """Text, then the call with its input as an object."""
    service.say(f"Let me check.\n{CALL}")
    answer = both(service, tools=TOOLS)
    text, use = answer["content"]
    assert text == {"type": "text", "text": "Let me check."}
    assert use["id"].startswith("chatcmpl-tool-")
    assert (use["name"], use["input"]) == ("get_weather", ARGUMENTS)
    assert answer["stop_reason"] == "tool_use"


def test_two_calls(service: Served) -> None:
    """Each is a block with an id of its own; with `disable_parallel_tool_use` there is one."""
    service.say(f"{CALL}\n{CALL}")
    first, second = both(service, tools=TOOLS)["content"]
    assert first["id"] != second["id"] and first["input"] == second["input"]
    single = {"type": "auto", "disable_parallel_tool_use": True}
    answer = both(service, tools=TOOLS, tool_choice=single)
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    assert answer["stop_reason"] == "tool_use"


def test_input_arrives_while_it_is_written(service: Served) -> None:
    """A long value is not held back until it is over."""
    service.say(CALL)
    stream = service.stream(PATH, {**BODY, "tools": TOOLS})
    deltas = [event["delta"] for event in stream if event["type"] == "content_block_delta"]
    assert len(deltas) > 4 and deltas[0]["partial_json"] == '{"city": "'


def test_no_tools_no_calls(service: Served) -> None:
    """Markup that nobody asked for is text."""
    service.say(CALL)
    assert both(service)["content"] == [{"type": "text", "text": CALL}]


def test_thought(service: Served) -> None:
    """It comes first, with a signature; what follows is as it was said."""
    service.say("<think>\nI think so.\n</think>\n\nHello.")
    thinking, text = both(service)["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "\nI think so.\n")
    assert len(thinking["signature"]) == 32
    assert text == {"type": "text", "text": "\n\nHello."}


def test_nothing(service: Served) -> None:
    """An answer of no text is one empty block."""
    service.say("")
    assert both(service)["content"] == [{"type": "text", "text": ""}]


def test_stop_reasons(service: Served) -> None:
    """The stop sequence is named; a limit within a call is one still."""
    service.say("One, two, three, four")
    answer = both(service, stop_sequences=["three", "nothing"])
    assert answer["content"] == [{"type": "text", "text": "One, two, "}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "three")
    assert both(service, max_tokens=2)["stop_reason"] == "max_tokens"
    ids = service.say(CALL)
    answer = both(service, tools=TOOLS, max_tokens=len(ids) // 2)
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][0]["type"] == "tool_use"


def test_order_of_keys(service: Served) -> None:
    """As recorded; the end of a stream has every key."""
    service.say("One, two, three")
    answer = both(service, stop_sequences=["three"])
    assert list(answer) == [
        "id",
        "type",
        "role",
        "content",
        "model",
        "stop_reason",
        "stop_sequence",
        "usage",
    ]
    end = service.stream(PATH, BODY)[-2]
    assert list(end) == ["type", "delta", "usage"]
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


# --- conversations -------------------------------------------------------------------------------


def test_next_turn_reuses_the_last(service: Served) -> None:
    """An answer that is sent back, with the result of its call, is what the model has seen."""
    service.say(f"Let me check.\n{CALL}")
    session = {"metadata": {"user_id": json.dumps({"session_id": "weather"})}}
    first = service.client.post(PATH, {**BODY, **session, "tools": TOOLS}).json
    result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "sunny"}
    turns = [
        *BODY["messages"],
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    service.say("Sunny.")
    body = {**BODY, **session, "tools": TOOLS, "messages": turns}
    second = service.client.post(PATH, body).json
    prompt = sum(first["usage"].values()) - first["usage"]["output_tokens"]
    assert second["content"] == [{"type": "text", "text": "Sunny."}]
    assert second["usage"]["cache_read_input_tokens"] > prompt
    assert second["usage"]["cache_creation_input_tokens"] == 0
    counted = service.client.post(f"{PATH}/count_tokens", body).json["input_tokens"]
    usage = second["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_session_of_a_header_comes_first(service: Served) -> None:
    """Agents say in two places which session it is."""
    user = {"metadata": {"user_id": "user_1_account__session_meta"}}
    service.say("Yes")
    for headers, name in (({}, "meta"), ({"X-Claude-Code-Session-Id": "head"}, "head")):
        assert service.client.post(PATH, {**BODY, **user}, headers=headers).status == 200
        assert name in service.sessions


def test_count(service: Served) -> None:
    """As many as the same conversation has elsewhere; needs no limit of the output."""
    body = {k: v for k, v in BODY.items() if k != "max_tokens"}
    reply = service.client.post(f"{PATH}/count_tokens?beta=true", {**body, "tools": TOOLS})
    function = {"name": "get_weather", "description": "w", "parameters": SCHEMA}
    chat = {**body, "tools": [{"type": "function", "function": function}]}
    count = service.client.post("/tokenize", chat).json["count"]
    assert reply.text == (
        f'{{"input_tokens":{count},"context_management":{{"original_input_tokens":{count}}}}}'
    )


def test_count_may_be_more_than_fits(service: Served) -> None:
    long = [{"role": "user", "content": "hello world " * 3000}]
    reply = service.client.post(f"{PATH}/count_tokens", {**BODY, "messages": long})
    assert reply.status == 200 and reply.json["input_tokens"] > 2048


def test_query_strings_are_nothing(service: Served) -> None:
    service.say("Yes")
    assert service.client.post(f"{PATH}?beta=true", BODY).status == 200


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"model": "nope"}, 404, "not_found_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"temperature": 3.0}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
        ),
        (
            {"messages": [{"role": "user", "content": "hello world " * 3000}]},
            400,
            "invalid_request_error",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(
    service: Served, body: dict[str, Any], status: int, kind: str, stream: bool
) -> None:
    """In their own envelope, with the real status whether or not a stream was wanted."""
    reply = service.client.post(PATH, {**BODY, **body, "stream": stream})
    assert reply.status == status
    assert list(reply.json) == ["type", "error"] and reply.json["type"] == "error"
    assert list(reply.json["error"]) == ["type", "message"]
    assert reply.json["error"]["type"] == kind and reply.json["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "body.max_tokens"),
        ({"messages": "hi"}, "body.messages"),
        ({"model": ""}, "body.model"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "body.messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "alien"}]}]},
            "body.messages.0.content",
        ),
    ],
)
def test_bodies_of_the_wrong_form(service: Served, body: dict[str, Any], param: str) -> None:
    """In OpenAI's envelope, as recorded."""
    reply = service.client.post(PATH, {**BODY, **body})
    assert reply.status == 400
    assert reply.json["error"]["type"] == "Bad Request"
    assert reply.json["error"]["param"].startswith(param)


def test_a_server_that_is_not_ready(service: Served) -> None:
    """Clients know by the type that they may try again."""
    service.state.draining = True
    try:
        reply = service.client.post(PATH, BODY)
    finally:
        service.state.draining = False
    assert (reply.status, reply.json["error"]["type"]) == (503, "overloaded_error")
    assert int(reply.headers["retry-after"]) > 0


def test_keys() -> None:
    """In either header; a wrong one beside a right one does no harm. Others get no such answers."""
    with served(api_keys=["sekret"], max_body_bytes=4096) as locked:
        locked.say("Yes")
        right, wrong = {"x-api-key": "sekret"}, {"x-api-key": "nope"}
        bearer = {"Authorization": "Bearer sekret"}
        for headers in (right, bearer, {**bearer, **wrong}, {"Authorization": "Bearer x", **right}):
            assert locked.client.post(PATH, BODY, headers=headers).status == 200
        for headers in ({}, wrong, {"Authorization": "Bearer x"}):
            reply = locked.client.post(PATH, BODY, headers=headers)
            assert reply.status == 401
            assert reply.json["error"]["type"] == "authentication_error"
        other = locked.client.post("/v1/responses", {"input": "hi"}, headers=right)
        assert (other.status, other.json) == (401, {"error": "Unauthorized"})
        large = {**BODY, "messages": [{"role": "user", "content": "x" * 5000}]}
        reply = locked.client.post(PATH, large, headers=right)
        assert (reply.status, reply.json["error"]["type"]) == (413, "request_too_large")


def test_probe_of_the_root(service: Served) -> None:
    """An agent asks with HEAD whether there is a server; what it is told does not matter to it."""
    reply = service.client.request("HEAD", "/")
    assert reply.status < 500 and reply.body == b""


# --- ends ----------------------------------------------------------------------------------------


def test_failure_after_the_start(service: Served) -> None:
    """The last event says so; the message has no end."""
    service.say("one two three four five six seven eight")
    service.harness.script.gate.clear()
    with service.client.open(PATH, {**BODY, "stream": True}) as exchange:
        assert exchange.response.status == 200
        service.harness.script.fail = EngineError("no luck")
        service.harness.script.gate.set()
        found = events(exchange.response.read().decode())
    assert found[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": FAILED},
    }
    assert "message_stop" not in [event["type"] for event in found]


def test_mistake_of_ours(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug ends the stream with an event as well, which tells nothing of it."""
    service.say("secret")

    def broken(*arguments: object) -> None:
        raise ValueError(arguments[1])

    monkeypatch.setattr(_Blocks, "add", broken)
    error = {"type": "api_error", "message": "Internal server error."}
    assert service.stream(PATH, BODY) == [{"type": "error", "error": error}]
    assert service.client.post(PATH, BODY).json == {"type": "error", "error": error}


def test_failure_of_a_whole_answer(service: Served) -> None:
    service.say("one two three")
    service.harness.script.fail = EngineError("no luck")
    reply = service.client.post(PATH, BODY)
    assert (reply.status, reply.json["error"]) == (500, {"type": "api_error", "message": FAILED})


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_ends_it(service: Served, stream: bool) -> None:
    """A client that is gone costs nothing."""
    service.say("one " * 300)
    service.harness.script.pause_s = 0.01
    engine = service.harness.engine
    try:
        with service.client.open(PATH, {**BODY, "stream": stream}) as exchange:
            if stream:
                assert exchange.response.status == 200
            wait_until(lambda: engine.stats().num_decoding == 1, "the answer to begin")
        wait_until(lambda: engine.stats().num_decoding == 0, "the row to be free")
    finally:
        service.harness.script.pause_s = 0.0


def test_inputs_that_are_no_objects(service: Served) -> None:
    """What a model calls with is shown, even if it is nothing that a tool could take."""
    with served(tool_call_parser="hermes") as hermes:
        for arguments in ("[1, 2]", '{"x": 1e999}', '{"x": ' + "[" * 150 + "]" * 150 + "}"):
            hermes.say(
                f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
            )
            reply = hermes.client.post(PATH, {**BODY, "tools": TOOLS})
            assert reply.status == 200, reply.text
            assert reply.json["content"]
