"""The memory plan equals what an engine then takes, and refuses what would not fit."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_serve.errors import ConfigError, MemoryPlanError, ModelError
from ellm_serve.graph.plan import MemoryPlan, Planner, Sizes, gb, plan_memory
from ellm_serve.graph.qwen3 import Activations
from ellm_serve.graph.tensor import Mode
from ellm_serve.model.config import Architecture, ModelConfig
from ellm_serve.model.rope import RopeConfig
from ellm_serve.model.sharding import ExpertSplit, Shard
from ellm_serve.model.weights import WeightLayout
from tests.running import Model
from tests.tiny_models import write_model

GB = 1_000_000_000
# Qwen3-Coder-30B-A3B.
CODER = ModelConfig(
    architecture=Architecture.QWEN3_MOE,
    vocab_size=151_936,
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    moe_layers=(True,) * 48,
    rms_norm_eps=1e-6,
    rope=RopeConfig(10_000_000.0, 262_144),
    max_position_embeddings=262_144,
    tie_word_embeddings=False,
)
SMALL = replace(CODER, num_layers=2, moe_layers=(True,) * 2, num_experts=8, vocab_size=4096)


def sizes(**changes: Any) -> Sizes:
    return replace(Sizes(num_slots=4, num_threads=8), **changes)


def test_summary_names_slots_length_and_total() -> None:
    """The length is per slot and never divided by the batch size; the total is shown."""
    plan = plan_memory(CODER, sizes(sequence_length=32_768), 100 * GB)
    assert plan.summary() == "4 slots x 32768 tokens, KV 12.9 GB"
    assert plan.kv.sequence_length == 32_768
    assert plan.kv_budget_bytes == plan.kv.size_bytes


def test_parts_of_the_weights_are_all_there_is() -> None:
    """Classes plus alignment are the region that loading fills; published size is 61 GB."""
    plan = plan_memory(CODER, sizes(sequence_length=4096), 100 * GB)
    assert plan.weights.total <= plan.weights_bytes < plan.weights.total * 1.001
    assert 60 * GB < plan.weights_bytes < 62 * GB
    assert plan.weights.experts > 50 * GB
    assert min(asdict(plan.weights).values()) > 0


def test_tied_embeddings_are_held_once() -> None:
    """lm_head's panels serve for both."""
    plan = plan_memory(replace(SMALL, tie_word_embeddings=True), sizes(), 100 * GB)
    assert plan.weights.embedding == 0
    assert plan.weights.lm_head == 2 * SMALL.vocab_size * SMALL.hidden_size


def test_kv_per_token() -> None:
    """layers × keys and values × kv-heads × head_dim × 2 bytes."""
    plan = plan_memory(CODER, sizes(sequence_length=4096), 100 * GB)
    assert plan.kv.token_bytes == 48 * 2 * 4 * 128 * 2


@pytest.mark.parametrize("split", ExpertSplit)
@pytest.mark.parametrize("sockets", [1, 2, 4])
def test_plan_equals_what_an_executor_takes(
    tiny_moe: Model, make_executor: Any, sockets: int, split: ExpertSplit
) -> None:
    """A plan that is smaller than the truth ends in the out-of-memory killer."""
    executor = make_executor(
        tiny_moe, threads=2, sockets=sockets, num_slots=3, sequence_length=1024, expert_split=split
    )
    options = Sizes(3, 2, sockets, split, 1024, prefill_block=256, max_logit_rows=256)
    plan = plan_memory(tiny_moe.config, options, 100 * GB)
    shapes = {tensor.shape for tensor in executor.kv}
    assert len(executor.kv) == sockets and len(shapes) == 1
    (shape,) = shapes
    assert replace(plan.kv, num_kv_heads=shape.num_kv_heads, num_sockets=1) == shape
    assert plan.kv.num_kv_heads == sockets * shape.num_kv_heads
    # Each socket rounds to huge pages of its own; a budget for all slots must hold all slots.
    assert plan.kv.slot_bytes == sockets * shape.slot_bytes
    assert plan.kv_budget_bytes == plan.kv.size_bytes
    weights = tiny_moe.packed(sockets, split)
    assert plan.weights_bytes == sum(memory.size_bytes for memory in weights)
    taken = dict.fromkeys(Mode, 0)
    for rank in range(sockets):
        activations = Activations(Shard(tiny_moe.config, rank, sockets, split))
        for mode, rows in ((Mode.FEW, 3), (Mode.MANY, 256)):
            taken[mode] += activations.arena(mode, rows, rows, 2, 1024).size_bytes
    assert plan.decode_bytes >= taken[Mode.FEW]
    assert plan.prefill_bytes >= taken[Mode.MANY]
    assert plan.shared_bytes == executor.shared.size_bytes


def test_auto_length_is_the_models_own_when_memory_allows() -> None:
    """Not less than the model can do, and never more."""
    plan = plan_memory(CODER, sizes(), 200 * GB)
    assert plan.kv.sequence_length == 262_144


def test_auto_length_follows_rope_scaling(tmp_path: Path) -> None:
    """A checkpoint that asks for YaRN wants the scaled length, not the trained one."""
    section = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    model = ModelConfig.from_dir(write_model(tmp_path, moe=False, rope_scaling=section))
    assert plan_memory(model, sizes(), 100 * GB).kv.sequence_length == 4096


