"""The compiled interpreter: every pinned thread stays in `serve_steps` for its whole life.

It reads the program's table row by row and calls the kernel the opcode names on a range of items.
In a *static* step (decode) every thread takes a contiguous share of each op's items; in a *dynamic*
one (prefill) threads fetch items one by one and the step may stop between two parts of an op, to be
gone on with later. Neither changes a single bit of the result.
"""

from __future__ import annotations

from ellm_kernels import opcodes
from ellm_kernels.atomics import atomic_add, atomic_load
from ellm_kernels.attention_runs import num_parts
from ellm_kernels.control import (
    ABORT,
    DONE,
    LANE,
    TEAM_LANES,
    TEAM_SIZE,
    TEAM_WORK,
    TEAM_YIELD,
    barrier,
    finish_step,
    heartbeat,
    wait_for_step,
)
from ellm_kernels.jit import entry, kernel
from ellm_kernels.op_args import word
from ellm_kernels.op_runs import num_items, run_items
from ellm_kernels.opcodes import (
    ALL_TEAMS,
    OP_BYTES,
    PRIVATE,
    SHARED_SLOTS,
    STEP_DYNAMIC,
    STEP_NUM_OPS,
    STEP_OP,
    STEP_PART,
    STEP_SHARED_SLOTS,
    STEP_TABLE,
    STEP_TIMES,
    SYNC,
)
from ellm_kernels.simd import load_i64, store_i64
from ellm_kernels.system import cycles, futex_wake


@kernel
def _part_begin(items: int, part: int, parts: int, num_threads: int) -> int:
    """First item of a part: whole turns of all threads, so that none waits for a half turn."""
    if part >= parts:
        return items
    return items * part // parts // num_threads * num_threads


@kernel
def _run_static(op: int, flags: int, items: int, step: int, thread: int, num_threads: int) -> None:
    begin, end = 0, items
    if flags & PRIVATE == 0:
        begin = items * thread // num_threads
        end = items * (thread + 1) // num_threads
    run_items(op, step, begin, end, thread, num_threads)


@kernel
def _run_dynamic(
    team: int, op: int, begin: int, end: int, step: int, thread: int, num_threads: int
) -> None:
    item = begin + atomic_add(team + TEAM_WORK, 1)
    while item < end:
        run_items(op, step, item, item + 1, thread, num_threads)
        item = begin + atomic_add(team + TEAM_WORK, 1)


@kernel
def _record(step: int, num_ops: int, index: int, thread: int, busy: int, waited: int) -> None:
    at = word(step, STEP_TIMES) + 16 * (thread * num_ops + index)
    store_i64(at, load_i64(at) + busy)
    store_i64(at + 8, load_i64(at + 8) + waited)


@kernel
def run_program(control: int, team: int, step: int, thread: int, num_threads: int) -> int:
    """Runs a step from where it stands to its end or to where it yields: 0, or the abort code.

    A dynamic step may stop at any barrier, and all sockets must stop at the same one: so there all
    its barriers are of all teams.
    """
    num_ops = word(step, STEP_NUM_OPS)
    dynamic = word(step, STEP_DYNAMIC) != 0
    index = word(step, STEP_OP)
    part = word(step, STEP_PART)
    while index < num_ops:
        op = word(step, STEP_TABLE) + index * OP_BYTES
        flags = load_i64(op + 8)
        if flags & SHARED_SLOTS and word(step, STEP_SHARED_SLOTS) == 0:
            index += 1
            continue
        started = cycles()
        items = num_items(op, step, thread, num_threads)
        last_part = True
        if dynamic:
            parts = num_parts(op, step)
            begin = _part_begin(items, part, parts, num_threads)
            end = _part_begin(items, part + 1, parts, num_threads)
            last_part = part + 1 >= parts
            _run_dynamic(team, op, begin, end, step, thread, num_threads)
        else:
            _run_static(op, flags, items, step, thread, num_threads)
        heartbeat(team, thread)
        finished = cycles()
        if flags & SYNC:
            everybody = dynamic or flags & ALL_TEAMS != 0
            code = barrier(control, team, num_threads, everybody)
            if code != 0:
                return code
        _record(step, num_ops, index, thread, finished - started, cycles() - finished)
        part += 1
        if last_part:
            index += 1
            part = 0
        if dynamic and flags & SYNC and atomic_load(team + TEAM_YIELD) != 0:
            break
    # Everybody has read the place to start from before the last barrier let anybody through.
    if thread == 0:
        store_i64(step + 8 * STEP_OP, index)
        store_i64(step + 8 * STEP_PART, part)
    return 0


@entry("int64(int64, int64, int64, int64)")
def serve_steps(control: int, team: int, thread: int, seen: int) -> int:
    """A pinned thread's life: waits for steps newer than `seen` and runs them until told to stop.

    Returns 0 after a stop and the abort code otherwise.
    """
    num_threads = load_i64(team + TEAM_SIZE)
    while True:
        heartbeat(team, thread)
        number = wait_for_step(control, seen)
        if number < 0:
            return atomic_load(control + ABORT)
        seen = number
        step = load_i64(team + TEAM_LANES + 8 * atomic_load(control + LANE))
        code = run_program(control, team, step, thread, num_threads)
        if code != 0:
            futex_wake(control + DONE)
            return code
        finish_step(control, team, num_threads, number)


assert opcodes.FIRST_ARG + max(len(names) for names in opcodes.ARGS.values()) <= opcodes.OP_WORDS
