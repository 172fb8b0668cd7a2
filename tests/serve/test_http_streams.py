"""Streams: at once, alive by the clock, and honest when they break."""

from __future__ import annotations

import json
import re

import pytest

from ellm_serve.serve.service import Service
from tests.serve.conftest import Gate, MakeServer, Pace

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SHORT = {"prompt": "hello", "max_tokens": 2}


def test_status_comes_with_admission(scripted: MakeServer) -> None:
    """While the first step has not even begun."""
    gate = Gate("prefill")
    server = scripted(executor={"before": gate})
    with server.client.open(
        CHAT, {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 3}
    ) as stream:
        response = stream.response
        assert response.status == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        gate.open()
        assert list(stream.events())[-1] == "[DONE]"


def test_comments_by_the_clock(scripted: MakeServer) -> None:
    """In the middle of one long step, without any help of the engine, and with progress."""
    gate = Gate("prefill")
    server = scripted(executor={"before": gate}, sse_keep_alive_interval=0.1)
    body = {"prompt": [300] * 700, "max_tokens": 2, "stream": True}
    with server.client.open(COMPLETIONS, body) as first:
        assert gate.reached.wait(30)
        with server.client.open(COMPLETIONS, body) as second:
            comments = [next(second.blocks()) for _ in range(3)]
            assert comments == [": keep-alive waiting 0 ahead"] * 3
        blocks = first.blocks()
        assert [next(blocks) for _ in range(3)] == [": keep-alive prefill 0/700"] * 3
        gate.open()
        rest = list(blocks)
    assert rest[-1] == "data: [DONE]"


def test_comments_show_progress(scripted: MakeServer) -> None:
    """The numbers grow, and comments also come between two distant tokens."""
    pace = Pace(prefill=0.02, decode=0.3)
    server = scripted(executor={"segments": (10,), "before": pace}, sse_keep_alive_interval=0.05)
    body = {"prompt": [300] * 700, "max_tokens": 3, "stream": True}
    with server.client.open(COMPLETIONS, body) as stream:
        blocks = list(stream.blocks())
    done = [int(n) for n in re.findall(r": keep-alive prefill (\d+)/700", "\n".join(blocks))]
    assert len(set(done)) >= 2 and done == sorted(done)
    first = next(i for i, block in enumerate(blocks) if block.startswith("data"))
    assert ": keep-alive" in blocks[first:]
    assert blocks[-1] == "data: [DONE]"


def test_no_comments(scripted: MakeServer) -> None:
    """They can be switched off."""
    server = scripted(executor={"before": Pace(prefill=0.3)}, sse_keep_alive_interval=0)
    with server.client.open(COMPLETIONS, {**SHORT, "stream": True}) as stream:
        assert not [block for block in stream.blocks() if block.startswith(":")]


def test_an_engine_that_fails_in_a_stream(scripted: MakeServer) -> None:
    """An event says so, and no [DONE] makes the part look like the whole."""
    numbers = iter(range(1000))

    def script(prefix: tuple[int, ...]) -> int | None:
        return 300 if next(numbers) < 5 else None

    server = scripted(script, executor={"before": Pace(decode=0.01)})
    with server.client.open(COMPLETIONS, {**SHORT, "max_tokens": 100, "stream": True}) as stream:
        events = list(stream.events())
    error = json.loads(events[-1])["error"]
    assert error["code"] == 500 and "[DONE]" not in events
    assert server.client.metric("vllm:request_success_total", finished_reason="error") == 1


def test_a_mistake_of_ours_in_a_stream(
    scripted: MakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same for the client; the log has the place, and not the text it happened on."""
    closed = []

    class Broken:
        def __aiter__(self) -> Broken:
            return self

        async def __anext__(self) -> bytes:
            raise KeyError("tulip".upper())

        async def aclose(self) -> None:
            closed.append(True)

    async def complete(*arguments: object) -> Broken:
        return Broken()

    monkeypatch.setattr(Service, "complete", complete)
    reply = scripted().client.post(COMPLETIONS, {**SHORT, "stream": True})
    assert reply.status == 200 and "[DONE]" not in reply.text
    assert json.loads(reply.text.removeprefix("data: "))["error"]["code"] == 500
    assert closed == [True]
    assert "KeyError" in caplog.text and "TULIP" not in caplog.text


def test_token_times(scripted: MakeServer) -> None:
    """Only for those who ask."""
    client = scripted().client
    body = {**SHORT, "stream": True}
    timed = client.post(COMPLETIONS, body, headers={"X-Ellm-Token-Times": "1"}).text
    assert re.search(r"^: t=\d+\.\d{6}$", timed, re.MULTILINE)
    assert ": t=" not in client.post(COMPLETIONS, body).text
