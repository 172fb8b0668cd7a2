"""What each opcode does: how many items an op has in a step, and the run of a range of them.

Arguments are read by position; `opcodes.ARGS` names them. An item is what one thread can compute
without the others: a few rows, a panel, an expert's panels, an attention tile.
"""

from __future__ import annotations

from ellm_kernels import opcodes as oc
from ellm_kernels.attention_runs import attend_few, attend_many, many_items, rope_items
from ellm_kernels.embedding import embed_packed_rows, embed_rows
from ellm_kernels.experts import experts_down, experts_up, group_all, group_experts, num_active
from ellm_kernels.gemm import multiply_panel
from ellm_kernels.jit import kernel
from ellm_kernels.norm import rms_norm_rows
from ellm_kernels.op_args import arg, arg_f32, word
from ellm_kernels.router import route_row
from ellm_kernels.simd import load_i64, load_index
from ellm_kernels.tiles import PAIR_BYTES

# Rows of one item of the row-wise ops.
ROW_RUN = 8


@kernel
def _runs(count: int, run: int) -> int:
    return (count + run - 1) // run


@kernel
def _linear_rows(op: int, step: int) -> int:
    return word(step, oc.STEP_LOGIT_ROWS if arg(op, 8) else oc.STEP_ROWS)


@kernel
def num_items(op: int, step: int, thread: int, num_threads: int) -> int:
    """Items of an op in this step; every thread gets the same answer."""
    code = load_i64(op)
    rows = word(step, oc.STEP_ROWS)
    if code == oc.LINEAR:
        return arg(op, 5) * _runs(_linear_rows(op, step), arg(op, 9))
    if code == oc.ATTEND_MANY:
        return many_items(op, step)
    if code == oc.ATTEND_FEW:
        return num_threads
    if code == oc.GROUP:
        return min(num_threads, arg(op, 6)) if arg(op, 8) == 0 else 1
    if code == oc.GROUP_ALL:
        return 1
    if code == oc.EXPERTS_UP:
        active = num_active(arg(op, 7) + thread * arg(op, 8))
        return active * _runs(arg(op, 5), arg(op, 10)) * _runs(rows, arg(op, 11))
    if code == oc.EXPERTS_DOWN:
        return _runs(arg(op, 4), arg(op, 8))
    if code == oc.LAST_NORM:
        return _runs(word(step, oc.STEP_LOGIT_ROWS), ROW_RUN)
    return _runs(rows, ROW_RUN)


@kernel
def _embed(op: int, step: int, begin: int, end: int, packed: bool) -> None:
    ids = word(step, oc.STEP_TOKEN_IDS)
    if packed:
        embed_packed_rows(
            arg(op, 0), ids, arg(op, 2), arg(op, 3), arg(op, 1), begin, end, arg(op, 4)
        )
    else:
        embed_rows(arg(op, 0), ids, arg(op, 2), arg(op, 3), arg(op, 1), begin, end, arg(op, 4))


@kernel
def _norm(op: int, begin: int, end: int, thread: int) -> None:
    rms_norm_rows(
        arg(op, 0) + thread * arg(op, 1), arg(op, 2), arg(op, 3), arg(op, 4), arg(op, 5),
        arg(op, 6), arg_f32(op, 7), arg(op, 8), begin, end, arg(op, 9) + thread * arg(op, 10),
    )  # fmt: skip


@kernel
def _last_norm(op: int, step: int, begin: int, end: int, thread: int) -> None:
    """The norm before lm_head, of the rows whose logits are wanted, closed up."""
    rows = word(step, oc.STEP_LOGIT_ROW_LIST)
    hidden = arg(op, 8)
    for i in range(begin, end):
        row = load_index(rows + 4 * i) * hidden * 4
        rms_norm_rows(
            arg(op, 0) + thread * arg(op, 1) + row, arg(op, 2) + row, arg(op, 3), arg(op, 4),
            arg(op, 5), arg(op, 6), arg_f32(op, 7), hidden, 0, 1,
            arg(op, 9) + thread * arg(op, 10) + i * hidden * 2,
        )  # fmt: skip


