"""The control block: how the engine's thread and the pinned threads talk, and their barrier.

A block of int64 words, one cache line per word that somebody spins on. All functions take its
address; it works within a process and in shared memory alike. A barrier never spins for ever: it
gives up when the abort word is set, or when its deadline passes, and then sets the word itself.
"""

from __future__ import annotations

from ellm_kernels.atomics import atomic_add, atomic_load, atomic_store, cpu_pause
from ellm_kernels.jit import entry, kernel
from ellm_kernels.simd import load_i64
from ellm_kernels.system import cycles, futex_wait, futex_wake, sched_yield

# Byte offsets of the words.
STEP = 0  # number of the newest step; pinned threads sleep on it
DONE = 64  # number of the newest finished step; the engine's thread sleeps on it
ARRIVED = 128
GENERATION = 192
WORK = 256  # next item of the running part
YIELD = 320  # at a barrier's end: 1 if the running step is out of time
ABORT = 384  # 0, or why the block is dead
STOP = 448  # set when the threads shall leave
DESCRIPTOR = 512  # address of the step's descriptor
NUM_THREADS = 520
SPIN_CYCLES = 528  # how long a thread spins for a next step before it sleeps
BARRIER_CYCLES = 536  # how long a barrier may take
LIMIT = 544  # cycle count after which a step should yield; 0: never
TIMESPEC = 552  # the longest single sleep: two int64
FINISHED = 576  # threads that have left the running step
HEARTBEATS = 640  # per thread, one line: cycle count of its last sign of life
MAX_THREADS = 512
CONTROL_BYTES = HEARTBEATS + 64 * MAX_THREADS

ABORTED_BY_ENGINE = 1
BARRIER_TIMEOUT = 2

# Pauses between two looks at clock and abort word (about 20-50 µs), after which the core is also
# offered to others: with more threads than cores the missing thread may need this very core.
_LOOK_EVERY = 512


@kernel
def heartbeat(control: int, thread: int) -> None:
    """Says that the thread is alive."""
    atomic_store(control + HEARTBEATS + 64 * thread, cycles())


@kernel
def _release(control: int) -> None:
    """What the last thread to arrive does: reset, look at the clock, let the others go."""
    atomic_store(control + ARRIVED, 0)
    atomic_store(control + WORK, 0)
    limit = load_i64(control + LIMIT)
    # Written nowhere else: a thread that leaves this barrier late must still read what the others
    # read, even if the next step has been posted meanwhile.
    atomic_store(control + YIELD, 1 if limit != 0 and cycles() > limit else 0)
    atomic_add(control + GENERATION, 1)


@kernel
def barrier(control: int, num_threads: int) -> int:
    """Waits for all threads; 0, or the abort code."""
    generation = atomic_load(control + GENERATION)
    if atomic_add(control + ARRIVED, 1) == num_threads - 1:
        _release(control)
        return 0
    deadline = 0
    spins = 0
    while atomic_load(control + GENERATION) == generation:
        cpu_pause()
        spins += 1
        if spins == _LOOK_EVERY:
            spins = 0
            code = atomic_load(control + ABORT)
            if code != 0:
                return code
            if deadline == 0:
                deadline = cycles() + load_i64(control + BARRIER_CYCLES)
            elif cycles() > deadline:
                atomic_store(control + ABORT, BARRIER_TIMEOUT)
                return BARRIER_TIMEOUT
            sched_yield()
    return 0


@kernel
def wait_for_step(control: int, seen: int) -> int:
    """Number of a step newer than `seen`; spins shortly, then sleeps. -1: leave."""
    until = cycles() + load_i64(control + SPIN_CYCLES)
    while True:
        step = atomic_load(control + STEP)
        if atomic_load(control + STOP) != 0 or atomic_load(control + ABORT) != 0:
            return -1
        if step != seen:
            return step
        if cycles() < until:
            cpu_pause()
        else:
            futex_wait(control + STEP, seen & 0xFFFFFFFF, control + TIMESPEC)


@entry("int64(int64, int64)")
def post_step(control: int, descriptor: int) -> int:
    """Hands a step to the pinned threads; returns its number."""
    atomic_store(control + DESCRIPTOR, descriptor)
    step = atomic_add(control + STEP, 1) + 1
    futex_wake(control + STEP)
    return step


@entry("int64(int64, int64, int64)")
def await_step(control: int, step: int, timeout_cycles: int) -> int:
    """Sleeps until the step is done: 0, an abort code, or -1 when the time is over."""
    deadline = cycles() + timeout_cycles
    while True:
        done = atomic_load(control + DONE)
        if done >= step:
            return 0
        code = atomic_load(control + ABORT)
        if code != 0:
            return code
        if cycles() > deadline:
            return -1
        futex_wait(control + DONE, done & 0xFFFFFFFF, control + TIMESPEC)


@entry("void(int64, int64)")
def request_stop(control: int, abort_code: int) -> None:
    """Makes all threads leave: after the running step, or at once with an abort code."""
    if abort_code != 0:
        atomic_store(control + ABORT, abort_code)
    atomic_store(control + STOP, 1)
    atomic_add(control + STEP, 1)
    futex_wake(control + STEP)
    futex_wake(control + DONE)


@entry("int64()")
def read_cycles() -> int:
    """The cycle counter, to find its rate."""
    return cycles()
