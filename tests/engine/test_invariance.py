"""The same logits, bit for bit, whatever the path: blocks, yields, threads, neighbours, slots.

Every session feature stands on this: a turn may be computed as one prompt, token by token, after a
fork or beside others, and the caller cannot tell which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ellm_serve.engine.executor import LogitRows, Span
from ellm_serve.engine.solo import SoloExecutor
from ellm_serve.errors import KVExhausted
from tests.running import Logits, Model, assert_same, decode, prefill, run_block

MakeExecutor = Callable[..., SoloExecutor]

SHAPES: dict[str, dict[str, Any]] = {
    "dense": {"moe": False},
    "dense, tied, 8 heads on 1, head_dim 16": {
        "moe": False, "tie": True, "heads": 8, "kv_heads": 1, "head_dim": 16, "intermediate": 70,
    },
    "dense, 3 heads, head_dim 64, 3 layers": {
        "moe": False, "heads": 3, "kv_heads": 3, "head_dim": 64, "intermediate": 190, "layers": 3,
        "vocab": 301,
    },
    "dense, 16 heads on 1, head_dim 128": {
        "moe": False, "heads": 16, "kv_heads": 1, "head_dim": 128, "hidden": 64,
    },
    "experts": {"moe": True},
    "experts, top 1 of 5, tied": {
        "moe": True, "tie": True, "experts": 5, "top_k": 1, "moe_intermediate": 38,
    },
    "experts, top 4 of 20, first layer dense": {
        "moe": True, "experts": 20, "top_k": 4, "mlp_only_layers": (0,), "intermediate": 130,
        "moe_intermediate": 98,
    },
    "experts, every second layer, top 3": {
        "moe": True, "layers": 4, "decoder_sparse_step": 2, "top_k": 3, "norm_topk_prob": False,
        "heads": 6, "kv_heads": 2, "head_dim": 48,
    },
}  # fmt: skip
LENGTH = 131


@pytest.fixture(params=list(SHAPES.values()), ids=list(SHAPES), scope="module")
def model(request: pytest.FixtureRequest, make_model: Callable[..., Model]) -> Model:
    return make_model(**request.param)


@pytest.fixture(scope="module")
def expected(model: Model) -> Logits:
    """The prompt at once, by one thread."""
    executor = model.executor(1)
    try:
        return prefill(executor, model.ids(LENGTH))
    finally:
        executor.close()


def test_logits_tell_positions_apart(expected: Logits) -> None:
    """Guards the others: constant or empty logits would be equal on every path."""
    assert expected.std() > 0.3
    assert len(np.unique(expected.round(4), axis=0)) == LENGTH


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_token_by_token(
    model: Model, expected: Logits, make_executor: MakeExecutor, threads: int
) -> None:
    """Decode computes the same pieces as a prefill block."""
    assert_same(expected, decode(make_executor(model, threads), model.ids(LENGTH)))


@pytest.mark.parametrize("cut", [1, 2, 63, 64, 65, 130])
def test_two_turns(model: Model, expected: Logits, make_executor: MakeExecutor, cut: int) -> None:
    """A second turn continues the first one's keys and values, at even and odd positions."""
    executor, ids = make_executor(model), model.ids(LENGTH)
    first = prefill(executor, ids[:cut])
    second = prefill(executor, ids[cut:], start=cut)
    assert_same(expected, np.concatenate([first, second]))


@pytest.mark.parametrize(
    ("block", "threads"), [(1, 2), (1, 3), (7, 1), (7, 3), (64, 2), (64, 3), (256, 2), (256, 3)]
)
def test_block_size(
    model: Model, expected: Logits, make_executor: MakeExecutor, block: int, threads: int
) -> None:
    """Neither the block size nor the number of threads shows, more threads than cores included."""
    assert_same(expected, prefill(make_executor(model, threads), model.ids(LENGTH), block=block))


