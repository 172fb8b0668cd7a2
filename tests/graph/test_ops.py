"""Ops: rows of the table carry every argument, costs count what is really read and computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ellm_kernels import opcodes as oc
from ellm_serve.graph.ops import (
    Embed,
    Experts,
    Linear,
    Load,
    RmsNorm,
    Router,
    Row,
    Stage,
    float_bits,
)
from ellm_serve.graph.tensor import Arena, Exchange, Mode, Per, Tensor, bf16_rows, f32_rows
from ellm_serve.model.sharding import Part

X = bf16_rows("x", 128, local=True)
OUT = f32_rows("out", 200)
LAST = f32_rows("last", 200, Per.LOGIT_ROW)
GROUP, ACTIVATED, SCRATCH = (
    Tensor("group", 4096, Per.STEP, local=True),
    Tensor("activated", 512),
    Tensor("scratch", 1000, Per.THREAD),
)
TENSORS = (X, OUT, LAST, GROUP, ACTIVATED, SCRATCH)
DELTA = f32_rows("delta", 128)
SHARES = Exchange(base=1 << 30, stride=1 << 16, rank=2, count=4)


def stage(mode: Mode, rows: int = 8, threads: int = 3, part_flops: float = 1e30) -> Stage:
    arena = Arena(mode, rows, 2, threads, base=1 << 20)
    for tensor in TENSORS:
        arena.add(tensor)
    arena.share(DELTA, SHARES)
    return Stage(arena, threads, part_flops)


def linear(last: bool = False) -> Linear:
    return Linear("qkv", X, 4096, 128, 200, LAST if last else OUT, last)


def experts(num_experts: int = 8, top_k: int = 2, share: float = 1.0) -> Experts:
    return Experts(
        "experts", X, 4096, 8192, 128, 100, num_experts, top_k, GROUP, ACTIVATED, SCRATCH, OUT,
        share,
    )  # fmt: skip


def test_row_words() -> None:
    """Arguments lie in the order the interpreter reads them, padded to a whole row."""
    args = {"out": 15, "table": 11, "hidden": 12, "num_tokens": 14, "first_token": 13}
    words = Row(oc.EMBED, oc.SYNC, args, part_rows=5).words()
    assert words[:8] == [oc.EMBED, oc.SYNC, 5, 11, 12, 13, 14, 15]
    assert len(words) == oc.OP_WORDS and not any(words[8:])


EMBEDDING = {"table": 1, "hidden": 2, "first_token": 0, "num_tokens": 9, "out": 3}


@pytest.mark.parametrize("broken", [{"table": 1}, EMBEDDING | {"size": 4}])
def test_row_refuses_other_arguments(broken: dict[str, int]) -> None:
    """A forgotten or misspelt argument is a mistake here, not a wild address later."""
    with pytest.raises(AssertionError):
        Row(oc.EMBED, 0, broken).words()


def test_every_opcode_fits_in_a_row() -> None:
    """Names are unique within an op, and attention's three ops share one list."""
    for names in oc.ARGS.values():
        assert len(set(names)) == len(names) <= oc.OP_WORDS - oc.FIRST_ARG
    assert oc.ARGS[oc.ROPE] == oc.ARGS[oc.ATTEND_MANY] == oc.ARGS[oc.ATTEND_FEW]


def test_float_bits() -> None:
    assert float_bits(1.0) == 0x3F800000
    assert float_bits(-2.5) == 0xC0200000


def test_linear_addresses() -> None:
    """Strides are those of the buffers: rows of whole panels out, exact rows in."""
    at = stage(Mode.FEW)
    (row,) = linear().lower(at)
    assert row.args["x"] == at.arena[X].address
    assert row.args["x_private"] == at.arena[X].private == 8 * 256
    assert (row.args["x_stride"], row.args["out_stride"]) == (256, 4 * 256)
    assert (row.args["panels"], row.args["num_pairs"]) == (4, 64)
    assert row.args["of_logit_rows"] == 0 and row.flags == oc.SYNC
    (last,) = linear(last=True).lower(at)
    assert last.args["of_logit_rows"] == 1
    assert last.args["out"] == at.arena[LAST].address


def test_linear_decode_visits_each_panel_once() -> None:
    """With few rows a panel is read from memory once, whatever the number of rows."""
    (row,) = linear().lower(stage(Mode.FEW, rows=40))
    assert row.args["row_run"] == 40


@pytest.mark.parametrize("part_flops", [1.0, 1e6, 1e7])
@pytest.mark.parametrize("make", [linear, experts], ids=["linear", "experts"])
def test_parts_bound_the_work_between_yield_points(
    make: Callable[[], Linear | Experts], part_flops: float
) -> None:
    """A part holds no more work than asked for, unless a single row already does."""
    total = 0.0
    for row in make().lower(stage(Mode.MANY, rows=2048, threads=3, part_flops=part_flops)):
        assert 1 <= row.part_rows < 2048
        total += make().flops(Load(row.part_rows, 0, 0))
    # Each of the two rows of `Experts` is counted with the cost of both.
    assert total <= 5 * part_flops or total <= 2 * make().flops(Load(1, 0, 0))
    coarse = make().lower(stage(Mode.MANY, rows=2048, part_flops=1e30))
    assert [row.part_rows for row in coarse] == [0] * len(coarse)


