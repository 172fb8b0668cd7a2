"""Both ends of the control block: the pinned threads of a socket, and the engine posting steps.

A thread makes a single compiled call and stays in it. One that stops answering is noticed by the
barrier's deadline inside and by the wait's deadline outside; either way the block is dead and
`WorkerDied` is raised.
"""

from __future__ import annotations

import os
import threading
import time

import numpy as np

from ellm_kernels import control as ctl
from ellm_kernels.control import await_step, post_step, read_cycles, request_stop, team_offset
from ellm_kernels.interpreter import serve_steps
from ellm_serve.errors import WorkerDied
from ellm_serve.graph.tensor import Mode
from ellm_serve.model.region import Memory

# How long a thread spins for the next step before it sleeps: the engine's thread needs about this
# long between two decode steps, and with as many threads as cores it must get a core to run on.
SPIN_S = 20e-6
BARRIER_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 600.0
_SLEEP_S = 1
_LOOK_S = 0.5
_STILL_RUNNING = -1
_BEATS = (8 * ctl.MAX_THREADS,)
_LANES = {Mode.FEW: 0, Mode.MANY: 1}


def measure_cycles_per_s(seconds: float = 0.02) -> float:
    """Rate of the cycle counter."""
    start, start_cycles = time.perf_counter(), read_cycles()
    time.sleep(seconds)
    stop_cycles = read_cycles()
    return float(stop_cycles - start_cycles) / (time.perf_counter() - start)


class Control:
    """The engine's end. `memory` begins with a control block for `num_teams` sockets."""

    def __init__(
        self, memory: Memory, num_teams: int, barrier_timeout_s: float = BARRIER_TIMEOUT_S
    ) -> None:
        self._memory = memory
        self.num_teams = num_teams
        self.cycles_per_s = measure_cycles_per_s()
        self._barrier_timeout_s = barrier_timeout_s
        self.reset()

    def reset(self) -> None:
        """As new; no thread may be alive."""
        words = self._memory.array(0, (ctl.control_bytes(self.num_teams) // 8,), np.int64)
        words[:] = 0
        self._set(ctl.NUM_TEAMS, self.num_teams)
        self._set(ctl.SPIN_CYCLES, int(SPIN_S * self.cycles_per_s))
        self._set(ctl.BARRIER_CYCLES, int(self._barrier_timeout_s * self.cycles_per_s))
        self._set(ctl.TIMESPEC, _SLEEP_S)

    def _set(self, offset: int, value: int) -> None:
        self._memory.array(offset, (1,), np.int64)[0] = value

    def run(self, mode: Mode, budget_s: float = 0.0, silence_s: float = STEP_TIMEOUT_S) -> None:
        """Runs the step in all mailboxes of a mode until it ends or, with a budget, yields.

        silence_s: how long no thread at all may show a sign of life; one thread that hangs keeps
        the others waiting, so all fall silent.

        Raises:
            WorkerDied: a thread did not answer in time; the block must be reset.
        """
        limit = read_cycles() + int(budget_s * self.cycles_per_s) if budget_s else 0
        self._set(ctl.LIMIT, limit)
        posted = read_cycles()
        number = post_step(self._memory.address, _LANES[mode])
        look_cycles = int(_LOOK_S * self.cycles_per_s)
        code = await_step(self._memory.address, number, look_cycles)
        while code == _STILL_RUNNING and self._silence_s(posted) < silence_s:
            code = await_step(self._memory.address, number, look_cycles)
        if code != 0:
            self.abort()
            raise WorkerDied(f"a compute thread stopped answering (code {code})")

    def _silence_s(self, since: int) -> float:
        """Seconds since the newest sign of life of any thread, or since a cycle count."""
        beats = [
            self._memory.array(team_offset(rank) + ctl.TEAM_HEARTBEATS, _BEATS, np.int64)[::8].max()
            for rank in range(self.num_teams)
        ]
        return float(read_cycles() - max(since, *beats)) / self.cycles_per_s

    def abort(self) -> None:
        """Makes every thread leave at once; from any thread."""
        request_stop(self._memory.address, ctl.ABORTED_BY_ENGINE)

    def stop(self) -> None:
        """Makes every thread leave after the running step."""
        request_stop(self._memory.address, 0)


class Team:
    """The threads of one socket, pinned to its cores."""

    def __init__(self, memory: Memory, rank: int, cores: tuple[int, ...]) -> None:
        assert 0 < len(cores) <= ctl.MAX_THREADS
        self.cores = cores
        self._memory = memory
        self._offset = team_offset(rank)
        memory.array(self._offset + ctl.TEAM_SIZE, (1,), np.int64)[0] = len(cores)
        self._threads = [
            threading.Thread(
                target=self._live, args=(index, core), name=f"ellm-compute-{rank}-{index}",
                daemon=True,
            )
            for index, core in enumerate(cores)
        ]  # fmt: skip

    def set_lane(self, mode: Mode, descriptor: int) -> None:
        """Where the threads find the steps of a mode."""
        offset = self._offset + ctl.TEAM_LANES + 8 * _LANES[mode]
        self._memory.array(offset, (1,), np.int64)[0] = descriptor

    def start(self) -> None:
        """Lets the threads wait for steps; both lanes are set."""
        for thread in self._threads:
            thread.start()

    def _live(self, index: int, core: int) -> None:
        # On Linux a pid of 0 means the calling thread.
        os.sched_setaffinity(0, {core})
        serve_steps(self._memory.address, self._memory.address + self._offset, index, 0)

    def join(self) -> None:
        """Returns when all threads have left (see `Control.stop`)."""
        for thread in self._threads:
            thread.join()
