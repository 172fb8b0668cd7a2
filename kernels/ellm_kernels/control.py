"""The control block: how the engine's thread and the pinned threads talk, and their barriers.

A block of int64 words, one cache line per word that somebody spins on. Behind the words that all
share comes a *team* block per socket, for what only the threads of one socket meet in. Functions
take addresses and work within a process and in shared memory alike. A barrier never spins for ever:
it gives up when the abort word is set, or when its deadline passes, and then sets the word itself.
"""

from __future__ import annotations

from ellm_kernels.atomics import atomic_add, atomic_load, atomic_store, cpu_pause
from ellm_kernels.jit import entry, kernel
from ellm_kernels.simd import load_i64
from ellm_kernels.system import cycles, futex_wait, futex_wake, sched_yield

# Byte offsets of the words.
STEP = 0  # number of the newest step; pinned threads sleep on it
DONE = 64  # number of the newest finished step; the engine's thread sleeps on it
ARRIVED = 128  # teams that wait for the others
GENERATION = 192
FINISHED = 256  # teams that have finished the running step
ABORT = 320  # 0, or why the block is dead
STOP = 384  # set when the threads shall leave
VERDICT = 448  # at the end of a barrier of all teams: 1 if the running step is out of time
LANE = 512  # which of a team's descriptors the step is for
NUM_TEAMS = 520
SPIN_CYCLES = 528  # how long a thread spins for a next step before it sleeps
BARRIER_CYCLES = 536  # how long a barrier may take
LIMIT = 544  # cycle count after which a step should yield; 0: never
TIMESPEC = 552  # the longest single sleep: two int64
TEAMS = 640  # the team blocks

# Byte offsets in a team block.
TEAM_ARRIVED = 0
TEAM_GENERATION = 64
TEAM_WORK = 128  # next item of the running part
TEAM_YIELD = 192  # the verdict of the last barrier
TEAM_SIZE = 256  # threads
TEAM_FINISHED = 280  # threads that have left the running step
TEAM_LANES = 264  # addresses of the descriptors of lane 0 and 1, as this team sees them
TEAM_HEARTBEATS = 320  # per thread, one line: cycle count of its last sign of life
MAX_THREADS = 256
TEAM_BYTES = TEAM_HEARTBEATS + 64 * MAX_THREADS

ABORTED_BY_ENGINE = 1
BARRIER_TIMEOUT = 2

# Pauses between two looks at clock and abort word (about 20-50 µs), after which the core is also
# offered to others: with more threads than cores the missing thread may need this very core.
_LOOK_EVERY = 512


def control_bytes(num_teams: int) -> int:
    """Bytes of a control block."""
    return TEAMS + num_teams * TEAM_BYTES


def team_offset(rank: int) -> int:
    """Where the block of a socket's threads begins."""
    return TEAMS + rank * TEAM_BYTES


@kernel
def heartbeat(team: int, thread: int) -> None:
    """Says that the thread is alive."""
    atomic_store(team + TEAM_HEARTBEATS + 64 * thread, cycles())


@kernel
def _wait(control: int, generation_word: int, generation: int) -> int:
    """Spins until the word has moved on; 0, or the abort code."""
    deadline = 0
    spins = 0
    while atomic_load(generation_word) == generation:
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
def _meet_teams(control: int) -> int:
    """What the last thread of a team does at a barrier of all teams.

    The verdict is written nowhere else: whoever leaves late must still read what the others read,
    even if the next step has been posted meanwhile.
    """
    generation = atomic_load(control + GENERATION)
    if atomic_add(control + ARRIVED, 1) == load_i64(control + NUM_TEAMS) - 1:
        atomic_store(control + ARRIVED, 0)
        limit = load_i64(control + LIMIT)
        atomic_store(control + VERDICT, 1 if limit != 0 and cycles() > limit else 0)
        atomic_add(control + GENERATION, 1)
        return 0
    return _wait(control, control + GENERATION, generation)


@kernel
def barrier(control: int, team: int, num_threads: int, everybody: bool) -> int:
    """Waits for the threads of the team, or of all teams; 0, or the abort code.

    Threads of a team meet in their own cache lines, and only one of them meets the other teams.
    """
    generation = atomic_load(team + TEAM_GENERATION)
    if atomic_add(team + TEAM_ARRIVED, 1) < num_threads - 1:
        return _wait(control, team + TEAM_GENERATION, generation)
    if everybody:
        code = _meet_teams(control)
        if code != 0:
            return code
        atomic_store(team + TEAM_YIELD, atomic_load(control + VERDICT))
    atomic_store(team + TEAM_ARRIVED, 0)
    atomic_store(team + TEAM_WORK, 0)
    atomic_add(team + TEAM_GENERATION, 1)
    return 0


@kernel
def finish_step(control: int, team: int, num_threads: int, number: int) -> None:
    """Said by every thread: the last one of all tells the engine's thread.

    Then nobody looks at the step's memory any more.
    """
    if atomic_add(team + TEAM_FINISHED, 1) < num_threads - 1:
        return
    atomic_store(team + TEAM_FINISHED, 0)
    if atomic_add(control + FINISHED, 1) == load_i64(control + NUM_TEAMS) - 1:
        atomic_store(control + FINISHED, 0)
        atomic_store(control + DONE, number)
        futex_wake(control + DONE)


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
def post_step(control: int, lane: int) -> int:
    """Hands the step of a lane's descriptors to the pinned threads; returns its number."""
    atomic_store(control + LANE, lane)
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
