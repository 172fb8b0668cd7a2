"""Who is next: requests that have not started, in an order that is fair to every principal.

The principal that was served least comes first; inside one principal the lowest priority value,
then the oldest. What counts as service is a prompt's uncomputed tokens, and one block more because
a request also takes a row until it ends. A principal that comes back after a while starts where the
others are on average: it neither saves up turns nor is it punished for old ones. So a principal
with hundreds of prompts in the queue delays another by one turn and not by hundreds; and since
every turn moves its principal back, nobody's turn is put off for ever.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterator

from ellm_serve.engine.sequence import Sequence

# A principal's requests as (priority, number of arrival, request); numbers differ.
_Line = list[tuple[int, int, Sequence]]


class FairQueue:
    """Requests that wait. `turn_tokens`: what a request counts besides its tokens."""

    def __init__(self, turn_tokens: int) -> None:
        self._turn_tokens = turn_tokens
        self._lines: dict[str, _Line] = {}
        # Tokens each principal was served, counted from a common start; only differences matter.
        self._served: dict[str, float] = {}
        self._average = 0.0
        self._returned: deque[Sequence] = deque()
        self._num_arrived = 0
        self._order: tuple[Sequence, ...] | None = None
        self.num_changes = 0

    def __bool__(self) -> bool:
        return bool(self._lines or self._returned)

    def in_order(self) -> tuple[Sequence, ...]:
        """Everything that waits, the next one first; as it was after the last change."""
        if self._order is None:
            self._order = (*self._returned, *self._take_turns())
        return self._order

    def add(self, sequence: Sequence) -> None:
        """A new request."""
        principal = sequence.request.principal
        if principal not in self._lines:
            self._served[principal] = max(self._served.get(principal, 0.0), self._average)
            self._lines[principal] = []
        entry = (sequence.request.priority, self._num_arrived, sequence)
        insort(self._lines[principal], entry)
        self._num_arrived += 1
        self._changed()

    def put_back(self, sequence: Sequence) -> None:
        """A request that had started comes before all others."""
        self._returned.appendleft(sequence)
        self._changed()

    def start(self, sequence: Sequence, num_tokens: int) -> None:
        """The request starts, with so many tokens to compute; its principal has had a turn."""
        if sequence not in self._returned:
            tokens = self._turn_tokens + num_tokens
            self._served[sequence.request.principal] += tokens
            self._average += tokens / len(self._lines)
        self.remove(sequence)
        self._forget()

    def remove(self, sequence: Sequence) -> None:
        """The request no longer waits."""
        self._changed()
        if sequence in self._returned:
            self._returned.remove(sequence)
            return
        principal = sequence.request.principal
        line = self._lines[principal]
        del line[next(i for i, entry in enumerate(line) if entry[2] is sequence)]
        if not line:
            del self._lines[principal]

    def _changed(self) -> None:
        self._order = None
        self.num_changes += 1

    def _forget(self) -> None:
        """Drops principals that would start at the average anyway."""
        gone = [
            principal
            for principal, served in self._served.items()
            if served <= self._average and principal not in self._lines
        ]
        for principal in gone:
            del self._served[principal]

    def _take_turns(self) -> Iterator[Sequence]:
        """Every line's requests, as turns would be given if none of a prompt is cached."""
        turns = [
            (self._served[principal], line[0][1], principal, 0)
            for principal, line in self._lines.items()
        ]
        heapq.heapify(turns)
        while turns:
            served, _, principal, index = turns[0]
            line = self._lines[principal]
            sequence = line[index][2]
            yield sequence
            if index + 1 == len(line):
                heapq.heappop(turns)
                continue
            served += self._turn_tokens + sequence.num_prompt_tokens
            heapq.heapreplace(turns, (served, line[index + 1][1], principal, index + 1))
