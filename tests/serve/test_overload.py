"""More than the service can take is refused at once, in words clients understand."""

from __future__ import annotations

from contextlib import ExitStack

from tests.serve.client import wait_until
from tests.serve.conftest import Gate, MakeServer

COMPLETIONS = "/v1/completions"
STREAM = {"prompt": "hello", "max_tokens": 2, "stream": True}


def test_a_full_queue(scripted: MakeServer) -> None:
    """429 with Retry-After; those in the queue are answered, and then there is room again."""
    gate = Gate("prefill")
    server = scripted(executor={"before": gate}, engine={"max_queued_requests": 2})
    client = server.client
    assert client.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 0
    with ExitStack() as stack:
        streams = [stack.enter_context(client.open(COMPLETIONS, STREAM))]
        assert gate.reached.wait(30)
        streams += [stack.enter_context(client.open(COMPLETIONS, STREAM)) for _ in range(2)]
        wait_until(lambda: server.engine.stats().num_waiting == 2, "two in the queue")
        for body in (STREAM, {**STREAM, "stream": False}):
            reply = client.post(COMPLETIONS, body)
            assert reply.status == 429
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.headers["content-type"] == "application/json"
            error = reply.json["error"]
            assert error["code"] == "server_overloaded"
            assert error["type"] == "Too Many Requests" and error["param"] is None
        assert client.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 2
        assert client.metric("vllm:num_requests_waiting") == 2
        assert client.metric("vllm:num_requests_running") == 1
        gate.open()
        for stream in streams:
            assert list(stream.events())[-1] == "[DONE]"
    assert client.post(COMPLETIONS, {**STREAM, "stream": False}).status == 200


def test_prompt_tokens_are_bounded_too(scripted: MakeServer) -> None:
    """A few long prompts fill the queue as well as many short ones."""
    gate = Gate("prefill")
    server = scripted(executor={"before": gate}, engine={"max_queued_tokens": 500})
    long = {**STREAM, "prompt": [300] * 400}
    with server.client.open(COMPLETIONS, STREAM) as first:
        assert gate.reached.wait(30)
        with server.client.open(COMPLETIONS, long) as second:
            assert second.response.status == 200
            assert server.client.post(COMPLETIONS, long).status == 429
            rejections = "vllm:admission_rejections_total"
            assert server.client.metric(rejections, reason="max_num_queued_tokens") == 1
            assert server.client.metric(rejections, reason="max_num_queued_reqs") == 0
            gate.open()
            assert list(second.events())[-1] == "[DONE]"
        assert list(first.events())[-1] == "[DONE]"


def test_who_left_the_queue_makes_room(scripted: MakeServer) -> None:
    """A queued client that hangs up is dropped before its prefill begins."""
    gate = Gate("prefill")
    server = scripted(executor={"before": gate}, engine={"max_queued_requests": 1})
    with server.client.open(COMPLETIONS, STREAM) as first:
        assert gate.reached.wait(30)
        with server.client.open(COMPLETIONS, {**STREAM, "prompt": [301] * 50}) as second:
            assert second.response.status == 200
            assert server.client.post(COMPLETIONS, STREAM).status == 429
        wait_until(lambda: server.state.num_open == 1, "the second one to be gone")
        gate.open()
        assert list(first.events())[-1] == "[DONE]"
    assert server.client.post(COMPLETIONS, {**STREAM, "stream": False}).status == 200
    assert server.client.metric("vllm:request_success_total", finished_reason="abort") == 1
    assert server.engine.stats().steps.num_prefill_tokens < 50
