"""Bodies: refused before they are read or parsed when they are too large, and never in the way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ellm_serve.protocol import validation
from tests.serve.client import Client, raw
from tests.serve.conftest import MakeServer, Pace

COMPLETIONS = "/v1/completions"


def head(length: str) -> bytes:
    return (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"{length}\r\n\r\n"
    ).encode()


def test_an_announced_length_is_enough(scripted: MakeServer) -> None:
    """The refusal comes while not a byte of the body was sent."""
    server = scripted(max_body_bytes=1000)
    answer = raw(server.url, head("Content-Length: 1001"))
    assert answer.startswith(b"HTTP/1.1 413 ")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == 413 and "1000 bytes" in error["message"] and error["param"] is None


def test_nobody_is_asked_to_go_on(scripted: MakeServer) -> None:
    """A client that waits for permission to send its body gets the refusal in its place."""
    server = scripted(max_body_bytes=1000)
    asked = raw(server.url, head("Expect: 100-continue\r\nContent-Length: 5000"))
    assert asked.startswith(b"HTTP/1.1 413 ")
    allowed = raw(server.url, head("Expect: 100-continue\r\nContent-Length: 500"))
    assert allowed.startswith(b"HTTP/1.1 100 ")


def test_an_unannounced_length_is_counted(
    scripted: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks the end is not known; the limit still holds, and nothing is parsed."""

    def unexpected(body: bytes) -> object:
        raise AssertionError("parsed")

    monkeypatch.setattr(validation, "parse_json", unexpected)
    server = scripted(max_body_bytes=1000)
    chunk = b"3e8\r\n" + b"[" * 1000 + b"\r\n"
    answer = raw(server.url, head("Transfer-Encoding: chunked") + chunk * 2)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_the_limit_itself_is_allowed(scripted: MakeServer) -> None:
    """And a connection that was refused a body can be used again."""
    client = scripted(max_body_bytes=1000).client
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    assert client.post(COMPLETIONS, body.ljust(1000)).status == 200
    assert client.post(COMPLETIONS, body.ljust(1001)).status == 413
    assert client.post(COMPLETIONS, b"x" * 3_000_000).status == 413


def test_more_values_than_a_prompt_can_have(
    scripted: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Millions of numbers would hold up everybody while they are parsed; they are not."""

    def unexpected(body: bytes) -> object:
        raise AssertionError("parsed")

    client = scripted().client
    ids = b'{"prompt":[' + b"1," * 200_000 + b"1]}"
    with monkeypatch.context() as patch:
        patch.setattr(validation, "parse_json", unexpected)
        error = client.post(COMPLETIONS, ids).json["error"]
    assert error["code"] == 400 and "135168 values" in error["message"]
    # As many as that are read, and refused for what they are.
    few = b'{"prompt":[' + b"1," * 130_000 + b"1]}"
    assert "130001 input tokens" in client.post(COMPLETIONS, few).json["error"]["message"]


def conversation(content: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


HUGE: dict[str, Callable[[], bytes]] = {
    "text": lambda: conversation("x" * 27_000_000),
    "code": lambda: conversation('  call("x");\n' * 1_700_000),
    "words": lambda: conversation("some words " * 2_450_000),
    "ids": lambda: b'{"prompt":[' + b"12345," * 4_500_000 + b"1]}",
}


@pytest.mark.parametrize("kind", HUGE)
def test_huge_bodies_are_in_nobodys_way(scripted: MakeServer, kind: str) -> None:
    """27 MB come in and are refused, while probes are answered and another stream goes on.

    The bound is far above the pauses there are (a tenth of it) and far below the seconds that
    parsing, rendering or tokenising such a body in the event loop would take.
    """
    server = scripted(executor={"before": Pace(decode=0.01)})
    path = COMPLETIONS if kind == "ids" else "/v1/chat/completions"
    huge = HUGE[kind]()
    refused: list[int] = []
    body = {"prompt": "hi", "max_tokens": 2000, "stream": True}
    with server.client.open(COMPLETIONS, body) as stream:
        events = stream.events()
        next(events)
        sender = threading.Thread(
            target=lambda: refused.append(server.client.post(path, huge).status)
        )
        sender.start()
        probes, gaps = [], []
        poll = threading.Thread(target=lambda: probes.extend(times(server.client, sender)))
        poll.start()
        last = time.monotonic()
        while sender.is_alive():
            next(events)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        poll.join()
    assert refused == [400]
    assert gaps and max(gaps) < 1.0
    assert probes and max(probes) < 1.0


def times(client: Client, while_alive: threading.Thread) -> Iterator[float]:
    """How long each probe took."""
    while while_alive.is_alive():
        start = time.monotonic()
        assert client.get("/health").status == 200
        yield time.monotonic() - start
        time.sleep(0.02)