def test_auto_length_is_what_fits() -> None:
    """With little memory the default context is not taken blindly; the result really starts."""
    plan = plan_memory(CODER, sizes(), 70 * GB)
    length = plan.kv.sequence_length
    assert 0 < length < 262_144
    assert length % 512 == 0
    planner = Planner(CODER, sizes(), 70 * GB)
    assert planner.starts(length, 4)
    assert not planner.starts(length + 512, 4)


def test_reserved_is_not_committed() -> None:
    """All slots together may be larger than memory; the budget says what may be in use."""
    plan = plan_memory(CODER, sizes(sequence_length=262_144), 100 * GB)
    assert plan.kv.size_bytes > 100 * GB
    assert plan.kv.slot_bytes <= plan.kv_budget_bytes < plan.kv.size_bytes
    assert plan.num_full_slots == 1
    assert "reserved, at most" in plan.summary()


def test_refusal_names_the_numbers_and_what_would_fit() -> None:
    """One line: needed, available, and the largest length that starts, which then does."""
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(CODER, sizes(sequence_length=262_144), 70 * GB)
    message = str(caught.value)
    assert "\n" not in message
    assert "70.0 GB available" in message
    assert "one slot of 262144 tokens 25.8 GB" in message
    fitting = int(message.rpartition(" ")[2])
    assert plan_memory(CODER, sizes(sequence_length=fitting), 70 * GB).num_full_slots >= 1


@pytest.mark.parametrize("length", [None, 512])
def test_refusal_when_not_even_the_weights_fit(length: int | None) -> None:
    """Lowering the length would be bad advice then."""
    with pytest.raises(MemoryPlanError, match=r"no --sequence-length fits; .*at least 6\d\.\d GB"):
        plan_memory(CODER, sizes(sequence_length=length), 24 * GB)


def test_the_remedy_of_a_refusal_helps() -> None:
    """A machine with the memory that the message asks for starts."""
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(CODER, sizes(sequence_length=512), 24 * GB)
    needed = float(str(caught.value).partition("at least ")[2].partition(" GB")[0])
    plan_memory(CODER, sizes(sequence_length=512), int((needed + 0.1) * GB))


def test_longer_than_the_model_is_refused() -> None:
    """Positions that the rotary embedding cannot tell apart are no matter of memory."""
    with pytest.raises(ModelError, match="262144 positions"):
        plan_memory(CODER, sizes(sequence_length=262_145), 2000 * GB)


def test_budget_below_one_slot_is_refused() -> None:
    """No sequence could use its length."""
    with pytest.raises(ConfigError, match="less than one slot of 32768 tokens"):
        plan_memory(CODER, sizes(sequence_length=32_768, kv_budget_bytes=GB), 100 * GB)


def test_budget_beyond_memory_is_refused() -> None:
    """A budget is a promise."""
    with pytest.raises(MemoryPlanError, match=r"kv_budget_bytes 90\.0 GB does not fit"):
        plan_memory(CODER, sizes(sequence_length=262_144, kv_budget_bytes=90 * GB), 100 * GB)


def test_budget_is_kept() -> None:
    """What was asked for, not all that is left; auto lengths adapt to it."""
    plan = plan_memory(CODER, sizes(kv_budget_bytes=8 * GB), 200 * GB)
    assert plan.kv_budget_bytes == 8 * GB
    assert plan.kv.slot_bytes <= 8 * GB


@given(
    available=st.integers(0, 80 * GB),
    slots=st.integers(1, 64),
    length=st.none() | st.integers(1, 262_144),
)
def test_accepted_plans_fit(available: int, slots: int, length: int | None) -> None:
    """Whatever is accepted: fixed parts and the KV budget together stay below what there is."""
    chosen = sizes(num_slots=slots, sequence_length=length)
    try:
        plan = plan_memory(SMALL, chosen, available)
    except MemoryPlanError:
        if length is not None:
            assert not Planner(SMALL, chosen, available).starts(length, slots)
        return
    assert plan.fixed_bytes + plan.kept_free_bytes + plan.kv_budget_bytes <= available
    assert plan.kv.slot_bytes <= plan.kv_budget_bytes <= plan.kv.size_bytes


@given(available=st.integers(GB, 80 * GB), slots=st.integers(1, 32))
def test_largest_is_largest(available: int, slots: int) -> None:
    """The advice is exact: it fits, and the next size does not."""
    planner = Planner(SMALL, sizes(num_slots=slots), available)
    length = planner.longest(planner.fills, slots)
    assert length == 0 or planner.fills(length, slots)
    assert length == 262_144 or not planner.fills(length + 512, slots)
    most = planner.most_slots(4096)
    assert most == 0 or planner.fills(4096, most)
    assert not planner.fills(4096, most + 1)


def test_weights_follow_the_layout() -> None:
    """The plan and the loader use the same layout."""
    layout = WeightLayout.from_config(SMALL)
    plan: MemoryPlan = plan_memory(SMALL, sizes(), 100 * GB)
    assert 0 <= plan.weights_bytes - layout.size_bytes < 2 << 20


@pytest.mark.parametrize(
    ("size", "text"),
    [(12_884_901_888, "12.9 GB"), (999_600_000, "1.0 GB"), (98_304, "98.3 kB"), (0, "0.0 kB")],
)
def test_sizes_for_people(size: int, text: str) -> None:
    """Powers of ten, as memory and disks are sold; no `1000.0 MB`."""
    assert gb(size) == text
