"""The client of `benchmarks.serving` reads what others read, and when."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from benchmarks.event_client import ask, events_of, metric
from ellm_serve.llm import LLM
from tests.serve.clients.answers import MAX_TOKENS, PROMPTS, QUESTIONS, answered, generated, user
from tests.serve.conftest import MakeServer, Pace, Server

GREEDY = {"max_tokens": MAX_TOKENS, "temperature": 0}


def test_completion(builtin_server: tuple[Server, LLM]) -> None:
    """Text and counts; sent, sampled and received in this order, chunk by chunk."""
    server, llm = builtin_server
    began = time.monotonic()
    stream = asyncio.run(ask(server.url, "/v1/completions", {"prompt": PROMPTS[0], **GREEDY}))
    ended = time.monotonic()
    text = "".join(chunk.data["choices"][0]["text"] for chunk in stream.chunks)
    assert text == generated(llm, PROMPTS[0])
    assert stream.usage["completion_tokens"] == MAX_TOKENS
    sampled = [chunk.sampled or 0.0 for chunk in stream.chunks]
    received = [chunk.received for chunk in stream.chunks]
    assert began < stream.sent < sampled[0]
    assert sampled == sorted(sampled) and received == sorted(received)
    assert received[-1] < ended
    assert all(seconds > 0 for seconds in stream.added_s)
    assert stream.ttft_s == received[0] - stream.sent
    assert stream.tpot_s * (MAX_TOKENS - 1) == pytest.approx(sum(stream.gaps_s))


def test_chat(builtin_server: tuple[Server, LLM]) -> None:
    """The role's chunk is the first event and brings no token."""
    server, llm = builtin_server
    body = {"messages": user(QUESTIONS[1]), **GREEDY}
    stream = asyncio.run(ask(server.url, "/v1/chat/completions", body))
    assert stream.events[0].data["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert stream.events[0] not in stream.chunks
    deltas = [chunk.data["choices"][0]["delta"] for chunk in stream.chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == answered(llm, QUESTIONS[1])


def test_time_of_each_token(scripted: MakeServer) -> None:
    """It is the engine's: tokens are as far apart as its steps take."""
    server = scripted(executor={"before": Pace(decode=0.05)})
    body = {"prompt": "hello", "max_tokens": 6}
    stream = asyncio.run(ask(server.url, "/v1/completions", body))
    sampled = [chunk.sampled or 0.0 for chunk in stream.chunks]
    assert len(sampled) == 6
    assert all(after - before >= 0.05 for before, after in itertools.pairwise(sampled))


@pytest.mark.parametrize("step", range(1, 80))
def test_received_with_the_last_byte(step: int) -> None:
    """However the network cuts an answer, also inside of chunk sizes and of characters."""
    frames = [': t=1.5\n\ndata: {"é": 1}\n\n', ": keep-alive\n\n", ": t=2.5\n\nda", "ta: {}\n\n"]
    raw, ends = b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n", []
    for frame in [*frames, "data: {}\n\ndata: [DONE]\n\n"]:
        raw += f"{len(frame.encode()):x}\r\n".encode() + frame.encode()
        ends.append(len(raw))
        raw += b"\r\n"
    raw += b"0\r\n\r\n"
    reads = [(float(at), raw[at : at + step]) for at in range(0, len(raw), step)]
    events = list(events_of(reads))
    assert [(event.data, event.sampled) for event in events] == [
        ({"é": 1}, 1.5),
        ({}, 2.5),
        ({}, None),
    ]
    # A read is known by where it begins; it brought a chunk's last byte.
    for event, end in zip(events, (ends[0], ends[3], ends[4]), strict=True):
        assert event.received < end <= event.received + step


def test_a_cut_stream() -> None:
    """Without [DONE] it is not whole."""
    raw = b"HTTP/1.1 200 OK\r\n\r\na\r\ndata: {}\n\n\r\n0\r\n\r\n"
    with pytest.raises(RuntimeError, match="cut short"):
        list(events_of([(0.0, raw)]))


def test_refusal(builtin_server: tuple[Server, LLM]) -> None:
    """Nothing is measured of an answer that is none."""
    with pytest.raises(RuntimeError, match="temperature must be in"):
        asyncio.run(
            ask(builtin_server[0].url, "/v1/completions", {"prompt": "a", "temperature": 3})
        )


def test_metric(scripted: MakeServer) -> None:
    """One more prefill after one more request."""
    server = scripted()
    name = "vllm:request_prefill_time_seconds_count"
    assert metric(server.url, name) == 0
    asyncio.run(ask(server.url, "/v1/completions", {"prompt": "hello", "max_tokens": 1}))
    assert metric(server.url, name) == 1
