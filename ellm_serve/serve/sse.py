"""Server-sent events: JSON as bytes of a stream, and the stream as the HTTP layer reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol, Self

from ellm_serve.errors import EllmError
from ellm_serve.protocol.errors import error_body
from ellm_serve.serve.answer import Piece
from ellm_serve.serve.generation import Generation

DONE = "data: [DONE]\n\n"

# Compact, and text as it is: what the recorded answers look like.
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def to_json(value: object) -> str:
    """One line of JSON; fast for null and for a string."""
    return "null" if value is None else _encoder.encode(value)


def time_comment(seconds: float) -> str:
    """A line clients skip: when, on the engine's clock, the next event's last token was sampled."""
    return f": t={seconds:.6f}\n\n"


class ChunkWriter(Protocol):
    """Writes the events of one kind of answer."""

    def events(self, pieces: Sequence[Piece]) -> str:
        """The events for what has come; may be empty."""

    def end(self) -> str:
        """The events behind the last piece, without [DONE]."""


class EventStream:
    """The events of one answer, ready to send; each item is one or more whole events.

    However it is left, the generation ends: read to the end, cancelled, closed or dropped, even
    before the first event was asked for. A failure becomes a last event and no [DONE] follows, so
    that nobody takes the part for the whole.
    """

    def __init__(self, generation: Generation, writer: ChunkWriter) -> None:
        self._generation = generation
        self._writer = writer
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._ended:
            try:
                events = await self._next()
            except EllmError as error:
                self._ended = True
                return f"data: {to_json(error_body(error))}\n\n".encode()
            except BaseException:
                await self.aclose()
                raise
            if events:
                return events.encode()
        raise StopAsyncIteration

    async def _next(self) -> str:
        pieces = await anext(self._generation, None)
        if pieces is not None:
            return self._writer.events(pieces)
        self._ended = True
        return self._writer.end() + DONE

    async def aclose(self) -> None:
        """Ends the generation; no more events come."""
        self._ended = True
        self._generation.close()

    def __del__(self) -> None:
        self._generation.drop()
