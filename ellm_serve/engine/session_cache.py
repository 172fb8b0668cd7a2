"""Which slot holds whose tokens, and who may use it now. Holds token ids and no arrays.

Prefixes are shared within one principal only. Inside it the longest common prefix decides, a
session key breaks ties and marks ownership; a key names a family of histories, so two sequences
with one key may run at once, in two slots. The first `valid_len` tokens of a slot are computed;
those of a running slot never change, so another sequence may copy them at any time.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ellm_serve.engine.executor import Executor
from ellm_serve.engine.stats import SessionStats
from ellm_serve.errors import KVExhausted

_COMPARED_AT_ONCE = 1024


def _no_tokens() -> array[int]:
    return array("i")


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use a slot during one request."""

    slot: int
    generation: int
    num_cached_tokens: int


@dataclass(slots=True)
class _Slot:
    index: int
    generation: int = 0
    principal: str = ""
    session_key: str | None = None
    token_ids: array[int] = field(default_factory=_no_tokens)
    valid_len: int = 0
    busy: bool = False
    last_used: int = 0

    @property
    def free(self) -> bool:
        return not self.busy and self.valid_len == 0


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a prompt would be placed: in `target`, after copying from `source` if they differ."""

    target: _Slot
    source: _Slot | None
    num_cached_tokens: int


def common_prefix(a: array[int], b: array[int], limit: int) -> int:
    """How many leading tokens are equal, at most `limit`. Compares in blocks at C speed.

    Arrays, because comparing lists of 250,000 numbers takes 20 ms, and these less than one.
    """
    start = 0
    while start < limit:
        stop = min(start + _COMPARED_AT_ONCE, limit)
        left, right = a[start:stop], b[start:stop]
        if left != right:
            pairs = zip(left, right, strict=False)
            return start + next((i for i, (x, y) in enumerate(pairs) if x != y), len(left))
        start = stop
    return limit


class SessionCache:
    """Leases slots, keeps finished ones for the next turn, and evicts the cheapest to lose."""

    def __init__(self, executor: Executor, fork_threshold: int) -> None:
        self._executor = executor
        self.fork_threshold = fork_threshold
        self._slots = [_Slot(index) for index in range(executor.limits.num_slots)]
        self._clock = 0
        self.num_evictions = 0
        self.num_forks = 0

    @property
    def num_idle(self) -> int:
        """Slots no running sequence uses."""
        return sum(not slot.busy for slot in self._slots)

    def sessions(self) -> tuple[SessionStats, ...]:
        """What the slots hold."""
        return tuple(
            SessionStats(
                slot.index,
                slot.generation,
                slot.session_key,
                slot.principal,
                slot.valid_len,
                slot.busy,
            )
            for slot in self._slots
            if slot.busy or slot.valid_len
        )

    def match(self, session_key: str | None, principal: str, token_ids: array[int]) -> int:
        """How many tokens a lease taken now would find computed."""
        plan = self._plan(session_key, principal, token_ids)
        return plan.num_cached_tokens if plan else 0

    def lease(
        self, session_key: str | None, principal: str, token_ids: array[int], reuse: bool = True
    ) -> Lease | None:
        """A slot for this prompt, or None while every slot is running.

        `token_ids` becomes the slot's list: the caller appends to it, and says by `advance` how
        much of it is computed. The last prompt token always is left to compute, for its logits.
        reuse=False: every position is to be computed.
        """
        plan = self._plan(session_key, principal, token_ids, reuse)
        if plan is None:
            return None
        slot, num_cached = plan.target, plan.num_cached_tokens
        if plan.source is not slot:
            self._clear(slot)
            num_cached = self._fork(plan)
        owner = (principal, session_key)
        if plan.source is not slot or owner != (slot.principal, slot.session_key):
            slot.generation += 1
        slot.principal, slot.session_key = owner
        slot.token_ids, slot.valid_len, slot.busy = token_ids, num_cached, True
        self._touch(slot)
        return Lease(slot.index, slot.generation, num_cached)

    def advance(self, lease: Lease, valid_len: int) -> None:
        """Positions below `valid_len` are computed now."""
        slot = self._leased(lease)
        assert slot.valid_len <= valid_len <= len(slot.token_ids)
        slot.valid_len = valid_len

    def reserve(self, lease: Lease, length: int) -> bool:
        """Memory for positions [0, length), evicting idle sessions; False if there is none."""
        return self._commit(self._leased(lease), length, keep=None)

    def commit(self, lease: Lease) -> None:
        """Ends a lease; what was computed stays for the next turn."""
        slot = self._leased(lease)
        slot.busy = False
        if slot.valid_len == 0:
            self._clear(slot)
        self._touch(slot)

    def _leased(self, lease: Lease) -> _Slot:
        slot = self._slots[lease.slot]
        assert slot.busy and slot.generation == lease.generation, f"stale lease {lease}"
        return slot

    def _touch(self, slot: _Slot) -> None:
        self._clock += 1
        slot.last_used = self._clock

    def _cost(self, slot: _Slot, num_tokens: int) -> float:
        """How bad it is to lose tokens of a slot: work to redo, less the longer it lay unused."""
        return num_tokens / (1 + self._clock - slot.last_used)

    def _cheapest(self, keep: _Slot | None) -> _Slot | None:
        idle = [slot for slot in self._slots if not slot.busy and slot is not keep]
        return min(idle, key=lambda slot: self._cost(slot, slot.valid_len), default=None)

    def _plan(
        self, session_key: str | None, principal: str, token_ids: array[int], reuse: bool = True
    ) -> _Plan | None:
        owner = (principal, session_key)
        source, common = self._longest(owner, token_ids) if reuse else (None, 0)
        if source is None:
            target = self._cheapest(keep=None)
            return _Plan(target, None, 0) if target else None
        usable = min(common, len(token_ids) - 1)
        lost = source.valid_len - common
        own = owner == (source.principal, source.session_key)
        if not source.busy and (lost == 0 or (own and common >= lost)):
            return _Plan(source, source, usable)
        target = self._cheapest(keep=source)
        if not source.busy and (
            target is None or self._cost(source, lost) < self._cost(target, target.valid_len)
        ):
            return _Plan(source, source, usable)
        if target is None:
            return None
        if usable < self.fork_threshold:
            return _Plan(target, None, 0)
        return _Plan(target, source, usable)

    def _longest(
        self, owner: tuple[str, str | None], token_ids: array[int]
    ) -> tuple[_Slot | None, int]:
        """The slot of this principal with the longest common prefix."""
        best: _Slot | None = None
        best_order = (0, False, False, 0)
        for slot in self._slots:
            if slot.principal != owner[0] or slot.valid_len == 0:
                continue
            limit = min(slot.valid_len, len(token_ids))
            common = common_prefix(slot.token_ids, token_ids, limit)
            order = (common, not slot.busy, slot.session_key == owner[1], slot.last_used)
            if common and order > best_order:
                best, best_order = slot, order
        return best, best_order[0]

    def _fork(self, plan: _Plan) -> int:
        """Copies the common prefix into the cleared target; returns how many tokens it has."""
        length = plan.num_cached_tokens
        if plan.source is None or not self._commit(plan.target, length, keep=plan.source):
            return 0
        self._executor.copy_prefix(plan.source.index, plan.target.index, length)
        self._touch(plan.source)
        self.num_forks += 1
        return length

    def _commit(self, slot: _Slot, length: int, keep: _Slot | None) -> bool:
        while True:
            try:
                self._executor.commit(slot.index, length)
            except KVExhausted:
                if not self._evict_one(slot, keep):
                    return False
            else:
                return True

    def _evict_one(self, *keep: _Slot | None) -> bool:
        """Gives back the memory of the idle session that is cheapest to lose."""
        idle = [s for s in self._slots if not s.busy and s.valid_len and s not in keep]
        if not idle:
            return False
        self._clear(min(idle, key=lambda slot: self._cost(slot, slot.valid_len)))
        return True

    def _clear(self, slot: _Slot) -> None:
        """Makes a slot free: nothing of it is valid and its memory is given back."""
        if slot.valid_len:
            self.num_evictions += 1
        slot.token_ids, slot.valid_len = _no_tokens(), 0
        slot.principal, slot.session_key = "", None
        slot.generation += 1
        self._executor.release(slot.index)
