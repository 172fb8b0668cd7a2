"""`ellm-serve serve` on a Ray cluster of its own, from the first line to the last process.

One service for the whole module: tests run in the order of the text, and the last one ends it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from ellm_serve.llm import LLM
from tests.serve.client import wait_until
from tests.serve.ray.command import SHM, Service

pytestmark = pytest.mark.ray

ENGINE = {"sequence_length": 8192, "sockets": 2, "threads": 2}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
PROMPT = "def fibonacci(n):"
LONG = 7000


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """Two workers that share the machine's cores."""
    with Service.serve("--model", "builtin", *FLAGS, "--drain-timeout", "90") as service:
        yield service


@pytest.fixture(scope="module")
def expected() -> str:
    """What the same engine says without Ray and HTTP, to the end of a long greedy answer."""
    with LLM("builtin", **ENGINE) as llm:
        sampling = llm.sampling(temperature=0.0, max_tokens=LONG, ignore_eos=True)
        return llm.generate(PROMPT, sampling)[0].text


def body(max_tokens: int, **fields: object) -> dict[str, object]:
    return {
        "model": "builtin", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, **fields,
    }  # fmt: skip


def text_of(events: list[str]) -> str:
    return "".join(json.loads(event)["choices"][0]["text"] for event in events if event[0] == "{")


def test_ready_when_warm_and_not_before(service: Service) -> None:
    """The port answers while the engine loads: alive, not ready; and one line says when it is."""
    # 0: nobody listens; 404: Serve does not know the application yet.
    assert [status for status in service.wait_ready() if status not in (0, 404)] == [503, 200]
    wait_until(lambda: "ready:" in service.output, "ready line")
    assert service.client.get("/health").status == 200
    first, second = service.output.splitlines()
    assert first.startswith(f"ready: {service.client.url}/v1 serves builtin (2 sockets, 2 threads,")
    assert second.startswith(f"try: curl {service.client.url}/v1/chat/completions ")


def test_a_request_has_one_id(service: Service) -> None:
    """Serve's proxy writes the header; a second one from us would reach clients as "id, id"."""
    port = int(service.client.url.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/v1/models", headers={"X-Request-Id": "mine"})
        response = connection.getresponse()
        response.read()
    assert response.headers.get_all("x-request-id") == ["mine"]


def test_same_text_as_in_process(service: Service, expected: str) -> None:
    """Neither HTTP nor Ray changes a token."""
    answer = service.client.post("/v1/completions", body(200)).json
    text: str = answer["choices"][0]["text"]
    assert len(text) > 200
    assert expected.startswith(text)


def test_streams_token_by_token(service: Service, expected: str) -> None:
    """Serve's proxy passes chunks on as they come."""
    with service.client.open("/v1/completions", body(200, stream=True)) as stream:
        events = list(stream.events())
    assert len(events) > 50
    assert events[-1] == "[DONE]"
    assert expected.startswith(text_of(events))


def test_only_this_machine_can_reach_it(service: Service) -> None:
    """Every listening port of every process, Ray's own included: who reaches one can run code."""
    listening = {
        connection.laddr.ip
        for process in [service.process, *service.children()]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_no_key_in_sight_and_no_noise(service: Service) -> None:
    """The terminal has our lines: what was loaded, and a line per request; nothing of Ray's."""
    errors = service.errors
    assert "2 sockets, 2 threads" in errors
    assert errors.count("POST /v1/completions 200") == 2
    assert "Traceback" not in errors
    assert "raylet" not in errors
    assert "serve --" not in errors


def test_a_worker_dies_under_a_stream(service: Service, expected: str) -> None:
    """The stream goes on with the tokens it would have had."""
    [worker, _] = [one for one in service.children() if "SocketWorker" in "".join(one.cmdline())]
    with service.client.open("/v1/completions", body(LONG, stream=True)) as stream:
        stream.set_timeout(120)
        events = stream.events()
        first = next(events)
        worker.kill()
        rest = list(events)
    assert not worker.is_running()
    assert rest[-1] == "[DONE]"
    assert text_of([first, *rest]) == expected


def test_the_replica_dies(service: Service, expected: str) -> None:
    """Its streams break without a [DONE]; Serve starts another, which answers as before."""
    replica = service.child("ServeReplica")
    received = []
    with service.client.open("/v1/completions", body(LONG, stream=True)) as stream:
        stream.set_timeout(60)
        events = stream.events()
        received.append(next(events))
        replica.kill()
        # However the connection ends.
        with contextlib.suppress(http.client.HTTPException, OSError, AssertionError):
            received.extend(events)
    assert "[DONE]" not in received
    wait_until(lambda: _answers(service, expected), "an answer of the new replica", 120)


def _answers(service: Service, expected: str) -> bool:
    try:
        reply = service.client.post("/v1/completions", body(50), timeout_s=60)
    except (OSError, http.client.HTTPException):
        return False
    if reply.status != 200:
        return False
    text: Any = reply.json["choices"][0]["text"]
    return bool(text) and expected.startswith(text)


def test_sigterm_drains(service: Service, expected: str) -> None:
    """New requests are refused, the running stream ends as it should, and nothing is left."""
    processes = service.children()
    with service.client.open("/v1/completions", body(LONG, stream=True)) as stream:
        stream.set_timeout(120)
        events = stream.events()
        first = next(events)
        service.process.terminate()
        wait_until(lambda: service.ready() == 503, "not ready")
        refused = service.client.post("/v1/completions", body(1))
        rest = list(events)
    assert refused.status == 503
    assert "Retry-After".lower() in refused.headers
    assert refused.json["error"]["code"] == 503
    assert rest[-1] == "[DONE]"
    assert text_of([first, *rest]) == expected
    assert service.process.wait(120) == 0
    _, alive = psutil.wait_procs(processes, 10)
    assert alive == []
    left = set(os.listdir(SHM)) - service.segments_before
    assert [name for name in left if name.startswith("ellm-")] == []
    assert "Traceback" not in service.errors
