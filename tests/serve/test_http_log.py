"""The access log: one line per request, and only what we put there."""

from __future__ import annotations

import json
import logging
import re

import pytest

from tests.serve.client import raw, wait_until
from tests.serve.conftest import MakeServer

COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "hello", "max_tokens": 2}


def access_lines(caplog: pytest.LogCaptureFixture, number: int) -> list[str]:
    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "ellm_serve.access"]

    wait_until(lambda: len(lines()) >= number, f"{number} lines in the log")
    return lines()


def test_text_log(scripted: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """One line for each request, but none for probes that are well."""
    caplog.set_level(logging.INFO, "ellm_serve.access")
    client = scripted().client
    headers = {"X-Request-Id": "r1", "X-Session-Id": "s1"}
    client.post(COMPLETIONS, {**SHORT, "stream": True}, headers=headers)
    client.get("/health")
    client.get("/metrics")
    client.get("/nosuch?key=secret")
    first, second = access_lines(caplog, 2)
    assert re.match(
        r"POST /v1/completions 200 \d+\.\d{3}s id=r1 session=s1 stream=True n=1 prompt_tokens=3"
        r" cached_tokens=0 output_tokens=2 ",
        first,
    ), first
    assert "prefill_s=" in first and "decode_s=" in first and "finish_reason=length" in first
    assert second.startswith("GET /nosuch 404 ") and "secret" not in second


def test_json_log(scripted: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """The same as an object."""
    caplog.set_level(logging.INFO, "ellm_serve.access")
    client = scripted(access_log="json").client
    client.post(COMPLETIONS, SHORT)
    client.post(COMPLETIONS, {**SHORT, "n": 0})
    good, bad = (json.loads(line) for line in access_lines(caplog, 2))
    assert good["status"] == 200 and good["prompt_tokens"] == 3 and good["seconds"] > 0
    assert (bad["status"], bad["error"]) == (400, "InvalidRequest")


def test_no_log(scripted: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """Off is off."""
    caplog.set_level(logging.INFO, "ellm_serve.access")
    client = scripted(access_log="off").client
    assert client.post(COMPLETIONS, SHORT).status == 200
    assert client.metric("http_requests_total", handler=COMPLETIONS) == 1
    assert caplog.records == []


def test_lines_cannot_be_forged(scripted: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """Paths stay as they were sent, on one line and not too long."""
    caplog.set_level(logging.INFO, "ellm_serve.access")
    server = scripted()
    raw(server.url, b"GET /a%0aPOST%20/x\x1b HTTP/1.1\r\nHost: x\r\n\r\n")
    server.client.get("/" + "x" * 5000)
    for line in access_lines(caplog, 1):
        assert "\n" not in line and "\x1b" not in line and len(line) < 400
