"""Attention's ops: arguments from the program's table to the kernels of `rope` and `attention*`."""

from __future__ import annotations

from ellm_kernels import opcodes as oc
from ellm_kernels.attention import attend_prefill, num_prefill_units
from ellm_kernels.attention_decode import DecodeWork, decode_attention
from ellm_kernels.jit import kernel
from ellm_kernels.kv_layout import Heads, KvLayout
from ellm_kernels.op_args import arg, arg_f32, word
from ellm_kernels.rope import Rotary, StepRows, kv_write_rows, q_rows
from ellm_kernels.simd import load_i64

SPAN_BYTES = 32


@kernel
def _rotary(op: int) -> Rotary:
    return Rotary(arg(op, 2), arg(op, 3), arg(op, 4), arg(op, 5), arg_f32(op, 6), arg_f32(op, 7))


@kernel
def _kv(op: int) -> KvLayout:
    return KvLayout(arg(op, 8), arg(op, 9), arg(op, 10), arg(op, 11), arg(op, 12), arg(op, 16))


@kernel
def _heads(op: int) -> Heads:
    return Heads(arg(op, 14), arg(op, 15), arg(op, 16))


@kernel
def _rows(step: int) -> StepRows:
    return StepRows(
        word(step, oc.STEP_ROWS),
        word(step, oc.STEP_ROW_SLOTS),
        word(step, oc.STEP_ROW_POSITIONS),
    )


@kernel
def _scratch(op: int, thread: int) -> int:
    return arg(op, 19) + thread * arg(op, 20)


@kernel
def rope_items(op: int, step: int, first: int, stop: int, thread: int) -> None:
    """Rows first … stop-1: keys and values to the KV tensor, queries to `q` if there is one."""
    if first >= stop:
        return
    heads, scratch, rows, rotary = _heads(op), _scratch(op, thread), _rows(step), _rotary(op)
    kv_write_rows(
        arg(op, 0), arg(op, 1), rows, first, stop, 0, heads.num_kv_heads, rotary, heads, _kv(op),
        arg(op, 13), scratch,
    )  # fmt: skip
    if arg(op, 17) != 0:
        q_rows(
            arg(op, 0), arg(op, 1), rows, first, stop, 0, heads.num_heads, rotary, heads, scratch,
            arg(op, 17),
        )  # fmt: skip


@kernel
def _span(step: int, index: int, field: int) -> int:
    return load_i64(word(step, oc.STEP_SPAN_TABLE) + index * SPAN_BYTES + 8 * field)


@kernel
def many_items(op: int, step: int) -> int:
    """Tiles of all spans."""
    total = 0
    for span in range(word(step, oc.STEP_SPANS)):
        total += num_prefill_units(_span(step, span, 3), _heads(op))
    return total


@kernel
def attend_many(op: int, step: int, begin: int, end: int, thread: int) -> None:
    """Tiles begin … end-1 of a prefill block, numbered through its spans."""
    heads = _heads(op)
    row_bytes = heads.num_heads * heads.head_dim * 2
    first = 0
    for span in range(word(step, oc.STEP_SPANS)):
        units = num_prefill_units(_span(step, span, 3), heads)
        low, high = max(begin - first, 0), min(end - first, units)
        if low < high:
            offset = _span(step, span, 2) * row_bytes
            attend_prefill(
                arg(op, 17) + offset, heads, _kv(op), arg(op, 13), _span(step, span, 0),
                _span(step, span, 1), _span(step, span, 3), low, high, _scratch(op, thread),
                arg(op, 18) + offset,
            )  # fmt: skip
        first += units


@kernel
def attend_few(op: int, step: int, thread: int, num_threads: int) -> None:
    """One thread's share of a decode step's attention, KV write included."""
    work = DecodeWork(arg(op, 21), word(step, oc.STEP_COUNTDOWN))
    decode_attention(
        thread, num_threads, arg(op, 0), arg(op, 1), _rows(step), word(step, oc.STEP_SHARED_SLOTS),
        _rotary(op), _heads(op), _kv(op), arg(op, 13), work, _scratch(op, thread), arg(op, 18),
    )  # fmt: skip


@kernel
def num_parts(op: int, step: int) -> int:
    """Parts of an op in this step: from its rows alone, so that every socket cuts alike.

    Attention costs the more the longer the context is.
    """
    part_rows = load_i64(op + 16)
    if part_rows == 0:
        return 1
    rows = word(step, oc.STEP_ROWS)
    if load_i64(op) == oc.ATTEND_MANY:
        rows = rows * word(step, oc.STEP_CONTEXT) // 1024
    return max(1, (rows + part_rows - 1) // part_rows)
