"""A client for streams of events that notes when each byte was read.

Nothing is parsed while an answer comes: reads are kept with their times and taken apart afterwards,
so that the client takes as little as it can from the machine that it shares with the server.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

ANSWER_S = 1800.0
_TIME = ": t="
_DATA = "data: "
_DONE = "[DONE]"

Read = tuple[float, bytes]  # when, and what


@dataclass(frozen=True, slots=True)
class Event:
    """One chunk. `received` and `sampled` (by the engine, of its last token) are seconds on
    CLOCK_MONOTONIC, which all processes of a machine share."""

    data: dict[str, Any]
    received: float
    sampled: float | None


@dataclass(frozen=True, slots=True)
class Stream:
    """A whole answer. `sent` is when the request was written, on an open connection."""

    sent: float
    events: list[Event]

    @property
    def chunks(self) -> list[Event]:
        """Those that bring tokens."""
        return [event for event in self.events if event.sampled is not None]

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts."""
        usage: dict[str, Any] = self.events[-1].data["usage"]
        return usage

    @property
    def ttft_s(self) -> float:
        """Until the first event: a chat's role comes with the first token."""
        return self.events[0].received - self.sent

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first."""
        chunks = self.chunks
        span_s = chunks[-1].received - chunks[0].received
        return span_s / (int(self.usage["completion_tokens"]) - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between chunks. A token whose text is half a character brings no chunk."""
        times = [chunk.received for chunk in self.chunks]
        return [after - before for before, after in zip(times, times[1:], strict=False)]

    @property
    def added_s(self) -> list[float]:
        """For each chunk: from the engine's sampling to our reading."""
        return [chunk.received - (chunk.sampled or 0.0) for chunk in self.chunks]


class _Reader(asyncio.Protocol):
    """Keeps what comes, and when."""

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.monotonic(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)


async def ask(url: str, path: str, body: Mapping[str, object]) -> Stream:
    """Posts a request for a stream, and reads it to its end.

    Raises:
        RuntimeError: another status than 200, or the stream was cut short.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    loop = asyncio.get_running_loop()
    transport, reader = await loop.create_connection(_Reader, parts.hostname, parts.port)
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        "Content-Type: application/json\r\nX-Ellm-Token-Times: 1\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    try:
        sent = time.monotonic()
        transport.write((head + content).encode("ascii"))
        async with asyncio.timeout(ANSWER_S):
            await reader.ended
    finally:
        transport.close()
    return Stream(sent, list(events_of(reader.reads)))


def metric(url: str, name: str) -> float:
    """The value of the one series of that name at /metrics."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    [value] = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{name}{{")]
    return float(value)


# --- taking apart --------------------------------------------------------------------------------


def events_of(reads: Sequence[Read]) -> Iterator[Event]:
    """The chunks of an HTTP answer, in order; each was received with its last byte.

    Raises:
        RuntimeError: as `ask`.
    """
    raw = b"".join(data for _, data in reads)
    head, _, _ = raw.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise RuntimeError(raw.decode(errors="replace"))
    read_ends = list(accumulate(len(data) for _, data in reads))
    body, places = _dechunk(raw, len(head) + 4)
    sampled: float | None = None
    start = 0
    while (end := body.find(b"\n\n", start)) >= 0:
        text = body[start:end].decode()
        place = places[bisect_left(places, (end + 2, 0))][1]
        start = end + 2
        if text.startswith(_TIME):
            sampled = float(text.removeprefix(_TIME))
        elif text == _DATA + _DONE:
            return
        elif text.startswith(_DATA):
            received = reads[bisect_left(read_ends, place)][0]
            yield Event(json.loads(text.removeprefix(_DATA)), received, sampled)
            sampled = None
    raise RuntimeError(f"the stream was cut short: {body[-500:].decode(errors='replace')}")


def _dechunk(raw: bytes, start: int) -> tuple[bytes, list[tuple[int, int]]]:
    """The body, and for the end of each of its HTTP chunks the place in the body and in `raw`."""
    body = bytearray()
    places = []
    while (line := raw.find(b"\r\n", start)) >= 0:
        size = int(raw[start:line], 16)
        start = line + 2 + size
        body += raw[line + 2 : start]
        places.append((len(body), start))
        start += 2
        if size == 0:
            break
    return bytes(body), places
