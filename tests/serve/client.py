"""A small HTTP client over plain sockets: it can send half a request, and hang up when it likes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from ellm_serve.closing import Closing

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Reply:
    """A whole answer; names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass
class Client:
    """Requests to one server; every request has its own connection."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Reply:
        """One request. A body that is not bytes is sent as JSON."""
        with Exchange(self.url, method, path, body, {**self.headers, **(headers or {})}) as open_:
            open_.set_timeout(timeout_s)
            return open_.reply()

    def get(self, path: str, **options: Any) -> Reply:
        return self.request("GET", path, **options)

    def post(self, path: str, body: object = None, **options: Any) -> Reply:
        return self.request("POST", path, body, **options)

    def open(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> Exchange:
        """A request that has been sent and whose answer is read piece by piece, or not at all."""
        return Exchange(self.url, "POST", path, body, {**self.headers, **(headers or {})})

    def metric(self, name: str, **labels: str) -> float:
        """The value of a series of /metrics; labels that are not given may be anything."""
        found = [
            value
            for series, values, value in samples(self.get("/metrics").text)
            if series == name and labels.items() <= values.items()
        ]
        assert len(found) == 1, f"{len(found)} series {name} with {labels}"
        return found[0]


class Exchange(Closing):
    """A request on its connection. Leaving the block closes the connection."""

    def __init__(
        self, url: str, method: str, path: str, body: object, headers: Mapping[str, str]
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._connection = HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
        content = body if body is None or isinstance(body, bytes) else json.dumps(body)
        kind = {} if body is None else {"Content-Type": "application/json"}
        self._connection.request(method, path, content, {**kind, **headers})
        self._response: HTTPResponse | None = None

    @property
    def response(self) -> HTTPResponse:
        """Waits for status and headers."""
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    def set_timeout(self, seconds: float) -> None:
        assert self._connection.sock is not None
        self._connection.sock.settimeout(seconds)

    def reply(self) -> Reply:
        """The whole answer."""
        headers = {name.lower(): value for name, value in self.response.getheaders()}
        return Reply(self.response.status, headers, self.response.read())

    def blocks(self) -> Iterator[str]:
        """The blocks of an event stream, comments included, as they come."""
        lines: list[str] = []
        for line in self.response:
            text = line.decode().rstrip("\n")
            if text:
                lines.append(text)
            else:
                yield "\n".join(lines)
                lines.clear()
        assert not lines, "the stream ended inside of an event"

    def events(self) -> Iterator[str]:
        """The data of the events, [DONE] included."""
        for block in self.blocks():
            if not block.startswith(":"):
                yield block.removeprefix("data: ")

    def close(self) -> None:
        """Hangs up."""
        if self._response is not None:
            self._response.close()
        self._connection.close()


def raw(url: str, data: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
    """What the server says to these bytes before it is silent or closes."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 80), timeout_s) as sock:
        sock.sendall(data)
        return sock.recv(1 << 16)


def samples(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of every series in Prometheus's text format."""
    for line in page.splitlines():
        if line.startswith("#"):
            continue
        series, _, value = line.rpartition(" ")
        name, _, rest = series.partition("{")
        pairs = (pair.partition("=") for pair in rest.rstrip("}").split('",') if pair)
        yield name, {key: text.strip('"') for key, _, text in pairs}, float(value)


def wait_until(condition: Any, what: str, timeout_s: float = 30.0) -> None:
    """Polls; fails when it takes too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.01)
