"""One, two and four sockets: the same model, and on each number of sockets the same bits always.

The sockets share this machine's cores. More sockets add up the same products in another order, so
logits may differ from one socket's by float32 rounding, and where that moves a value across a bf16
rounding, by a little more; within one number of sockets nothing may differ at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ellm_serve
from ellm_kernels.control import ABORTED_BY_ENGINE, BARRIER_TIMEOUT, request_stop
from ellm_serve.engine.executor import LogitRows, Span
from ellm_serve.engine.group import GroupOptions, SocketGroup
from ellm_serve.engine.socket import Socket
from ellm_serve.engine.solo import SoloExecutor
from ellm_serve.errors import ConfigError, KVExhausted, WorkerDied
from ellm_serve.graph.tensor import Mode
from ellm_serve.model.region import Region
from ellm_serve.model.sharding import ExpertSplit
from ellm_serve.text.tokenizer import Tokenizer
from tests.naive.qwen3 import Qwen3
from tests.running import SMALL, Ids, Logits, Model, assert_same, decode, prefill, run_block

MakeExecutor = Callable[..., SoloExecutor]
MakeModel = Callable[..., Model]
ComputeThreads = Callable[[], list[str]]

# Against one socket, of logits with a standard deviation of about 3: operands are rounded to bf16
# (2⁻⁸), and a sum that comes out differently in its last bit now and then rounds the other way.
# Measured: at most 0.042 and 0.0037.
MAX_DIFFERENCE, MEAN_DIFFERENCE = 0.1, 0.01
# Positions where a choice of experts hangs on a rounding are left out; see `routing_gaps`.
CLEAR_GAP = 0.015
NEAR_TIE = 1e-2
LENGTH = 131

SLICE, WHOLE = ExpertSplit
MODELS: dict[str, tuple[dict[str, Any], ExpertSplit]] = {
    "dense": ({"moe": False}, SLICE),
    "dense, tied, one kv-head, uneven vocabulary": (
        {"moe": False, "tie": True, "heads": 8, "kv_heads": 1, "head_dim": 16, "vocab": 450,
         "intermediate": 200}, SLICE,
    ),
    "dense, kv-heads for everybody": (
        {"moe": False, "heads": 16, "kv_heads": 4, "head_dim": 64, "hidden": 64, "vocab": 450},
        SLICE,
    ),
    "sliced experts, tied": ({"moe": True, "tie": True}, SLICE),
    "whole experts, tied": ({"moe": True, "tie": True}, WHOLE),
    "whole experts of an odd width": (
        {"moe": True, "experts": 20, "top_k": 4, "moe_intermediate": 38}, WHOLE,
    ),
    "sliced experts, first layer dense": (
        {"moe": True, "heads": 8, "kv_heads": 1, "mlp_only_layers": (0,), "intermediate": 136,
         "moe_intermediate": 72, "experts": 5, "top_k": 3, "norm_topk_prob": False}, SLICE,
    ),
    "whole experts, second layer dense": (
        {"moe": True, "mlp_only_layers": (1,), "vocab": 450}, WHOLE,
    ),
}  # fmt: skip


class Case:
    """A model, how it is cut, and executors for it."""

    def __init__(self, model: Model, split: ExpertSplit, make: MakeExecutor, sockets: int) -> None:
        self.model = model
        self.ids = model.ids(LENGTH)
        self.sockets = sockets
        self._split = split
        self._make = make

    def executor(self, threads: int = 1, **options: Any) -> SoloExecutor:
        chosen = {"expert_split": self._split} | options
        return self._make(self.model, threads, **({"sockets": self.sockets} | chosen))


@pytest.fixture(params=list(MODELS.values()), ids=list(MODELS))
def uncut(
    request: pytest.FixtureRequest, make_model: MakeModel, make_executor: MakeExecutor
) -> Case:
    arguments, split = request.param
    return Case(make_model(**arguments), split, make_executor, 1)


@pytest.fixture(params=[2, 4], ids=lambda sockets: f"{sockets} sockets")
def case(request: pytest.FixtureRequest, uncut: Case, make_executor: MakeExecutor) -> Case:
    return Case(uncut.model, uncut._split, make_executor, request.param)


def clear_positions(model: Model, ids: Ids) -> Any:
    """[position] where every choice of experts is safe from roundings."""
    if not model.config.num_experts:
        return np.ones(len(ids), bool)
    return Qwen3.load(model.directory).routing_gaps(ids) >= CLEAR_GAP


def test_logits_are_those_of_one_socket(case: Case) -> None:
    """A head, column, expert or token on the wrong socket, or one added twice, is far outside."""
    ids = case.model.ids(250, seed=1)
    one = prefill(case.executor(2, sockets=1), ids)
    cut = prefill(case.executor(), ids)
    assert cut.shape == one.shape and one.std() > 0.3
    distance = np.abs(cut.astype(np.float64) - one)
    clear = clear_positions(case.model, ids)
    shown = (
        f"{case.sockets} sockets: max {distance[clear].max():.3g}, mean {distance.mean():.3g};"
        f" {(~clear).sum()} unclear positions: max {distance[~clear].max(initial=0):.3g}"
    )
    assert clear.mean() > 0.5
    assert distance[clear].max() <= MAX_DIFFERENCE, shown
    assert distance[clear].mean() <= MEAN_DIFFERENCE, shown
    # The sums really are other ones: this compares two ways, not one with itself.
    assert (cut != one).any()


def test_token_by_token(case: Case) -> None:
    """A prompt at once and a prompt in decode steps: the same bits."""
    executor = case.executor()
    assert_same(prefill(executor, case.ids), decode(executor, case.ids, slot=1))


def test_run_to_run(case: Case) -> None:
    """Sums over sockets do not depend on who arrives first."""
    executor, other = case.executor(), case.executor()
    first = prefill(executor, case.ids)
    for again in (executor, other, executor):
        assert_same(first, prefill(again, case.ids, slot=2))


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_show(case: Case, threads: int) -> None:
    """More threads per socket, more than cores included."""
    one, more = case.executor(1), case.executor(threads)
    assert_same(prefill(one, case.ids), prefill(more, case.ids))
    assert_same(prefill(one, case.ids), decode(more, case.ids, slot=1))


@pytest.mark.parametrize("block", [1, 7, 64])
def test_block_size(case: Case, block: int) -> None:
    """The size of a block does not show."""
    executor = case.executor()
    whole = prefill(executor, case.ids)
    assert_same(whole, prefill(executor, case.ids, slot=1, block=block))


@pytest.mark.parametrize("threads", [1, 2])
def test_yield_points(case: Case, threads: int) -> None:
    """All sockets stop at the same place and go on there; else they would never meet again."""
    expected = prefill(case.executor(), case.ids)
    executor = case.executor(threads, part_flops_per_thread=1e4)
    executor.commit(0, LENGTH)
    executor.start_prefill([Span(0, 0, case.ids, LogitRows.ALL)])
    yields = 0
    while (logits := executor.run_prefill(1e-9)) is None:
        yields += 1
    assert yields >= 5 * case.model.config.num_layers
    assert_same(expected, logits)


def test_a_verdict_to_yield_counts_once(case: Case) -> None:
    """Gone on with without a budget, a block runs to its end wherever it had stopped."""
    executor = case.executor(part_flops_per_thread=1e4)
    expected = prefill(executor, case.ids)
    executor.commit(1, LENGTH)
    for stops in range(1, 30, 4):
        executor.start_prefill([Span(1, 0, case.ids, LogitRows.ALL)])
        for _ in range(stops):
            assert executor.run_prefill(1e-9) is None
        logits = executor.run_prefill(0.0)
        assert logits is not None
        assert_same(expected, logits)


@pytest.mark.parametrize("budget_s", [1e-6, 1e-4])
def test_yields_in_between(case: Case, budget_s: float) -> None:
    """With budgets that run out now and then, the sockets' clocks decide once and for all."""
    executor = case.executor(2, part_flops_per_thread=1e4)
    expected = prefill(executor, case.ids)
    for slot in (1, 2):
        assert_same(expected, prefill(executor, case.ids, slot=slot, budget_s=budget_s))


