"""The control block with real threads: nobody early, nobody asleep for ever, a late leaver safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from ellm_kernels import control as ctl
from ellm_kernels.atomics import atomic_add, atomic_load, atomic_store
from ellm_kernels.control import (
    await_step,
    barrier,
    finish_step,
    post_step,
    read_cycles,
    request_stop,
    team_offset,
    wait_for_step,
)
from ellm_kernels.jit import kernel
from ellm_kernels.simd import store_i64
from tests.kernels.support import address

FOREVER = 1 << 60
JOIN_S = 60.0


class Block:
    """A control block whose threads may sleep for an hour at a time."""

    def __init__(self, teams: int = 1, barrier_cycles: int = FOREVER, spin: int = 0) -> None:
        self._memory = np.zeros(ctl.control_bytes(teams) // 8 + 8, np.int64)
        skip = -address(self._memory) % 64 // 8
        self.words = self._memory[skip:]
        self.address = address(self.words)
        self[ctl.NUM_TEAMS] = teams
        self[ctl.BARRIER_CYCLES] = barrier_cycles
        self[ctl.SPIN_CYCLES] = spin
        self[ctl.TIMESPEC] = 3600

    def team(self, rank: int = 0) -> int:
        """Address of a team's block."""
        return self.address + team_offset(rank)

    def of_team(self, offset: int, rank: int = 0) -> int:
        """A word of a team's block."""
        return self[team_offset(rank) + offset]

    def __getitem__(self, offset: int) -> int:
        return int(self.words[offset // 8])

    def __setitem__(self, offset: int, value: int) -> None:
        self.words[offset // 8] = value


class Caller(threading.Thread):
    """Calls a kernel and keeps what it returned."""

    def __init__(self, function: Callable[..., int], *arguments: int) -> None:
        super().__init__(daemon=True)
        self._function, self._arguments = function, arguments
        self.result: int | None = None
        self.start()

    def run(self) -> None:
        self.result = self._function(*self._arguments)

    def wait(self) -> int:
        self.join(JOIN_S)
        assert self.result is not None, "still running"
        return self.result


@kernel
def meet(
    control: int, team: int, num_threads: int, everybody: bool, expected: int, rounds: int,
    arrivals: int,
) -> int:  # fmt: skip
    """Rounds in which somebody was let through before all `expected` threads had arrived."""
    early = 0
    for i in range(rounds):
        atomic_add(arrivals, 1)
        if barrier(control, team, num_threads, everybody) != 0:
            return -1
        # Nobody adds again before the second barrier, so the sum is exact.
        if atomic_load(arrivals) != (i + 1) * expected:
            early += 1
        if barrier(control, team, num_threads, everybody) != 0:
            return -1
    return early


TEAMS = [(1, 1, 10), (1, 2, 20_000), (1, 3, 300), (1, 5, 100), (2, 1, 20_000), (2, 2, 1000),
         (4, 1, 500), (4, 2, 100), (3, 3, 50)]  # fmt: skip


@pytest.mark.parametrize(("teams", "threads", "rounds"), TEAMS)
def test_barrier_lets_nobody_through_early(teams: int, threads: int, rounds: int) -> None:
    """Also with more threads than cores, where waiting threads must make room."""
    block = Block(teams)
    arrivals = np.zeros(1, np.int64)
    callers = [
        Caller(meet, block.address, block.team(rank), threads, True, teams * threads, rounds,
               address(arrivals))
        for rank in range(teams)
        for _ in range(threads)
    ]  # fmt: skip
    assert [caller.wait() for caller in callers] == [0] * teams * threads
    assert arrivals[0] == teams * threads * rounds
    assert block[ctl.ARRIVED] == 0 and block[ctl.GENERATION] == 2 * rounds


def test_teams_alone_do_not_wait_for_each_other() -> None:
    """A socket's own barriers cost nothing to the others: one runs on while the other stands."""
    block = Block(2)
    arrivals = np.zeros((2, 8), np.int64)
    standing = Caller(barrier, block.address, block.team(1), 2, False)
    moving = [
        Caller(meet, block.address, block.team(0), 2, False, 2, 500, address(arrivals[0]))
        for _ in range(2)
    ]
    assert [caller.wait() for caller in moving] == [0, 0]
    assert standing.is_alive()
    assert block[ctl.GENERATION] == 0 and block.of_team(ctl.TEAM_GENERATION, 1) == 0
    assert Caller(barrier, block.address, block.team(1), 2, False).wait() == 0
    assert standing.wait() == 0


@kernel
def watch(
    control: int, team: int, num_threads: int, rounds: int, counter: int, verdicts: int
) -> int:
    """Writes down the verdict of every round, and now and then changes the next one's limit.

    The thread that sets the limit does so before it arrives, as the engine does before a step.
    """
    for i in range(rounds):
        if atomic_add(counter, 1) % 3 == 0:
            atomic_store(control + ctl.LIMIT, i % 2)
        if barrier(control, team, num_threads, True) != 0:
            return -1
        store_i64(verdicts + 8 * i, atomic_load(team + ctl.TEAM_YIELD))
    return 0


@pytest.mark.parametrize(("teams", "threads", "rounds"), [(2, 2, 2000), (4, 1, 1000), (3, 2, 300)])
def test_all_teams_hear_the_same_verdict(teams: int, threads: int, rounds: int) -> None:
    """If one socket yielded and another one went on, they would never meet again.

    The limit changes all the time here, so a team that judged for itself would differ.
    """
    block = Block(teams)
    counter = np.zeros(1, np.int64)
    verdicts = np.full((teams * threads, rounds), -1, np.int64)
    callers = [
        Caller(watch, block.address, block.team(index // threads), threads, rounds,
               address(counter), address(verdicts[index]))
        for index in range(teams * threads)
    ]  # fmt: skip
    assert [caller.wait() for caller in callers] == [0] * len(callers)
    assert (verdicts == verdicts[0]).all()
    assert set(verdicts[0].tolist()) == {0, 1}


@pytest.mark.parametrize("teams", [1, 2])
def test_barrier_gives_up_at_its_deadline(teams: int) -> None:
    """A dead peer is noticed, be it of the same socket or another: everybody who waits returns."""
    block = Block(teams, barrier_cycles=1_000_000)
    threads = 2 if teams == 1 else 1
    waiting = Caller(barrier, block.address, block.team(), threads, True)
    assert waiting.wait() == ctl.BARRIER_TIMEOUT
    assert block[ctl.ABORT] == ctl.BARRIER_TIMEOUT


def test_a_dead_socket_is_noticed_by_all_threads() -> None:
    """Those who wait for their own delegate leave as well as the delegates themselves."""
    block = Block(3, barrier_cycles=2_000_000)
    waiting = [Caller(barrier, block.address, block.team(rank), 2, True) for rank in (0, 2, 0, 2)]
    assert [caller.wait() for caller in waiting] == [ctl.BARRIER_TIMEOUT] * 4


@pytest.mark.parametrize(("teams", "threads"), [(1, 3), (2, 2)])
def test_abort_frees_waiting_threads(teams: int, threads: int) -> None:
    """Whoever waits in a barrier leaves with the abort code, long before the deadline."""
    block = Block(teams)
    # All but one thread of the last team.
    waiting = [
        Caller(barrier, block.address, block.team(index // threads), threads, True)
        for index in range(teams * threads - 1)
    ]

    while sum(block.of_team(ctl.TEAM_ARRIVED, rank) for rank in range(teams)) < len(waiting):
        time.sleep(0.001)
    assert all(caller.is_alive() for caller in waiting)
    request_stop(block.address, ctl.ABORTED_BY_ENGINE)
    assert [caller.wait() for caller in waiting] == [ctl.ABORTED_BY_ENGINE] * len(waiting)


@kernel
def finish(control: int, team: int, num_threads: int, number: int) -> int:
    """`finish_step`, callable from here."""
    finish_step(control, team, num_threads, number)
    return 0


@pytest.mark.parametrize("spin", [0, FOREVER])
def test_stop_frees_threads_that_wait_for_a_step(spin: int) -> None:
    """Asleep or spinning, a thread leaves when it is told to."""
    block = Block(spin=spin)
    callers = [Caller(wait_for_step, block.address, 0) for _ in range(3)]
    time.sleep(0.05)
    assert all(caller.is_alive() for caller in callers)
    request_stop(block.address, 0)
    assert [caller.wait() for caller in callers] == [-1] * 3


@pytest.mark.parametrize("spin", [0, FOREVER])
def test_a_posted_step_wakes_everybody(spin: int) -> None:
    """Sleepers could otherwise miss a step for an hour."""
    block = Block(spin=spin)
    callers = [Caller(wait_for_step, block.address, 0) for _ in range(3)]
    time.sleep(0.05)
    assert post_step(block.address, 1) == 1
    assert [caller.wait() for caller in callers] == [1] * 3
    assert block[ctl.LANE] == 1
    # A step that was posted before anybody looked is not missed either.
    assert Caller(wait_for_step, block.address, 0).wait() == 1


def test_await_step_returns_minus_one_when_time_is_over() -> None:
    """A step that never ends must not hang the engine."""
    block = Block()
    block[ctl.TIMESPEC] = 0
    block.words[ctl.TIMESPEC // 8 + 1] = 1_000_000  # sleeps of 1 ms
    number = post_step(block.address, 0)
    started = read_cycles()
    assert Caller(await_step, block.address, number, 5_000_000).wait() == -1
    assert read_cycles() - started >= 5_000_000


def test_await_step_hears_of_the_end_and_of_an_abort() -> None:
    """0 for a finished step, at once for an older one; the abort code for a dead block."""
    block = Block()
    block[ctl.DONE] = 5
    assert await_step(block.address, 5, FOREVER) == 0
    assert await_step(block.address, 3, FOREVER) == 0
    waiting = Caller(await_step, block.address, 6, FOREVER)
    time.sleep(0.05)
    request_stop(block.address, ctl.ABORTED_BY_ENGINE)
    assert waiting.wait() == ctl.ABORTED_BY_ENGINE


def test_the_verdict_to_yield_outlives_the_next_post() -> None:
    """A thread that leaves a step's last barrier late must read what the others read.

    If posting a step took the verdict back, the late thread would go on with the old step while the
    others run the new one.
    """
    block = Block()
    block[ctl.LIMIT] = 1  # long ago
    assert barrier(block.address, block.team(), 1, True) == 0
    assert block.of_team(ctl.TEAM_YIELD) == 1
    block[ctl.LIMIT] = 0
    post_step(block.address, 0)
    assert block.of_team(ctl.TEAM_YIELD) == 1
    assert barrier(block.address, block.team(), 1, True) == 0
    assert block.of_team(ctl.TEAM_YIELD) == 0


def test_a_step_yields_only_after_its_limit() -> None:
    """A limit that lies ahead, or none, lets the step run on; barriers reset the work count."""
    block = Block()
    for limit in (0, read_cycles() + FOREVER):
        block[ctl.LIMIT] = limit
        block[team_offset(0) + ctl.TEAM_WORK] = 9
        assert barrier(block.address, block.team(), 1, True) == 0
        words = (ctl.TEAM_YIELD, ctl.TEAM_WORK, ctl.TEAM_ARRIVED)
        assert [block.of_team(word) for word in words] == [0, 0, 0]
        assert block[ctl.ARRIVED] == 0


def test_a_step_is_finished_when_every_thread_has_said_so() -> None:
    """The engine reads logits that all sockets write, and may free what threads looked at."""
    block = Block(3)
    number = post_step(block.address, 0)
    waiting = Caller(await_step, block.address, number, FOREVER)
    threads = [rank for rank in range(3) for _ in range(2)]
    for rank in threads[:-1]:
        finish(block.address, block.team(rank), 2, number)
    time.sleep(0.05)
    assert waiting.is_alive() and block[ctl.DONE] == 0
    finish(block.address, block.team(threads[-1]), 2, number)
    assert waiting.wait() == 0
    assert block[ctl.FINISHED] == 0
    assert [block.of_team(ctl.TEAM_FINISHED, rank) for rank in range(3)] == [0, 0, 0]


def test_blocks_of_teams_lie_apart() -> None:
    """No two teams, nor a team and the shared words, meet in a cache line."""
    assert ctl.TEAMS % 64 == ctl.TEAM_BYTES % 64 == 0
    assert ctl.TIMESPEC + 16 <= ctl.TEAMS == team_offset(0)
    assert ctl.TEAM_LANES + 16 <= ctl.TEAM_HEARTBEATS
    for rank in range(4):
        assert team_offset(rank + 1) == team_offset(rank) + ctl.TEAM_BYTES
        assert team_offset(rank) + ctl.TEAM_BYTES == ctl.control_bytes(rank + 1)
