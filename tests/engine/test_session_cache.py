"""Who gets which slot, what is reused, copied and evicted."""

from __future__ import annotations

from array import array

import pytest

from ellm_serve.engine.executor import LogitRows, Span
from ellm_serve.engine.session_cache import Lease, SessionCache, common_prefix
from tests.engine.doubles import HashExecutor, limits


class Driver:
    """A cache on a table of hashes; computes what is leased, so copies of nothing are noticed."""

    def __init__(self, num_slots: int = 3, threshold: int = 4, capacity: int | None = None) -> None:
        self.executor = HashExecutor(
            limits(num_slots=num_slots, prefill_block=64), capacity=capacity
        )
        self.cache = SessionCache(self.executor, threshold)

    def start(self, tokens: list[int], key: str | None = None, principal: str = "") -> Lease:
        """Leases and computes; leaves the lease running."""
        lease = self.cache.lease(key, principal, array("i", tokens))
        assert lease is not None
        assert self.cache.reserve(lease, len(tokens))
        new = tuple(tokens[lease.num_cached_tokens :])
        span = Span(lease.slot, lease.num_cached_tokens, new, LogitRows.NONE)
        self.executor.start_prefill([span])
        self.executor.run_prefill(1.0)
        self.cache.advance(lease, len(tokens))
        return lease

    def turn(self, tokens: list[int], key: str | None = None, principal: str = "") -> Lease:
        """One whole request."""
        lease = self.start(tokens, key, principal)
        self.cache.commit(lease)
        return lease

    def held(self) -> dict[int, tuple[str | None, int]]:
        return {s.slot: (s.session_key, s.num_tokens) for s in self.cache.sessions()}