def test_decode_between_prefill_segments(case: Case) -> None:
    """Two programs in flight on the same sockets do not disturb each other."""
    executor, ids = case.executor(2, part_flops_per_thread=1e4), case.ids
    expected = prefill(executor, ids, slot=2)
    executor.commit(0, LENGTH)
    executor.commit(1, LENGTH)
    decoded: list[Logits] = []
    for _ in range(3):
        executor.start_prefill([Span(0, 0, ids, LogitRows.ALL)])
        while (logits := executor.run_prefill(1e-9)) is None:
            at = len(decoded)
            if at < LENGTH:
                span = Span(1, at, ids[at : at + 1], LogitRows.LAST)
                decoded.append(executor.decode([span]).copy())
        assert_same(expected, logits)
    assert len(decoded) > 20
    assert_same(expected[: len(decoded)], np.concatenate(decoded))


def test_neighbours_and_logit_rows(case: Case) -> None:
    """Rows of several slots in one step, with few, all and no logits: each as if alone."""
    executor = case.executor()
    prompts = [case.model.ids(length, seed=slot) for slot, length in enumerate((3, 40, 64))]
    alone = [prefill(executor, prompt, slot=3) for prompt in prompts]
    for slot, prompt in enumerate(prompts):
        executor.commit(slot, len(prompt))
    kinds = (LogitRows.LAST, LogitRows.ALL, LogitRows.NONE)
    spans = [Span(slot, 0, prompt, kinds[slot]) for slot, prompt in enumerate(prompts)]
    assert_same(np.concatenate([alone[0][-1:], alone[1]]), run_block(executor, spans))
    last = [Span(slot, len(prompt) - 1, prompt[-1:], LogitRows.LAST)
            for slot, prompt in enumerate(prompts)]  # fmt: skip
    expected = np.concatenate([rows[-1:] for rows in alone])
    assert_same(expected, executor.decode(last).copy())
    assert_same(expected[::-1], executor.decode(last[::-1]).copy())


