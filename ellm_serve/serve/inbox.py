"""Carries token deltas from the engine's thread into an event loop.

All that the engine delivers before the loop gets to run costs one wake-up, whoever it is for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ellm_serve.request import TokenDelta

Receive = Callable[[TokenDelta], None]


class Inbox:
    """The way into one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._deltas: deque[tuple[Receive, TokenDelta]] = deque()
        self._called = False

    def put(self, receive: Receive, delta: TokenDelta) -> None:
        """Has the loop call `receive(delta)`. For the engine's thread."""
        self._deltas.append((receive, delta))
        # `_deliver` clears the flag before it looks, so a delta is never left lying.
        if not self._called and not self.loop.is_closed():
            self._called = True
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False
        while self._deltas:
            receive, delta = self._deltas.popleft()
            receive(delta)