@kernel
def _linear(op: int, step: int, begin: int, end: int, thread: int) -> None:
    """Items are panels × runs of rows, rows fastest."""
    rows = _linear_rows(op, step)
    x = arg(op, 0) + thread * arg(op, 1)
    x_stride, weight, num_pairs, out, out_stride, run = (
        arg(op, 2), arg(op, 3), arg(op, 4), arg(op, 6), arg(op, 7), arg(op, 9),
    )  # fmt: skip
    runs = _runs(rows, run)
    for item in range(begin, end):
        panel = item // runs
        first = item % runs * run
        at = weight + panel * num_pairs * PAIR_BYTES
        multiply_panel(
            min(run, rows - first), x + first * x_stride, x_stride, at, num_pairs,
            out + first * out_stride + panel * 256, out_stride, at + num_pairs * PAIR_BYTES,
        )  # fmt: skip


@kernel
def _route(op: int, begin: int, end: int, thread: int) -> None:
    top_k = arg(op, 3)
    ids, weights = arg(op, 5) + thread * arg(op, 6), arg(op, 7) + thread * arg(op, 8)
    for row in range(begin, end):
        route_row(
            arg(op, 0) + row * arg(op, 1), arg(op, 2), top_k, arg(op, 4), ids + row * top_k * 4,
            weights + row * top_k * 4,
        )  # fmt: skip


@kernel
def _group(op: int, step: int, begin: int, end: int, thread: int, num_threads: int) -> None:
    """Items are shares of the experts, so several threads sort at once."""
    shares = num_items(op, step, thread, num_threads)
    num_experts = arg(op, 6)
    group_experts(
        arg(op, 0) + thread * arg(op, 1), arg(op, 2) + thread * arg(op, 3),
        word(step, oc.STEP_ROWS), arg(op, 4), arg(op, 5), num_experts,
        arg(op, 7) + thread * arg(op, 8), arg(op, 9) + thread * arg(op, 10),
        num_experts * begin // shares, num_experts * end // shares,
    )  # fmt: skip


@kernel
def _experts_up(op: int, step: int, begin: int, end: int, thread: int) -> None:
    rows = word(step, oc.STEP_ROWS)
    experts_up(
        arg(op, 0) + thread * arg(op, 1), arg(op, 2), arg(op, 3), arg(op, 4), arg(op, 5),
        arg(op, 6), arg(op, 7) + thread * arg(op, 8), rows * arg(op, 9), arg(op, 10), arg(op, 11),
        _runs(rows, arg(op, 11)), begin, end, arg(op, 12), arg(op, 13),
        arg(op, 14) + thread * arg(op, 15),
    )  # fmt: skip


@kernel
def _experts_down(op: int, step: int, begin: int, end: int, thread: int) -> None:
    panels, run = arg(op, 4), arg(op, 8)
    experts_down(
        arg(op, 0), arg(op, 1), arg(op, 2), arg(op, 3), panels, arg(op, 5),
        arg(op, 6) + thread * arg(op, 7), word(step, oc.STEP_ROWS), begin * run,
        min(end * run, panels), arg(op, 9), arg(op, 10), arg(op, 11) + thread * arg(op, 12),
    )  # fmt: skip


@kernel
def run_items(op: int, step: int, begin: int, end: int, thread: int, num_threads: int) -> None:
    """Computes items begin … end-1 of an op."""
    code = load_i64(op)
    rows = word(step, oc.STEP_ROWS)
    first, stop = begin * ROW_RUN, min(end * ROW_RUN, rows)
    if code == oc.LINEAR:
        _linear(op, step, begin, end, thread)
    elif code == oc.EXPERTS_UP:
        _experts_up(op, step, begin, end, thread)
    elif code == oc.EXPERTS_DOWN:
        _experts_down(op, step, begin, end, thread)
    elif code == oc.ATTEND_FEW:
        attend_few(op, step, thread, num_threads)
    elif code == oc.ATTEND_MANY:
        attend_many(op, step, begin, end, thread)
    elif code == oc.NORM:
        _norm(op, first, stop, thread)
    elif code == oc.ROPE:
        rope_items(op, step, first, stop, thread)
    elif code == oc.ROUTE:
        _route(op, first, stop, thread)
    elif code == oc.GROUP:
        _group(op, step, begin, end, thread, num_threads)
    elif code == oc.GROUP_ALL:
        if begin < end:
            group_all(arg(op, 0) + thread * arg(op, 1), rows)
    elif code == oc.EMBED:
        _embed(op, step, first, stop, False)
    elif code == oc.EMBED_PACKED:
        _embed(op, step, first, stop, True)
    elif code == oc.LAST_NORM:
        last = min(end * ROW_RUN, word(step, oc.STEP_LOGIT_ROWS))
        _last_norm(op, step, first, last, thread)
