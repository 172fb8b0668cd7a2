"""The numeric form of a program: what one row of its table means.

A row is `OP_WORDS` int64 words: opcode, flags, rows per part (0: the op is not cut; for
attention: those at a context of 1,024), then the arguments in the order of `ARGS`. The graph writes
rows by these names, the interpreter reads them by position. `*_private` arguments are bytes between
two threads' copies (0: one copy for all).
"""

from __future__ import annotations

OP_WORDS = 26
OP_BYTES = OP_WORDS * 8
FIRST_ARG = 3

# Flags.
SYNC = 1  # the threads of the socket wait for each other after this op
PRIVATE = 2  # every thread computes all of it for itself
ALL_TEAMS = 8  # with SYNC: the threads of all sockets
SHARED_SLOTS = 4  # skipped unless some slot has several rows in a decode step

EMBED = 1
EMBED_PACKED = 2
NORM = 3
LAST_NORM = 4
LINEAR = 5
ROPE = 6
ATTEND_MANY = 7
ATTEND_FEW = 8
ROUTE = 9
GROUP = 10
GROUP_ALL = 11
EXPERTS_UP = 12
EXPERTS_DOWN = 13

_ATTENTION = (
    "qkv", "qkv_stride", "q_norm", "k_norm", "cos", "sin", "eps", "query_scale",
    "kv_base", "slot_stride", "chunk_stride", "layer_stride", "head_stride", "layer",
    "num_heads", "num_kv_heads", "head_dim", "q", "out", "scratch", "scratch_private",
    "pieces",
)  # fmt: skip
_NORM = (
    "residual", "residual_private", "delta", "delta_stride", "num_deltas", "fresh", "weight",
    "eps", "hidden", "out", "out_private",
)  # fmt: skip
ARGS: dict[int, tuple[str, ...]] = {
    EMBED: ("table", "hidden", "first_token", "num_tokens", "out"),
    EMBED_PACKED: ("table", "hidden", "first_token", "num_tokens", "out"),
    NORM: _NORM,
    LAST_NORM: _NORM,
    LINEAR: ("x", "x_private", "x_stride", "weight", "num_pairs", "panels", "out", "out_stride",
             "of_logit_rows", "row_run"),
    ROPE: _ATTENTION,
    ATTEND_MANY: _ATTENTION,
    ATTEND_FEW: _ATTENTION,
    ROUTE: ("logits", "logits_stride", "num_experts", "top_k", "renormalise", "ids",
            "ids_private", "weights", "weights_private"),
    GROUP: ("ids", "ids_private", "weights", "weights_private", "top_k", "first_expert",
            "num_experts", "group", "group_private", "counts", "counts_private"),
    GROUP_ALL: ("group", "group_private"),
    EXPERTS_UP: ("x", "x_private", "x_stride", "weight", "num_pairs", "panels", "num_experts",
                 "group", "group_private", "top_k", "panel_run", "row_run", "hidden",
                 "hidden_stride", "scratch", "scratch_private"),
    EXPERTS_DOWN: ("hidden", "hidden_stride", "weight", "num_pairs", "panels", "num_experts",
                   "group", "group_private", "panel_run", "out", "out_stride", "scratch",
                   "scratch_private"),
}  # fmt: skip

# The step descriptor: int64 words, filled in by the engine's thread for every step.
STEP_TABLE = 0  # address of the program's table
STEP_NUM_OPS = 1
STEP_DYNAMIC = 2  # 1: items are handed out one by one and the step may yield (prefill)
STEP_ROWS = 3
STEP_LOGIT_ROWS = 4
STEP_SPANS = 5
STEP_OP = 6  # where to go on: op …
STEP_PART = 7  # … and part
STEP_TOKEN_IDS = 8  # address of int32 [rows]
STEP_ROW_SLOTS = 9  # int32 [rows]
STEP_ROW_POSITIONS = 10  # int32 [rows]
STEP_SPAN_TABLE = 11  # int64 [spans][4]: slot, start, first row, rows
STEP_LOGIT_ROW_LIST = 12  # int32 [logit rows]: row of the step
STEP_TIMES = 13  # int64 [threads][ops][2]: cycles computing, cycles waiting
STEP_CONTEXT = 14  # highest position of the step, plus one
STEP_COUNTDOWN = 15  # int64 [rows × kv_heads]: open attention pieces
STEP_SHARED_SLOTS = 16  # 1: some slot has several rows in this (decode) step
STEP_WORDS = 17