@pytest.mark.parametrize("part_flops", [1.0, 1e5, 1e7])
@pytest.mark.parametrize("threads", [1, 3])
def test_yield_points(
    model: Model, expected: Logits, make_executor: MakeExecutor, part_flops: float, threads: int
) -> None:
    """A block that stops after every part goes on where it stood."""
    executor = make_executor(model, threads, part_flops_per_thread=part_flops)
    executor.commit(0, LENGTH)
    executor.start_prefill([Span(0, 0, model.ids(LENGTH), LogitRows.ALL)])
    yields = 0
    while (logits := executor.run_prefill(1e-9)) is None:
        yields += 1
    assert yields >= 5 * model.config.num_layers
    assert_same(expected, logits)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_decode_between_prefill_segments(
    model: Model, expected: Logits, make_executor: MakeExecutor, threads: int
) -> None:
    """Running streams go on while a block is in flight, and neither disturbs the other.

    Also guards the start of a step while a thread still leaves the step before: with more threads
    than cores one is often late.
    """
    executor = make_executor(model, threads, part_flops_per_thread=1e4)
    ids = model.ids(LENGTH)
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


def test_cancelled_block_leaves_nothing(
    model: Model, expected: Logits, make_executor: MakeExecutor
) -> None:
    """A block dropped half-way is forgotten; its slot can be computed afresh."""
    executor = make_executor(model, part_flops_per_thread=1e4)
    executor.commit(0, LENGTH)
    executor.start_prefill([Span(0, 0, model.ids(LENGTH, seed=9), LogitRows.ALL)])
    for _ in range(7):
        assert executor.run_prefill(1e-9) is None
    executor.cancel_prefill()
    assert_same(expected, prefill(executor, model.ids(LENGTH)))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_batch_neighbours(model: Model, make_executor: MakeExecutor, threads: int) -> None:
    """A decode row does not depend on the rows beside it, their order or their lengths."""
    executor = make_executor(model, threads)
    lengths = (3, 40, 64, 121)
    prompts = [model.ids(length, seed=slot) for slot, length in enumerate(lengths)]
    for slot, prompt in enumerate(prompts):
        prefill(executor, prompt[:-1], slot=slot)
    spans = [Span(slot, lengths[slot] - 1, prompts[slot][-1:], LogitRows.LAST) for slot in range(4)]
    alone = [executor.decode([span]).copy() for span in spans]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3), (1, 0, 3)):
        together = executor.decode([spans[slot] for slot in order]).copy()
        assert_same(together, np.concatenate([alone[slot] for slot in order]))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_several_rows_of_a_slot_in_a_decode_step(
    model: Model, expected: Logits, make_executor: MakeExecutor, threads: int
) -> None:
    """Guessed tokens are checked in one step, beside a neighbour: each row sees those before it."""
    executor, ids = make_executor(model, threads), model.ids(LENGTH)
    other = model.ids(LENGTH, seed=5)
    alone = decode(executor, other, slot=2)
    for start in (60, 61):
        prefill(executor, ids[:start], slot=1)
        rows = executor.decode([
            Span(1, start, ids[start : start + 3], LogitRows.ALL),
            Span(2, LENGTH - 1, other[-1:], LogitRows.LAST),
        ]).copy()  # fmt: skip
        assert_same(rows[:3], expected[start : start + 3])
        assert_same(rows[3:], alone[-1:])


def test_rejected_guesses_are_overwritten(
    model: Model, expected: Logits, make_executor: MakeExecutor
) -> None:
    """Positions computed from wrong tokens leave no trace once they are computed again."""
    executor, ids = make_executor(model), model.ids(LENGTH)
    prefill(executor, ids[:50])
    for start in range(50, 56):
        wrong = tuple((token + 1) % model.config.vocab_size for token in ids[start + 1 : start + 4])
        rows = executor.decode([Span(0, start, (ids[start], *wrong), LogitRows.ALL)])
        assert_same(rows[:1].copy(), expected[start : start + 1])


def test_two_prompts_in_one_block(
    model: Model, expected: Logits, make_executor: MakeExecutor
) -> None:
    """Several waiting prompts share a block; one of them continues an earlier turn."""
    executor, ids = make_executor(model), model.ids(LENGTH)
    prefill(executor, ids[:51], slot=3)
    executor.commit(0, LENGTH)
    executor.commit(3, LENGTH)
    logits = run_block(executor, [
        Span(0, 0, ids, LogitRows.ALL),
        Span(3, 51, ids[51:], LogitRows.ALL),
    ])  # fmt: skip
    assert_same(logits, np.concatenate([expected, expected[51:]]))