def test_decode_has_no_parts() -> None:
    """A decode step never yields."""
    rows = linear().lower(stage(Mode.FEW, part_flops=1.0))
    rows += experts().lower(stage(Mode.FEW, part_flops=1.0))
    assert [row.part_rows for row in rows] == [0, 0, 0]


def test_embed_chooses_its_table() -> None:
    """A tied model reads lm_head's panels; other sockets wait for the rows in either mode."""
    for packed, code in ((False, oc.EMBED), (True, oc.EMBED_PACKED)):
        op = Embed("embed", 4096, packed, 128, 256, 64, DELTA)
        for mode in Mode:
            (row,) = op.lower(stage(mode))
            assert (row.opcode, row.flags) == (code, oc.SYNC | oc.ALL_TEAMS)
            assert (row.args["first_token"], row.args["num_tokens"]) == (256, 64)
            assert row.args["out"] == SHARES.base + 2 * SHARES.stride


@pytest.mark.parametrize("mode", Mode)
def test_a_norm_reads_the_shares_of_all_sockets(mode: Mode) -> None:
    """From the first socket's on, whichever socket this is; decode norms are every thread's own."""
    at = stage(mode)
    (row,) = RmsNorm("norm", OUT, DELTA, 64, 1e-6, 128, X, fresh=True).lower(at)
    assert (row.args["delta"], row.args["delta_stride"]) == (SHARES.base, SHARES.stride)
    assert (row.args["num_deltas"], row.args["fresh"]) == (4, 1)
    assert row.flags == (oc.PRIVATE if mode is Mode.FEW else oc.SYNC)
    (row,) = RmsNorm("norm", OUT, DELTA, 64, 1e-6, 128, X, last=True).lower(at)
    assert (row.opcode, row.args["fresh"]) == (oc.LAST_NORM, 0)


def test_other_sockets_wait_for_what_they_read() -> None:
    """Sums over sockets and logits are waited for by all, products of one socket by its own."""
    for mode in Mode:
        shared = Linear("o_proj", X, 4096, 128, 128, DELTA, shared=True)
        assert shared.lower(stage(mode))[0].flags == oc.SYNC | oc.ALL_TEAMS
        assert [row.flags for row in experts().lower(stage(mode))] == [
            oc.SYNC,
            oc.SYNC | oc.ALL_TEAMS,
        ]


def test_router_chooses_among_all_and_groups_its_own() -> None:
    """Every socket routes alike; only the group knows which experts are here."""
    tensors = (f32_rows("logits", 8), Tensor("ids", 8), Tensor("chosen", 8), GROUP, SCRATCH)
    logits, ids, weights, group, counts = tensors
    at = stage(Mode.MANY)
    for tensor in (logits, ids, weights):
        at.arena.add(tensor)
    op = Router("route", logits, 8, Part(4, 6), 2, True, ids, weights, group, counts)
    route, grouped = op.lower(at)
    assert (route.opcode, route.args["num_experts"]) == (oc.ROUTE, 8)
    assert (grouped.args["first_expert"], grouped.args["num_experts"]) == (4, 2)


def test_linear_cost() -> None:
    """Two operations per weight and row; weights are read once, and not at all without rows."""
    assert linear().flops(Load(5, 0, 0)) == 2 * 128 * 200 * 5
    assert linear().bytes(Load(5, 0, 0)) == 2 * 128 * 200
    assert linear(last=True).flops(Load(5, 0, 2)) == 2 * 128 * 200 * 2
    assert linear(last=True).bytes(Load(5, 0, 0)) == 0


def test_experts_cost() -> None:
    """One row reads its own experts, many rows read nearly all, none is counted twice."""
    one = 3 * 128 * 100 * 2
    assert experts().flops(Load(3, 0, 0)) == 2 * 3 * 128 * 100 * 2 * 3
    assert experts().bytes(Load(1, 0, 0)) == pytest.approx(2 * one)
    assert 7.9 * one < experts().bytes(Load(64, 0, 0)) <= 8 * one
    assert experts(1, 1).bytes(Load(64, 0, 0)) == one


def test_cost_of_a_share_of_the_experts() -> None:
    """Two of eight experts: a quarter of the rows' work, and no more bytes than are held."""
    one, load = 3 * 128 * 100 * 2, Load(3, 0, 0)
    assert experts(2, share=0.25).flops(load) == experts().flops(load) / 4
    assert experts(2, share=0.25).bytes(Load(1, 0, 0)) == pytest.approx(2 * one / 4)
    assert 1.9 * one < experts(2, share=0.25).bytes(Load(64, 0, 0)) <= 2 * one
