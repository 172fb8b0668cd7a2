"""/v1/responses over HTTP, with a model that says what it is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ellm_serve.errors import EngineError
from ellm_serve.protocol.responses import ResponseObject
from ellm_serve.serve.response_items import ResponseItems
from tests.serve.client import wait_until
from tests.serve.events import CALL, SCHEMA, Served, events, served

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "qwen3-coder", "input": "hi"}
TOOLS = [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]
FAILED = "The engine failed while it worked on this request."
# Different in every answer.
NEW = ("id", "created_at", "call_id", "item_id", "input_tokens_details", "previous_response_id")


@pytest.fixture(scope="module")
def service() -> Iterator[Served]:
    with served() as running:
        yield running


def plain(value: Any) -> Any:
    """A value without what is new every time."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: plain(item) for key, item in value.items() if key not in NEW}


def told(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer at the end of a stream, after checking what led to it."""
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    assert [event["type"] for event in stream[:2]] == ["response.created", "response.in_progress"]
    assert all(list(event) == sorted(event) for event in stream)
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in stream[2:-1]:
        assert event["output_index"] == len(items)
        match event["type"].removeprefix("response.").split("."):
            case ["output_item", "added"]:
                assert event["item"]["status"] == "in_progress"
                texts, name = [], event["item"]["id"]
            case [_, "delta"]:
                assert event["item_id"] == name
                texts.append(event["delta"])
            case ["output_text" | "reasoning_text", "done"]:
                assert event["text"] == "".join(texts)
            case ["function_call_arguments", "done"]:
                assert event["arguments"] == "".join(texts)
            case ["content_part" | "reasoning_part", "done"]:
                assert event["part"]["text"] == "".join(texts)
            case ["output_item", "done"]:
                assert event["item"]["id"] == name
                items.append(event["item"])
    last: dict[str, Any] = stream[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["output"] == items
    created = stream[0]["response"]
    assert created["output"] == [] and created["usage"] is None
    assert created["id"] == last["response"]["id"]
    response: dict[str, Any] = last["response"]
    return response


def both(service: Served, **body: Any) -> dict[str, Any]:
    """The whole answer, after checking that a stream tells the same."""
    reply = service.client.post(PATH, {**BODY, **body})
    assert reply.status == 200, reply.text
    answer: dict[str, Any] = reply.json
    assert ResponseObject.model_validate(answer).id == answer["id"]
    assert plain(told(service.stream(PATH, {**BODY, **body}))) == plain(answer)
    return answer


# --- answers -------------------------------------------------------------------------------------


def test_text(service: Served) -> None:
    """One message of one text."""
    ids = service.say("Hello, wörld")
    answer = both(service)
    [message] = answer["output"]
    assert message["id"].startswith("msg_") and message["status"] == "completed"
    assert message["content"] == [
        {"annotations": [], "text": "Hello, wörld", "type": "output_text", "logprobs": None}
    ]
    assert answer["status"] == "completed" and answer["incomplete_details"] is None
    usage = answer["usage"]
    assert usage["output_tokens"] == len(ids)
    assert usage["total_tokens"] == usage["input_tokens"] + len(ids)


def test_call(service: Served) -> None:
    """Text and call are items of their own."""
    service.say(f"Let me check.\n{CALL}")
    answer = both(service, tools=TOOLS)
    message, call = answer["output"]
    assert message["content"][0]["text"] == "Let me check."
    assert (call["type"], call["name"], call["status"]) == (
        "function_call",
        "get_weather",
        "completed",
    )
    assert call["arguments"] == '{"city": "San José", "days": 3}'
    assert call["id"].startswith("fc_") and call["call_id"].startswith("chatcmpl-tool-")
    assert answer["tool_choice"] == "auto"
    assert answer["tools"][0]["parameters"] == SCHEMA


def test_thought(service: Served) -> None:
    """It is an item before the message, and its tokens are counted."""
    service.say("<think>\nI think so.\n</think>\n\nHello.")
    answer = both(service)
    thought, message = answer["output"]
    assert thought["type"] == "reasoning" and thought["summary"] == []
    assert thought["content"] == [{"text": "\nI think so.\n", "type": "reasoning_text"}]
    assert message["content"][0]["text"] == "\n\nHello."
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 3


def test_nothing(service: Served) -> None:
    """An answer of no text has no items."""
    service.say("")
    assert both(service)["output"] == []


def test_limit(service: Served) -> None:
    """An answer that was cut says so, and so does what it was cut in."""
    service.say("One, two, three, four")
    answer = both(service, max_output_tokens=2)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["max_output_tokens"] == 2
    ids = service.say(CALL)
    answer = both(service, tools=TOOLS, max_output_tokens=len(ids) // 2)
    assert [item["status"] for item in answer["output"]] == ["incomplete"]


def test_echo(service: Served) -> None:
    """What was asked for, and what was in force."""
    service.say("Yes")
    answer = both(
        service,
        instructions="Be brief.",
        metadata={"a": "b"},
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "low"},
        tool_choice="none",
        parallel_tool_calls=False,
        truncation="auto",
        user="u",
        max_tool_calls=3,
        prompt_cache_key="k",
        safety_identifier="s",
    )
    assert answer["instructions"] == "Be brief." and answer["metadata"] == {"a": "b"}
    assert (answer["temperature"], answer["top_p"]) == (0.5, 0.9)
    assert (answer["presence_penalty"], answer["frequency_penalty"]) == (0.25, 0.0)
    assert answer["reasoning"] == {"effort": "low", "summary": "auto"}
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert answer["tool_choice"] == "none" and answer["parallel_tool_calls"] is False
    assert (answer["truncation"], answer["user"], answer["max_tool_calls"]) == ("auto", "u", 3)
    assert (answer["prompt_cache_key"], answer["safety_identifier"]) == ("k", "s")
    default = both(service)
    assert (default["temperature"], default["top_p"]) == (0.7, 0.8)
    assert default["text"] is None and "prompt_cache_key" not in default and "error" not in default


def test_schema_in_the_echo(service: Served) -> None:
    """With its name on the wire."""
    service.say('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "n", "schema": schema}
    reply = service.client.post(PATH, {**BODY, "text": {"format": form}, "max_output_tokens": 4})
    assert reply.status == 200, reply.text
    assert reply.json["text"] == {"format": form}


# --- what is kept --------------------------------------------------------------------------------


def test_an_answer_can_be_fetched(service: Served) -> None:
    """As it was sent, streamed or not; unless it was not to be kept."""
    service.say("Hello")
    whole = service.client.post(PATH, BODY)
    assert service.client.get(f"{PATH}/{whole.json['id']}?include=x").body == whole.body
    streamed = told(service.stream(PATH, BODY))
    assert service.client.get(f"{PATH}/{streamed['id']}").json == streamed
    hidden = service.client.post(PATH, {**BODY, "store": False}).json["id"]
    assert service.client.get(f"{PATH}/{hidden}").status == 404


def test_going_on(service: Served) -> None:
    """The conversation so far is part of the prompt, and its tokens are not computed again."""
    service.say(f"Let me check.\n{CALL}")
    first = service.client.post(PATH, {**BODY, "tools": TOOLS, "instructions": "Old."}).json
    call = first["output"][1]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    service.say("Sunny.")
    body = {
        **BODY,
        "tools": TOOLS,
        "instructions": "New.",
        "previous_response_id": first["id"],
        "input": [output],
    }
    second = service.client.post(PATH, body)
    assert second.status == 200 and second.json["previous_response_id"] == first["id"]
    messages = [
        {"role": "system", "content": "New."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "Let me check.",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": call["arguments"]},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    function = {"name": "get_weather", "parameters": SCHEMA}
    chat = {"messages": messages, "tools": [{"type": "function", "function": function}]}
    count = service.client.post("/tokenize", chat).json["count"]
    assert second.json["usage"]["input_tokens"] == count
    third = told(
        service.stream(PATH, {**body, "previous_response_id": second.json["id"], "input": "more"})
    )
    assert third["usage"]["input_tokens"] > count
    assert third["usage"]["input_tokens_details"]["cached_tokens"] > count // 2


def test_sending_items_back(service: Served) -> None:
    """Without the store a client sends all items again, as it got them."""
    service.say(f"<think>Hm.</think>Let me check.\n{CALL}")
    first = service.client.post(PATH, {**BODY, "tools": TOOLS, "store": False}).json
    kept = service.client.post(PATH, {**BODY, "tools": TOOLS}).json
    call = first["output"][2]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    items = [{"role": "user", "content": "hi"}, *first["output"], output]
    again = service.client.post(PATH, {**BODY, "tools": TOOLS, "input": items})
    assert again.status == 200, again.text
    follow = {"previous_response_id": kept["id"], "input": [output]}
    on = service.client.post(PATH, {**BODY, "tools": TOOLS, **follow})
    assert on.json["usage"]["input_tokens"] == again.json["usage"]["input_tokens"]


def test_unknown_answers(service: Served) -> None:
    """In the recorded words, wherever they are spoken of."""
    expected = {
        "message": "Response with id 'resp_x' not found.",
        "type": "invalid_request_error",
        "param": "response_id",
        "code": 404,
    }
    for stream in (False, True):
        body = {**BODY, "previous_response_id": "resp_x", "stream": stream}
        reply = service.client.post(PATH, body)
        assert (reply.status, reply.json["error"]) == (404, expected)
    for reply in (
        service.client.get(f"{PATH}/resp_x"),
        service.client.post(f"{PATH}/resp_x/cancel"),
    ):
        assert (reply.status, reply.json["error"]) == (404, expected)


def test_cancelling(service: Served) -> None:
    """There is nothing to cancel once a client has its answer."""
    service.say("Hello")
    name = service.client.post(PATH, BODY).json["id"]
    reply = service.client.post(f"{PATH}/{name}/cancel")
    assert (reply.status, reply.json["error"]["message"]) == (
        400,
        "Cannot cancel a synchronous response.",
    )


def test_keys_see_their_own_answers() -> None:
    with served(api_keys=["one", "two"]) as locked:
        locked.say("Hello")
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        name = locked.client.post(PATH, BODY, headers=one).json["id"]
        assert locked.client.get(f"{PATH}/{name}", headers=one).status == 200
        assert locked.client.get(f"{PATH}/{name}", headers=two).status == 404
        assert locked.client.get(f"{PATH}/{name}").status == 401
        body = {**BODY, "previous_response_id": name}
        assert locked.client.post(PATH, body, headers=two).status == 404


def test_sessions(service: Served) -> None:
    """An agent's headers, or the key of the cache."""
    service.say("Yes")
    for headers, body, name in (
        ({"session-id": "s-head", "thread-id": "t"}, {"prompt_cache_key": "k1"}, "s-head"),
        ({}, {"prompt_cache_key": "k2"}, "k2"),
        ({}, {"prompt_cache_key": "k3", "session_id": "own"}, "own"),
    ):
        assert service.client.post(PATH, {**BODY, **body}, headers=headers).status == 200
        assert name in service.sessions


# --- refusals and ends ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        ({"model": "nope"}, 404, "NotFoundError", "model"),
        ({"background": True}, 400, "BadRequestError", "background"),
        ({"input": [{"type": "alien"}]}, 400, "BadRequestError", "input[0].type"),
        ({"max_output_tokens": 0}, 400, "BadRequestError", "max_tokens"),
        ({"temperature": 3.0}, 400, "BadRequestError", "temperature"),
        ({"input": "hello world " * 3000}, 400, "BadRequestError", "input_tokens"),
        ({"input": None}, 400, "Bad Request", "body.input"),
        ({"input": 5}, 400, "Bad Request", "body.input"),
        ({"reasoning": {"effort": "huge"}}, 400, "Bad Request", "body.reasoning.effort"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(
    service: Served, body: dict[str, Any], status: int, kind: str, param: str, stream: bool
) -> None:
    """In OpenAI's envelope, with the real status whether or not a stream was wanted."""
    reply = service.client.post(PATH, {**BODY, **body, "stream": stream})
    error = reply.json["error"]
    assert (reply.status, error["type"], error["code"]) == (status, kind, status)
    assert error["param"] == param


def test_too_deep_to_be_repeated(service: Served) -> None:
    """What could not be written into the answer is refused before there is one."""
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"a": deep}
    tool = {**TOOLS[0], "parameters": deep}
    for body in ({"metadata": deep}, {"tools": [tool]}, {"reasoning": {"x": deep}}):
        assert service.client.post(PATH, {**BODY, **body}).status == 400


def test_failure_after_the_start(service: Served) -> None:
    """The last event says so; nothing is kept."""
    service.say("one two three four five six seven eight")
    service.harness.script.gate.clear()
    with service.client.open(PATH, {**BODY, "stream": True}) as exchange:
        assert exchange.response.status == 200
        service.harness.script.fail = EngineError("no luck")
        service.harness.script.gate.set()
        found = events(exchange.response.read().decode())
    assert found[-1]["type"] == "response.failed"
    failed = found[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"] == {"code": "server_error", "message": FAILED}
    assert service.client.get(f"{PATH}/{failed['id']}").status == 404


def test_mistake_of_ours(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug ends the stream with an event as well, which tells nothing of it."""
    service.say("secret")

    def broken(*arguments: object) -> None:
        raise ValueError(arguments[1])

    monkeypatch.setattr(ResponseItems, "add", broken)
    [event] = service.stream(PATH, BODY)
    assert (event["type"], event["message"]) == ("error", "Internal server error.")


def test_leaving_ends_it(service: Served) -> None:
    """A client that is gone costs nothing."""
    service.say("one " * 300)
    service.harness.script.pause_s = 0.01
    engine = service.harness.engine
    try:
        with service.client.open(PATH, {**BODY, "stream": True}) as exchange:
            assert exchange.response.status == 200
            wait_until(lambda: engine.stats().num_decoding == 1, "the answer to begin")
        wait_until(lambda: engine.stats().num_decoding == 0, "the row to be free")
    finally:
        service.harness.script.pause_s = 0.0