def test_wanted_rows_only(model: Model, expected: Logits, make_executor: MakeExecutor) -> None:
    """LAST and NONE return the rows asked for, in span order."""
    executor, ids = make_executor(model), model.ids(LENGTH)
    for slot in range(3):
        executor.commit(slot, LENGTH)
    logits = run_block(executor, [
        Span(0, 0, ids[:20], LogitRows.NONE),
        Span(1, 0, ids[:33], LogitRows.LAST),
        Span(2, 0, ids[:4], LogitRows.ALL),
    ])  # fmt: skip
    assert_same(logits, np.concatenate([expected[32:33], expected[:4]]))
    nothing = executor.decode([Span(0, 20, ids[20:21], LogitRows.NONE)])
    assert nothing.shape == (0, model.config.vocab_size)
    assert_same(executor.decode([Span(0, 21, ids[21:22], LogitRows.LAST)]), expected[21:22])


LONG = 1100


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_chunk_borders(model: Model, make_executor: MakeExecutor, threads: int) -> None:
    """Pieces of 512 positions are folded alike by prefill blocks of any size and by decode."""
    options = {"sequence_length": 2048, "prefill_block": 2048, "max_logit_rows": 2048}
    executor, ids = make_executor(model, threads, **options), model.ids(LONG)
    once = prefill(executor, ids)
    assert_same(once, prefill(executor, ids, slot=1, block=300))
    for start in (505, 1017):
        prefill(executor, ids[:start], slot=2)
        steps = decode(executor, ids[start : start + 20], slot=2, start=start)
        assert_same(steps, once[start : start + 20])
        guesses = executor.decode([Span(0, start + 6, ids[start + 6 : start + 9], LogitRows.ALL)])
        assert_same(guesses.copy(), once[start + 6 : start + 9])


@pytest.mark.parametrize("length", [40, 511, 512, 600])
def test_fork(model: Model, make_executor: MakeExecutor, length: int) -> None:
    """Both branches of a fork go on as if each had computed the prefix itself."""
    options = {"sequence_length": 1024, "prefill_block": 1024, "max_logit_rows": 1024}
    executor = make_executor(model, **options)
    prefix = model.ids(length)
    tails = [model.ids(30, seed=seed) for seed in (1, 2)]
    expected = [prefill(executor, prefix + tail, slot=2)[length:] for tail in tails]
    prefill(executor, prefix, slot=0)
    executor.copy_prefix(0, 3, length)
    branches = [
        prefill(executor, tail, slot=slot, start=length)
        for slot, tail in zip((0, 3), tails, strict=True)
    ]
    for branch, wanted in zip(branches, expected, strict=True):
        assert_same(branch, wanted)


def test_released_slot_is_clean(
    model: Model, expected: Logits, make_executor: MakeExecutor
) -> None:
    """A slot that was given back starts from zeros and computes the same again."""
    executor, ids = make_executor(model), model.ids(LENGTH)
    prefill(executor, model.ids(LENGTH, seed=3))
    executor.release(0)
    (kv,) = executor.kv
    assert kv.committed_bytes == 0
    executor.commit(0, LENGTH)
    assert not kv._bytes(0, kv.shape.chunk_bytes).any()
    assert_same(expected, prefill(executor, ids))


def test_exhausted_budget_leaves_earlier_slots_intact(
    model: Model, expected: Logits, make_executor: MakeExecutor
) -> None:
    """Refusing one slot's memory must not cost another slot a single bit."""
    probe = make_executor(model)
    executor = make_executor(model, kv_budget_bytes=2 * probe.kv[0].shape.chunk_bytes)
    ids = model.ids(LENGTH)
    first = prefill(executor, ids[:100])
    executor.commit(1, 1)
    with pytest.raises(KVExhausted, match="MiB budget"):
        executor.commit(2, 1)
    assert_same(expected, np.concatenate([first, prefill(executor, ids[100:], start=100)]))
    executor.release(1)
    assert_same(expected, prefill(executor, ids, slot=2))
