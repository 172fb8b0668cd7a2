"""The pinned threads of one socket: each makes a single compiled call and stays in it.

The caller posts a step and sleeps until it is done. A thread that stops answering is noticed by the
barrier's deadline inside and by the wait's deadline outside; either way the block is dead for good
and `WorkerDied` is raised.
"""

from __future__ import annotations

import os
import threading
import time

import numpy as np

from ellm_kernels import control as ctl
from ellm_kernels.control import await_step, post_step, read_cycles, request_stop
from ellm_kernels.interpreter import serve_steps
from ellm_serve.errors import WorkerDied
from ellm_serve.model.region import Region

# How long a thread spins for the next step before it sleeps: the engine's thread needs about this
# long between two decode steps, and with as many threads as cores it must get a core to run on.
SPIN_S = 20e-6
BARRIER_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 600.0
_SLEEP_S = 1.0


def measure_cycles_per_s(seconds: float = 0.02) -> float:
    """Rate of the cycle counter."""
    start, start_cycles = time.perf_counter(), read_cycles()
    time.sleep(seconds)
    stop_cycles = read_cycles()
    return float(stop_cycles - start_cycles) / (time.perf_counter() - start)


class PinnedThreads:
    """Threads pinned to the given cores, in step with each other."""

    def __init__(
        self, cores: tuple[int, ...], barrier_timeout_s: float = BARRIER_TIMEOUT_S
    ) -> None:
        assert 0 < len(cores) <= ctl.MAX_THREADS
        self.cores = cores
        self.cycles_per_s = measure_cycles_per_s()
        self._region = Region(ctl.CONTROL_BYTES)
        self._control = self._region.address
        self._set(ctl.NUM_THREADS, len(cores))
        self._set(ctl.SPIN_CYCLES, int(SPIN_S * self.cycles_per_s))
        self._set(ctl.BARRIER_CYCLES, int(barrier_timeout_s * self.cycles_per_s))
        self._set(ctl.TIMESPEC, int(_SLEEP_S))
        self._threads = [
            threading.Thread(
                target=self._live, args=(index, core), name=f"ellm-compute-{index}", daemon=True
            )
            for index, core in enumerate(cores)
        ]
        for thread in self._threads:
            thread.start()

    def _set(self, offset: int, value: int) -> None:
        self._region.array(offset, (1,), np.int64)[0] = value

    def _get(self, offset: int) -> int:
        return int(self._region.array(offset, (1,), np.int64)[0])

    def _live(self, index: int, core: int) -> None:
        # On Linux a pid of 0 means the calling thread.
        os.sched_setaffinity(0, {core})
        serve_steps(self._control, index, 0)

    def run(self, descriptor: int, budget_s: float = 0.0) -> None:
        """Runs a step until it ends or, with a budget, until it yields.

        Raises:
            WorkerDied: a thread did not answer in time; no further step can be run.
        """
        limit = read_cycles() + int(budget_s * self.cycles_per_s) if budget_s else 0
        self._set(ctl.LIMIT, limit)
        number = post_step(self._control, descriptor)
        code = await_step(self._control, number, int(STEP_TIMEOUT_S * self.cycles_per_s))
        if code != 0:
            request_stop(self._control, ctl.ABORTED_BY_ENGINE)
            raise WorkerDied(f"a compute thread stopped answering (code {code})")

    def close(self) -> None:
        """Lets the threads leave and waits for them."""
        request_stop(self._control, 0)
        for thread in self._threads:
            thread.join()
