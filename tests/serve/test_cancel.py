"""A client that has gone costs nothing any more, whatever it was waiting for."""

from __future__ import annotations

import asyncio
import gc
import logging

import psutil
import pytest

from ellm_serve.serve.context import RequestContext
from ellm_serve.serve.generation import Generation
from ellm_serve.serve.keep_alive import EventResponse
from tests.serve.client import wait_until
from tests.serve.conftest import Gate, MakeServer, Pace, Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDLESS = {"prompt": "hello", "max_tokens": 2000}
CYCLES = 100


def idle(server: Server) -> bool:
    stats = server.engine.stats()
    return not (
        stats.num_decoding
        or stats.num_prefilling
        or stats.num_waiting
        or server.state.num_open
        or any(session.busy for session in stats.sessions)
    )


def decoding(server: Server) -> bool:
    return server.engine.stats().num_decoding > 0


def cycle(server: Server, stream: bool) -> None:
    """Asks, hangs up in the middle of the answer, and waits until nothing is left of it."""
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1500}
    path, body = (CHAT, chat) if stream else (COMPLETIONS, ENDLESS)
    with server.client.open(path, {**body, "stream": stream}) as exchange:
        if stream:
            next(exchange.events())
        wait_until(lambda: decoding(server), "the answer to begin")
    wait_until(lambda: idle(server), "the row to be free", 5)


def leftovers() -> dict[str, int]:
    """What a request is made of, and is still there."""
    gc.collect()
    kinds = (RequestContext, Generation, EventResponse, asyncio.Task)
    objects = gc.get_objects()
    found = {kind.__name__: sum(isinstance(thing, kind) for thing in objects) for kind in kinds}
    return found | {"descriptors": psutil.Process().num_fds()}


def test_200_cycles_leave_nothing(scripted: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """No slot, no task, no object of a request, no connection; and every one was counted."""
    caplog.set_level(logging.WARNING)
    server = scripted(executor={"before": Pace(decode=0.002)})
    cycle(server, True)
    cycle(server, False)
    before = leftovers()
    for _ in range(CYCLES):
        cycle(server, True)
        cycle(server, False)
    wait_until(lambda: leftovers() == before, f"only {before} to be left")
    aborted = server.client.metric("vllm:request_success_total", finished_reason="abort")
    assert aborted == 2 * CYCLES + 2
    assert server.client.metric("vllm:kv_cache_usage_perc") == 0
    assert server.client.post(COMPLETIONS, {**ENDLESS, "max_tokens": 3}).status == 200
    assert caplog.records == []


@pytest.mark.parametrize("stream", [True, False])
def test_during_prefill(scripted: MakeServer, stream: bool) -> None:
    """The prefill ends with the segment it is in, not after all of them."""
    server = scripted(executor={"segments": (10_000,), "before": Pace(prefill=0.01)})
    with server.client.open(COMPLETIONS, {**ENDLESS, "stream": stream}):
        wait_until(lambda: server.engine.stats().num_prefilling == 1, "prefill")
    wait_until(lambda: idle(server), "the prefill to end", 5)
    assert server.client.metric("ellm:cancelled_in_prefill_total") == 1


@pytest.mark.parametrize("stream", [True, False])
def test_before_the_engine_has_seen_it(scripted: MakeServer, stream: bool) -> None:
    """Who leaves while the engine is busy with a long step is forgotten after that step."""
    gate = Gate("prefill")
    server = scripted(executor={"before": gate})
    with server.client.open(COMPLETIONS, {**ENDLESS, "max_tokens": 2, "stream": True}) as first:
        assert gate.reached.wait(30)
        with server.client.open(COMPLETIONS, {**ENDLESS, "stream": stream}):
            wait_until(lambda: server.state.num_open == 2, "both to be there")
        wait_until(lambda: server.state.num_open == 1, "the second to be gone")
        gate.open()
        assert list(first.events())[-1] == "[DONE]"
    wait_until(lambda: idle(server), "nothing to be left")


def test_several_answers_end_together(scripted: MakeServer) -> None:
    """All rows of a request with n > 1 are freed."""
    server = scripted(executor={"before": Pace(decode=0.005)})
    body = {**ENDLESS, "n": 3, "temperature": 1.0, "stream": True}
    with server.client.open(COMPLETIONS, body) as exchange:
        next(exchange.events())
        wait_until(lambda: server.engine.stats().num_decoding == 3, "three rows")
    wait_until(lambda: idle(server), "three free rows", 5)
    aborted = server.client.metric("vllm:request_success_total", finished_reason="abort")
    assert aborted == 3


def test_what_was_computed_is_kept(scripted: MakeServer) -> None:
    """Whoever asks again, as SDKs do after a timeout, does not start from nothing."""
    server = scripted(executor={"before": Pace(decode=0.005)})
    body = {**ENDLESS, "prompt": [300] * 500}
    with server.client.open(COMPLETIONS, body):
        wait_until(lambda: decoding(server), "the answer to begin")
    wait_until(lambda: idle(server), "the row to be free", 5)
    headers = {"x-stainless-retry-count": "1"}
    again = server.client.post(COMPLETIONS, {**body, "max_tokens": 2}, headers=headers)
    assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 400
    assert server.client.metric("ellm:client_retries_total") == 1


def test_a_body_that_never_ends(scripted: MakeServer) -> None:
    """A client that hangs up inside of its own body has opened nothing."""
    server = scripted()
    exchange = server.client.open(COMPLETIONS, b'{"prompt":', headers={"Content-Length": "5000"})
    wait_until(lambda: server.state.num_open == 1, "the request to be there")
    exchange.close()
    wait_until(lambda: idle(server), "the request to be gone")


def test_the_log_says_so(scripted: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """499, as nginx has it, with what was generated by then."""
    caplog.set_level(logging.INFO, "ellm_serve.access")
    server = scripted(executor={"before": Pace(decode=0.005)})
    with server.client.open(COMPLETIONS, ENDLESS):
        wait_until(lambda: decoding(server), "the answer to begin")
    wait_until(lambda: caplog.messages, "a line")
    assert " 499 " in caplog.messages[0] and "finish_reason=abort" in caplog.messages[0]