def test_fork_and_release(case: Case) -> None:
    """Every socket copies and gives back its own slice of keys and values."""
    options = {"sequence_length": 1024, "prefill_block": 600, "max_logit_rows": 600}
    executor = case.executor(**options)
    prefix, tail = case.model.ids(520), case.model.ids(30, seed=1)
    expected = prefill(executor, prefix + tail, slot=2)[520:]
    prefill(executor, prefix)
    executor.copy_prefix(0, 3, 520)
    assert_same(expected, prefill(executor, tail, slot=3, start=520))
    for slot in range(4):
        executor.release(slot)
    assert [kv.committed_bytes for kv in executor.kv] == [0] * case.sockets
    executor.commit(0, 1)
    assert not any(kv._bytes(0, kv.shape.chunk_bytes).any() for kv in executor.kv)


def test_budget_is_split_evenly(case: Case) -> None:
    """The same on every socket, so all refuse together and nothing is half committed."""
    probe = case.executor()
    chunk = probe.kv[0].shape.chunk_bytes
    executor = case.executor(kv_budget_bytes=2 * chunk * case.sockets)
    expected = prefill(executor, case.ids)
    executor.commit(1, 1)
    with pytest.raises(KVExhausted, match="MiB budget"):
        executor.commit(2, 1)
    assert [kv.committed_bytes for kv in executor.kv] == [2 * chunk] * case.sockets
    executor.release(1)
    assert_same(expected, prefill(executor, case.ids, slot=2))


@pytest.mark.parametrize("mode", Mode)
def test_op_seconds_are_those_of_all_sockets(
    tiny_moe: Model, make_executor: MakeExecutor, mode: Mode
) -> None:
    """Every op took time on every socket, and asking starts anew."""
    executor = make_executor(tiny_moe, 2, sockets=2)
    prefill(executor, tiny_moe.ids(64))
    executor.decode([Span(0, 64, (1,), LogitRows.LAST)])
    table = executor.table(mode)
    for rank in range(2):
        times = executor.take_times(mode, rank)
        assert times.shape == (2, table.num_rows, 2)
        busy_ops = {table.op_of_row[row] for row in np.flatnonzero(times[:, :, 0].max(0))}
        assert busy_ops == set(range(len(executor.ops)))
    executor.decode([Span(0, 65, (1,), LogitRows.LAST)])
    prefill(executor, tiny_moe.ids(9))
    busy, waited = executor.op_seconds(mode)
    assert len(busy) == len(waited) == len(executor.ops)
    assert (busy > 0).all() and (waited >= 0).all() and busy.sum() < 60
    assert not executor.op_seconds(mode)[0].any()


def test_threads_are_named_by_socket_and_end(
    tiny_moe: Model, compute_threads: ComputeThreads
) -> None:
    """Two sockets of two threads; all are gone after `close`, in the middle of a block, too."""
    executor = tiny_moe.executor(2, sockets=2, part_flops_per_thread=1.0)
    assert compute_threads() == [f"ellm-compute-{s}-{t}" for s in (0, 1) for t in (0, 1)]
    executor.commit(0, 50)
    executor.start_prefill([Span(0, 0, tiny_moe.ids(50), LogitRows.LAST)])
    assert executor.run_prefill(1e-9) is None
    executor.close()
    assert not compute_threads()


def test_a_dead_block_is_reported(tiny_dense: Model, make_executor: MakeExecutor) -> None:
    """Once threads are lost every step fails at once, and closing still works."""
    executor = make_executor(tiny_dense, 2, sockets=2)
    prefill(executor, tiny_dense.ids(3))
    request_stop(executor.shared.address, ABORTED_BY_ENGINE)
    for _ in range(2):
        with pytest.raises(WorkerDied, match=f"code {ABORTED_BY_ENGINE}"):
            executor.decode([Span(0, 3, (1,), LogitRows.LAST)])


