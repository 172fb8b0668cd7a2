"""Server-sent events: JSON as bytes of a stream, and the stream as the HTTP layer reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol, Self, TypeVar

from ellm_serve.errors import EllmError
from ellm_serve.protocol.errors import error_body

_Piece = TypeVar("_Piece")
_Piece_co = TypeVar("_Piece_co", covariant=True)
_Piece_contra = TypeVar("_Piece_contra", contravariant=True)

DONE = "data: [DONE]\n\n"

# Compact, and text as it is: what the recorded answers look like.
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def to_json(value: object) -> str:
    """One line of JSON; fast for null and for a string."""
    return "null" if value is None else _encoder.encode(value)


def time_comment(seconds: float) -> str:
    """A line clients skip: when, on the engine's clock, the next event's last token was sampled."""
    return f": t={seconds:.6f}\n\n"


class Source(Protocol[_Piece_co]):
    """Where the pieces of an answer come from: a `Generation` or a `ChatRun`."""

    async def __anext__(self) -> Sequence[_Piece_co]:
        """What has come since the last time."""

    def close(self) -> None:
        """Ends the generation; in the loop only."""

    def drop(self) -> None:
        """The same, from any thread."""


class ChunkWriter(Protocol[_Piece_contra]):
    """Writes the events of one kind of answer."""

    def events(self, pieces: Sequence[_Piece_contra], /) -> str:
        """The events for what has come; may be empty."""

    def end(self) -> str:
        """The events behind the last piece, up to the last of the stream."""

    def failure(self, error: EllmError, /) -> str:
        """The event that ends the stream instead: the answer is not whole."""


def failure_chunk(error: EllmError) -> str:
    """The failure as OpenAI's clients know it."""
    return f"data: {to_json(error_body(error))}\n\n"


class EventStream:
    """The events of one answer, ready to send; each item is one or more whole events.

    However it is left, the generation ends: read to the end, cancelled, closed or dropped, even
    before the first event was asked for. A failure becomes a last event and no [DONE] follows, so
    that nobody takes the part for the whole.
    """

    def __init__(self, source: Source[_Piece], writer: ChunkWriter[_Piece]) -> None:
        self._source: Source[Any] = source
        self._writer: ChunkWriter[Any] = writer
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._ended:
            try:
                events = await self._next()
            except EllmError as error:
                self._ended = True
                return self._writer.failure(error).encode()
            except BaseException:
                await self.aclose()
                raise
            if events:
                return events.encode()
        raise StopAsyncIteration

    async def _next(self) -> str:
        try:
            pieces = await self._source.__anext__()
        except StopAsyncIteration:
            self._ended = True
            return self._writer.end()
        return self._writer.events(pieces)

    async def aclose(self) -> None:
        """Ends the generation; no more events come."""
        self._ended = True
        self._source.close()

    def __del__(self) -> None:
        self._source.drop()
