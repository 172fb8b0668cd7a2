"""Answers of /v1/responses that can be asked for again, and continued.

They are kept in this process only, for a time, and as many as fit; those that were not used for
longest go first. Nobody finds the answers of another principal.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ellm_serve.errors import ResponseNotFound
from ellm_serve.serve.sse import to_json

MAX_RESPONSES = 4096
MAX_BYTES = 256 << 20
LIFETIME_S = 24 * 3600.0
# What an entry takes besides its texts, about.
_ENTRY_BYTES = 1024

Message = dict[str, Any]


@dataclass(slots=True)
class _Entry:
    """One answer. `messages`: what it added to the conversation of its parent, as JSON."""

    parent: str | None
    messages: bytes
    body: bytes
    used: float

    @property
    def num_bytes(self) -> int:
        return _ENTRY_BYTES + len(self.messages) + len(self.body)


class ResponseStore:
    """In one event loop only.

    max_bytes: of all texts together; a larger answer is not kept at all. lifetime_s: after its last
    use an answer is forgotten. A use of an answer is one of those before it, so they stay as long.
    """

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        max_responses: int = MAX_RESPONSES,
        lifetime_s: float = LIFETIME_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._lifetime_s = lifetime_s
        self._clock = clock
        # The one that was not used for longest comes first.
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """What is kept."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self,
        principal: str,
        response_id: str,
        parent: str | None,
        messages: Sequence[Message],
        body: bytes,
    ) -> None:
        """Keeps an answer: its `body`, and the messages that it and its request consist of."""
        self._remove((principal, response_id))
        entry = _Entry(parent, to_json(messages).encode(), body, self._clock())
        if entry.num_bytes > self._max_bytes:
            return
        self._entries[principal, response_id] = entry
        self._num_bytes += entry.num_bytes
        self._touch(principal, response_id)
        self._tidy()

    def body(self, principal: str, response_id: str) -> bytes:
        """An answer as it was sent.

        Raises:
            ResponseNotFound: it is not here, or no longer.
        """
        entry = self._entry(principal, response_id)
        self._touch(principal, response_id)
        return entry.body

    def conversation(self, principal: str, response_id: str) -> list[Message]:
        """All that was said up to this answer, and in it.

        Raises:
            ResponseNotFound: it, or one before it, is not here, or no longer.
        """
        turns: list[list[Message]] = []
        name: str | None = response_id
        while name is not None:
            entry = self._entry(principal, name, response_id)
            turns.append(json.loads(entry.messages))
            name = entry.parent
        self._touch(principal, response_id)
        return [message for turn in reversed(turns) for message in turn]

    def _entry(self, principal: str, name: str, asked_for: str | None = None) -> _Entry:
        self._tidy()
        entry = self._entries.get((principal, name))
        if entry is None:
            raise ResponseNotFound(asked_for or name)
        return entry

    def _touch(self, principal: str, name: str | None) -> None:
        """Notes a use, of those before it as well: they come to stand behind it, so go later."""
        now = self._clock()
        while name is not None and (principal, name) in self._entries:
            entry = self._entries[principal, name]
            entry.used = now
            self._entries.move_to_end((principal, name))
            name = entry.parent

    def _tidy(self) -> None:
        oldest = self._clock() - self._lifetime_s
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            full = self._num_bytes > self._max_bytes or len(self._entries) > self._max_responses
            if not full and entry.used >= oldest:
                return
            self._remove(key)

    def _remove(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes
