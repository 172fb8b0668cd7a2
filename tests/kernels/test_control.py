"""The control block with real threads: nobody early, nobody asleep for ever, a late leaver safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from ellm_kernels import control as ctl
from ellm_kernels.atomics import atomic_add, atomic_load
from ellm_kernels.control import (
    await_step,
    barrier,
    post_step,
    read_cycles,
    request_stop,
    wait_for_step,
)
from ellm_kernels.jit import kernel
from tests.kernels.support import address

FOREVER = 1 << 60
JOIN_S = 60.0


class Block:
    """A control block whose threads may sleep for an hour at a time."""

    def __init__(self, threads: int = 1, barrier_cycles: int = FOREVER, spin: int = 0) -> None:
        self._memory = np.zeros(ctl.CONTROL_BYTES // 8 + 8, np.int64)
        skip = -address(self._memory) % 64 // 8
        self.words = self._memory[skip:]
        self.address = address(self.words)
        self[ctl.NUM_THREADS] = threads
        self[ctl.BARRIER_CYCLES] = barrier_cycles
        self[ctl.SPIN_CYCLES] = spin
        self[ctl.TIMESPEC] = 3600

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
def meet(control: int, num_threads: int, rounds: int, arrivals: int) -> int:
    """Rounds in which somebody was let through before everybody had arrived."""
    early = 0
    for i in range(rounds):
        atomic_add(arrivals, 1)
        if barrier(control, num_threads) != 0:
            return -1
        # Nobody adds again before the second barrier, so the sum is exact.
        if atomic_load(arrivals) != (i + 1) * num_threads:
            early += 1
        if barrier(control, num_threads) != 0:
            return -1
    return early


@pytest.mark.parametrize(("threads", "rounds"), [(1, 10), (2, 20_000), (3, 300), (5, 100)])
def test_barrier_lets_nobody_through_early(threads: int, rounds: int) -> None:
    """Also with more threads than cores, where waiting threads must make room."""
    block = Block(threads)
    arrivals = np.zeros(1, np.int64)
    callers = [
        Caller(meet, block.address, threads, rounds, address(arrivals)) for _ in range(threads)
    ]
    assert [caller.wait() for caller in callers] == [0] * threads
    assert arrivals[0] == threads * rounds


def test_barrier_gives_up_at_its_deadline() -> None:
    """A dead peer is noticed: the waiting thread returns and marks the block as dead."""
    block = Block(2, barrier_cycles=1_000_000)
    assert Caller(barrier, block.address, 2).wait() == ctl.BARRIER_TIMEOUT
    assert block[ctl.ABORT] == ctl.BARRIER_TIMEOUT


def test_abort_frees_waiting_threads() -> None:
    """Whoever waits in a barrier leaves with the abort code, long before the deadline."""
    block = Block(3)
    waiting = [Caller(barrier, block.address, 3) for _ in range(2)]
    while block[ctl.ARRIVED] < 2:
        time.sleep(0.001)
    assert all(caller.is_alive() for caller in waiting)
    request_stop(block.address, ctl.ABORTED_BY_ENGINE)
    assert [caller.wait() for caller in waiting] == [ctl.ABORTED_BY_ENGINE] * 2


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
    assert post_step(block.address, 4711) == 1
    assert [caller.wait() for caller in callers] == [1] * 3
    assert block[ctl.DESCRIPTOR] == 4711
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
    assert barrier(block.address, 1) == 0
    assert block[ctl.YIELD] == 1
    block[ctl.LIMIT] = 0
    post_step(block.address, 0)
    assert block[ctl.YIELD] == 1
    assert barrier(block.address, 1) == 0
    assert block[ctl.YIELD] == 0


def test_a_step_yields_only_after_its_limit() -> None:
    """A limit that lies ahead, or none, lets the step run on; barriers reset the work count."""
    block = Block()
    for limit in (0, read_cycles() + FOREVER):
        block[ctl.LIMIT] = limit
        block[ctl.WORK] = 9
        assert barrier(block.address, 1) == 0
        assert (block[ctl.YIELD], block[ctl.WORK], block[ctl.ARRIVED]) == (0, 0, 0)
