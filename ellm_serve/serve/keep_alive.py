"""An answer in pieces over a connection that may be silent for minutes, and may go away.

Status and headers go out at once. While there is nothing to say, a comment line goes out every few
seconds of wall-clock time and says how far the request is; clients skip it, proxies see life. When
the client leaves, the frames are closed, and with them the generation behind them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar, runtime_checkable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


@runtime_checkable
class Frames(Protocol):
    """Whole frames of an event stream; closing it gives up what makes them."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None: ...


class EventResponse(Response):
    """Sends frames as they come, and comments in between.

    `progress` is asked for the text of each comment; an `interval_s` of 0 means no comments.
    `failed` makes the last frame out of an error that the frames did not handle themselves.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: Frames,
        interval_s: float,
        progress: Callable[[], str | None],
        failed: Callable[[Exception], bytes],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # A length would be that of the empty body above.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._frames = frames
        self._interval_s = interval_s
        self._progress = progress
        self._failed = failed
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            beat = asyncio.create_task(self._beat(send))
            try:
                await until_disconnect(receive, self._pump(send))
            finally:
                await cancel(beat)
        finally:
            await self._frames.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        try:
            async for frame in self._frames:
                await _send_piece(send, frame)
                self._last_sent = loop.time()
        except Exception as error:
            # The status is out already: all that can be done is to say so in the stream.
            await _send_piece(send, self._failed(error))

    async def _beat(self, send: Send) -> None:
        if not self._interval_s:
            return
        loop = asyncio.get_running_loop()
        self._last_sent = loop.time()
        while True:
            quiet_s = loop.time() - self._last_sent
            if quiet_s >= self._interval_s:
                self._last_sent = loop.time()
                await _send_piece(send, self._comment())
                quiet_s = 0.0
            await asyncio.sleep(self._interval_s - quiet_s)

    def _comment(self) -> bytes:
        progress = self._progress()
        return f": keep-alive {progress}\n\n".encode() if progress else b": keep-alive\n\n"


def _send_piece(send: Send, piece: bytes) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": piece, "more_body": True})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled as soon as the client has gone.

    The request's body must have been read.

    Raises:
        ClientGone: it went first.
    """
    gone = asyncio.create_task(_disconnected(receive))
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await cancel(gone)
        await cancel(task)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(task: asyncio.Task[Result]) -> None:
    """Ends a task and waits for its end; what it had to say no longer matters."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        # Looked at, so that nobody warns about an exception never retrieved.
        task.exception()
