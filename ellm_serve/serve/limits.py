"""Bodies of requests: bounded before they are read, and parsed beside the event loop.

A body in memory is at most `max_bytes` long, announced or not. Reading JSON keeps the interpreter's
lock, some 5 ms per MB of text but a second and more per million numbers, validation included; so a
body with more values than any prompt could need is refused by counting its commas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.types import Receive

from ellm_serve.errors import BodyTooLarge, InvalidBody
from ellm_serve.serve.keep_alive import ClientGone

Parsed = TypeVar("Parsed")

# Bodies up to here are parsed in the event loop: a thread would cost more.
_INLINE_BYTES = 64 << 10
# Values a body may have: some for each token of a context, and enough for lists of short prompts.
_VALUES_PER_TOKEN = 2
_SPARE_VALUES = 1 << 17


async def read_body(receive: Receive, announced: str | None, max_bytes: int) -> bytes:
    """The whole body.

    `announced` is the Content-Length header. A body that announces too much is not read at all.

    Raises:
        BodyTooLarge: it has more than `max_bytes`.
        ClientGone: the connection ended before it did.
    """
    if announced is not None and announced.isdecimal() and int(announced) > max_bytes:
        raise BodyTooLarge(max_bytes)
    pieces: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise BodyTooLarge(max_bytes)
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


async def parse_body(parse: Callable[[bytes], Parsed], body: bytes, sequence_length: int) -> Parsed:
    """What `parse` makes of the body.

    Raises:
        InvalidBody: it has too many values for a context of this length; or what `parse` raises.
    """
    most = _SPARE_VALUES + _VALUES_PER_TOKEN * sequence_length
    if len(body) <= _INLINE_BYTES:
        return parse(body)
    if body.count(b",") > most:
        raise InvalidBody(f"The body has more than {most} values.", "body")
    return await asyncio.to_thread(parse, body)