@pytest.mark.parametrize("length", [0, 1, 1023, 1024, 1025, 5000])
def test_common_prefix(length: int) -> None:
    """Right at every border of the blocks it compares in, and within the limit."""
    a = array("i", [*range(length), 7, 1, 2])
    b = array("i", [*range(length), 8, 1, 2])
    assert common_prefix(a, b, length + 3) == length
    assert common_prefix(a, a, length + 3) == length + 3
    assert common_prefix(a, b, length // 2) == length // 2


def test_next_turn_stays_in_its_slot() -> None:
    """Only the new tokens are left to compute; the last one always is."""
    driver = Driver()
    first = driver.turn(list(range(10)), "s")
    second = driver.turn(list(range(14)), "s")
    assert (second.slot, second.num_cached_tokens) == (first.slot, 10)
    assert second.generation == first.generation
    same = driver.turn(list(range(14)), "s")
    assert (same.slot, same.num_cached_tokens) == (first.slot, 13)


def test_rewritten_history_is_cut_to_the_common_part() -> None:
    """A template that drops old thoughts costs the changed end, not the whole chat."""
    driver = Driver()
    first = driver.turn(list(range(20)), "s")
    second = driver.turn([*range(15), 30, 31], "s")
    assert (second.slot, second.num_cached_tokens) == (first.slot, 15)
    assert driver.held() == {first.slot: ("s", 17)}


def test_other_prompt_of_one_key_does_not_destroy_the_long_history() -> None:
    """Agents send a title request with the main session's key: it gets a slot of its own."""
    driver = Driver()
    main = driver.turn(list(range(40)), "s")
    title = driver.turn([0, 1, 45, 46], "s")
    assert title.slot != main.slot
    assert driver.turn(list(range(42)), "s").num_cached_tokens == 40


def test_prefix_of_a_living_session_is_forked() -> None:
    """A shared system prompt is copied; both sessions go on with all they had."""
    driver = Driver()
    a = driver.turn([*range(10), 20, 21], "a")
    b = driver.turn([*range(10), 30, 31], "b")
    assert b.slot != a.slot and b.num_cached_tokens == 10
    assert driver.cache.num_forks == 1
    assert driver.turn([*range(10), 20, 21, 22], "a").num_cached_tokens == 12
    assert driver.turn([*range(10), 30, 31, 32], "b").num_cached_tokens == 12


def test_short_common_prefixes_are_not_copied() -> None:
    """Below the threshold computing again is cheaper than a copy and its memory."""
    driver = Driver(threshold=4)
    driver.turn([0, 1, 2, 20, 21], "a")
    assert driver.turn([0, 1, 2, 30, 31], "b").num_cached_tokens == 0
    assert driver.cache.num_forks == 0


def test_running_sequence_can_be_forked() -> None:
    """A second request of a busy session does not wait: it copies what is computed so far."""
    driver = Driver()
    running = driver.start(list(range(12)), "s")
    second = driver.turn([*range(12), 40], "s")
    assert second.slot != running.slot and second.num_cached_tokens == 12
    driver.cache.commit(running)


def test_nothing_is_shared_between_principals() -> None:
    """Neither by prefix nor by a guessed key; within one principal the same prompt is reused."""
    driver = Driver()
    driver.turn(list(range(20)), "s", "alice")
    assert driver.turn(list(range(20)), "s", "bob").num_cached_tokens == 0
    assert driver.cache.match("s", "carol", array("i", range(20))) == 0
    assert driver.turn(list(range(20)), None, "alice").num_cached_tokens == 19


def test_no_slot_while_all_run() -> None:
    """None means wait; a slot that was given back is found again."""
    driver = Driver(num_slots=2)
    one = driver.start([1, 2, 3])
    driver.start([4, 5, 6])
    assert driver.cache.lease(None, "", array("i", [7, 8])) is None
    assert driver.cache.num_idle == 0
    driver.cache.commit(one)
    assert driver.cache.lease(None, "", array("i", [7, 8])) is not None


def test_eviction_takes_the_cheapest() -> None:
    """Few tokens before many, long unused before fresh; never a running slot."""
    driver = Driver(num_slots=3)
    driver.turn([1] * 40, "long")
    driver.turn([2] * 5, "short")
    running = driver.start([3] * 2, "running")
    driver.turn([4] * 9, "new")
    assert {key for key, _ in driver.held().values()} == {"long", "running", "new"}
    for number in range(60):
        driver.turn([4] * (10 + number % 3), "new")
    driver.turn([5] * 9, "newer")
    assert {key for key, _ in driver.held().values()} == {"running", "new", "newer"}
    driver.cache.commit(running)


def test_reassigned_slot_has_a_new_generation() -> None:
    """An old lease can neither advance nor end a slot that has gone to somebody else."""
    driver = Driver(num_slots=1)
    old = driver.turn([1, 2, 3], "a")
    new = driver.start([9, 8, 7], "b")
    assert new.slot == old.slot and new.generation > old.generation
    with pytest.raises(AssertionError, match="stale"):
        driver.cache.advance(old, 3)
    with pytest.raises(AssertionError, match="stale"):
        driver.cache.commit(old)
    driver.cache.commit(new)
    with pytest.raises(AssertionError, match="stale"):
        driver.cache.commit(new)


def test_slot_taken_over_with_its_history_has_a_new_generation() -> None:
    """A client whose key changes with each turn keeps its rows, under the new owner."""
    driver = Driver()
    first = driver.turn(list(range(10)), "turn-1")
    second = driver.turn(list(range(12)), "turn-2")
    assert (second.slot, second.num_cached_tokens) == (first.slot, 10)
    assert second.generation > first.generation
    assert driver.held() == {first.slot: ("turn-2", 12)}


def test_memory_comes_from_idle_sessions_first() -> None:
    """Running out evicts the cheapest idle session; with none left `reserve` says no."""
    driver = Driver(num_slots=3, capacity=30)
    driver.turn([1] * 12, "a")
    driver.turn([2] * 12, "b")
    running = driver.start([3] * 20, "c")
    assert set(driver.held()) == {running.slot}
    assert driver.cache.num_evictions == 2
    assert driver.cache.reserve(running, 30)
    assert not driver.cache.reserve(running, 31)


def test_fork_never_evicts_its_source() -> None:
    """Without memory for a copy the prompt is computed from its start, the source stays."""
    driver = Driver(num_slots=3, capacity=30)
    source = driver.turn([*range(20), 40, 41], "a")
    lease = driver.cache.lease("b", "", array("i", [*range(20), 42]))
    assert lease is not None
    assert lease.num_cached_tokens == 0 and driver.cache.num_forks == 0
    assert driver.held()[source.slot] == ("a", 22)


def test_lease_that_computed_nothing_leaves_nothing() -> None:
    """A request aborted before its first block gives the slot and its memory back."""
    driver = Driver()
    lease = driver.cache.lease("s", "", array("i", [1, 2, 3]))
    assert lease is not None and driver.cache.reserve(lease, 3)
    driver.cache.commit(lease)
    assert driver.held() == {} and driver.executor.committed == [0, 0, 0]