def build_sockets(model: Model, group: SocketGroup, kv: list[Region]) -> list[Socket]:
    """The sockets of a group, whose threads have not been started."""
    options, config = group.options, group.config
    weights = model.packed(len(options.sockets), options.expert_split)
    return [
        Socket(options.shard(config, rank), cores, options.kv_shape(config), weights[rank],
               kv[rank], group.shared, group.layout)
        for rank, cores in enumerate(options.sockets)
    ]  # fmt: skip


def test_a_socket_that_never_answers(
    tiny_dense: Model, make_executor: MakeExecutor, compute_threads: ComputeThreads
) -> None:
    """The others wait for it no longer than a barrier may take; a second life starts clean."""
    expected = prefill(make_executor(tiny_dense, 1, sockets=2), tiny_dense.ids(1))
    others = compute_threads()
    config, core = tiny_dense.config, min(os.sched_getaffinity(0))
    options = GroupOptions(((core,), (core,)), **SMALL, barrier_timeout_s=0.2)
    kv = [Region(options.kv_shape(config).size_bytes) for _ in range(2)]
    group = SocketGroup(config, options, Region(options.layout(config).size_bytes), kv)
    sockets = build_sockets(tiny_dense, group, kv)
    sockets[0].start()
    with pytest.raises(WorkerDied, match=f"code {BARRIER_TIMEOUT}"):
        group.decode([Span(0, 0, (1,), LogitRows.LAST)])
    sockets[0].join()
    assert compute_threads() == others
    group.control.reset()
    sockets = build_sockets(tiny_dense, group, kv)
    for socket in sockets:
        socket.start()
    group.commit(0, 20)
    logits = group.decode([Span(0, 0, tiny_dense.ids(1), LogitRows.LAST)])
    assert_same(expected, logits)
    group.control.stop()
    for socket in sockets:
        socket.join()


@pytest.mark.parametrize("sockets", [((0, 1), (0,)), ((0,), (0,), (0, 1)), ((0,), ())])
def test_unequal_threads_are_refused(sockets: tuple[tuple[int, ...], ...]) -> None:
    """Slower sockets would hold up the others at every barrier; the message shows the counts."""
    counts = ", ".join(str(len(cores)) for cores in sockets)
    with pytest.raises(ConfigError, match=f"same number of threads, not {counts}"):
        GroupOptions(sockets, num_slots=1, sequence_length=64)


def test_sizes_that_cannot_be_cut_are_refused(
    tiny_moe: Model, compute_threads: ComputeThreads
) -> None:
    """Before any memory is taken; the numbers are in the message."""
    with pytest.raises(ConfigError, match="num_attention_heads 4 .* 3 sockets"):
        tiny_moe.executor(1, sockets=3)
    assert not compute_threads()


# --- the built-in model --------------------------------------------------------------------------

BUILTIN = Path(ellm_serve.__file__).parent / "builtin"
NUM_TOKENS = 100
PROMPTS = ("def fibonacci(n):", "The capital of France", "Write a short poem about the sea.\n")


@pytest.fixture(scope="module")
def builtin(compiled_kernels: None) -> Model:
    return Model.load(BUILTIN)


def greedy(executor: SoloExecutor, prompt: Ids) -> tuple[Ids, Logits]:
    """Chosen tokens, and the logits they were chosen from."""
    rows = [prefill(executor, prompt)[-1]]
    executor.commit(0, len(prompt) + NUM_TOKENS)
    while len(rows) < NUM_TOKENS:
        at = len(prompt) + len(rows) - 1
        span = Span(0, at, (int(rows[-1].argmax()),), LogitRows.LAST)
        rows.append(executor.decode([span])[0].copy())
    executor.release(0)
    return tuple(int(row.argmax()) for row in rows), np.stack(rows)


@pytest.mark.parametrize("split", ExpertSplit)
@pytest.mark.parametrize("sockets", [2, 4])
def test_greedy_text_of_the_builtin_model(
    builtin: Model, make_executor: MakeExecutor, sockets: int, split: ExpertSplit
) -> None:
    """The same text on any number of sockets, or the first other token is a near tie."""
    tokenizer = Tokenizer.from_dir(BUILTIN)
    one = make_executor(builtin, 2)
    cut = make_executor(builtin, 1, sockets=sockets, expert_split=split)
    for text in PROMPTS:
        prompt = tuple(tokenizer.encode(text))
        (expected, rows), (chosen, _) = greedy(one, prompt), greedy(cut, prompt)
        if chosen == expected:
            continue
        at = next(i for i in range(NUM_TOKENS) if chosen[i] != expected[i])
        gap = float(rows[at, expected[at]] - rows[at, chosen[at]])
        shown = f"{text!r}: token {at} is {chosen[at]}, not {expected[at]}; gap {gap:.4g}"
        assert 0 <= gap < NEAR_TIE, shown
