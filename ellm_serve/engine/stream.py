"""The consumer's end of one request, for code that runs in threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from ellm_serve.request import FinishReason, TokenDelta


class TokenStream:
    """Iterates over the deltas of one request. Leaving its `with` block aborts the request."""

    def __init__(self, request_id: str, abort: Callable[[str, FinishReason], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._deltas: SimpleQueue[TokenDelta] = SimpleQueue()
        self._finished = False

    def put(self, delta: TokenDelta) -> None:
        """Called by the engine."""
        self._deltas.put(delta)

    def abort(self, finish: FinishReason = FinishReason.ABORT) -> None:
        """Ends the request; a last delta still comes. Does nothing after that."""
        if not self._finished:
            self._abort(self.request_id, finish)

    def __iter__(self) -> Iterator[TokenDelta]:
        return self

    def __next__(self) -> TokenDelta:
        if self._finished:
            raise StopIteration
        delta = self._deltas.get()
        self._finished = delta.finish_reason is not None
        return delta

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()
