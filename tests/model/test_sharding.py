"""What sockets hold of a model: everything once, or on all where that is meant; refusals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ellm_kernels.tiles import PANEL
from ellm_serve.errors import ConfigError
from ellm_serve.model.config import Architecture, ModelConfig
from ellm_serve.model.rope import RopeConfig
from ellm_serve.model.sharding import ExpertSplit, Part, Shard
from ellm_serve.model.weights import WeightLayout

MOE = ModelConfig(
    architecture=Architecture.QWEN3_MOE,
    vocab_size=1000,
    hidden_size=128,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    intermediate_size=200,
    moe_intermediate_size=72,
    num_experts=12,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    moe_layers=(False, True),
    rms_norm_eps=1e-6,
    rope=RopeConfig(10_000.0, 1024),
    max_position_embeddings=1024,
    tie_word_embeddings=False,
)
DENSE = replace(
    MOE, architecture=Architecture.QWEN3, num_experts=0, num_experts_per_tok=0,
    moe_intermediate_size=0, moe_layers=(False, False),
)  # fmt: skip
COUNTS = (1, 2, 4)
counts = pytest.mark.parametrize("count", COUNTS)
splits = pytest.mark.parametrize("split", ExpertSplit)


def shards(config: ModelConfig, count: int, split: ExpertSplit = ExpertSplit.SLICE) -> list[Shard]:
    return [Shard(config, rank, count, split) for rank in range(count)]


def covered(parts: Iterable[Part]) -> list[int]:
    """Every index as often as it is held, in the order of the sockets."""
    return [index for part in parts for index in range(part.begin, part.end)]


def once(size: int) -> list[int]:
    return list(range(size))


@splits
@counts
@pytest.mark.parametrize("config", [MOE, DENSE], ids=["experts", "dense"])
def test_everything_is_held_once(config: ModelConfig, count: int, split: ExpertSplit) -> None:
    """Query heads, columns of a dense MLP and token ids, in the order of the sockets."""
    parts = shards(config, count, split)
    assert covered(part.query_heads for part in parts) == once(config.num_heads)
    assert covered(part.intermediate(False) for part in parts) == once(config.intermediate_size)
    assert covered(part.vocabulary for part in parts) == once(config.vocab_size)
    assert len({part.query_heads.size for part in parts}) == 1
    assert len({part.intermediate(False).size for part in parts}) == 1


@counts
def test_whole_experts_are_held_once(count: int) -> None:
    """With all their columns."""
    parts = shards(MOE, count, ExpertSplit.WHOLE)
    assert covered(part.experts for part in parts) == once(12)
    assert {part.intermediate(True) for part in parts} == {Part(0, 72)}


@counts
def test_sliced_experts_are_on_every_socket(count: int) -> None:
    """All experts, each with other columns."""
    parts = shards(MOE, count)
    assert {part.experts for part in parts} == {Part(0, 12)}
    assert covered(part.intermediate(True) for part in parts) == once(72)


@splits
def test_a_dense_model_has_no_experts(split: ExpertSplit) -> None:
    assert all(shard.experts.size == 0 for shard in shards(DENSE, 4, split))


@counts
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_kv_heads_are_those_of_the_query_heads(count: int, kv_heads: int) -> None:
    """Every query head finds its kv-head on its socket, and no kv-head is there for nothing."""
    config = replace(MOE, num_kv_heads=kv_heads)
    group = config.num_heads // kv_heads
    held: list[int] = []
    for shard in shards(config, count):
        heads, queries = shard.kv_heads, shard.query_heads
        wanted = {head // group for head in range(queries.begin, queries.end)}
        assert set(range(heads.begin, heads.end)) == wanted
        # What the kernels assume: equally many query heads per kv-head, in order.
        assert queries.size % heads.size == 0
        local = queries.size // heads.size
        assert all(
            (queries.begin + head) // group == heads.begin + head // local
            for head in range(queries.size)
        )
        held += range(heads.begin, heads.end)
    copies = max(1, count // kv_heads)
    assert held == [head for head in range(kv_heads) for _ in range(copies)]


@counts
@pytest.mark.parametrize("vocab", [449, 512, 1000, 151_936])
def test_the_vocabulary_is_cut_in_whole_panels(count: int, vocab: int) -> None:
    """A panel belongs to one socket; only the last one may hold less, and nobody nothing."""
    parts = shards(replace(MOE, vocab_size=vocab), count)
    widths = {part.vocabulary_width for part in parts}
    assert len(widths) == 1
    (width,) = widths
    assert width % PANEL == 0 and width * count >= vocab
    assert [part.vocabulary.begin for part in parts] == [rank * width for rank in range(count)]
    assert all(part.vocabulary.size == width for part in parts[:-1])
    assert 0 < parts[-1].vocabulary.size <= width
    assert sum(part.vocabulary.size for part in parts) == vocab


@splits
@counts
def test_the_local_model(count: int, split: ExpertSplit) -> None:
    """Sizes that are cut; what all sockets must agree on stays as it is."""
    for shard in shards(MOE, count, split):
        local = shard.local
        assert local.num_heads == 8 // count and local.num_kv_heads == 4 // count
        assert local.intermediate_size == 200 // count
        assert local.moe_intermediate_size == (72 if split is ExpertSplit.WHOLE else 72 // count)
        put_back = replace(
            local, num_heads=8, num_kv_heads=4, intermediate_size=200, moe_intermediate_size=72
        )
        assert put_back == MOE


def test_one_socket_is_the_whole_model() -> None:
    """Also one whose sizes could not be cut at all."""
    odd = replace(MOE, num_heads=5, num_kv_heads=5, num_experts=7, vocab_size=3)
    for split in ExpertSplit:
        assert Shard(odd, expert_split=split).local == odd
        assert Shard(odd, expert_split=split).vocabulary == Part(0, 3)


@splits
@counts
def test_sockets_need_little_more_than_one(count: int, split: ExpertSplit) -> None:
    """Matrices are cut, not copied: together no more than the whole plus norms and padding."""
    big = replace(
        MOE, hidden_size=512, num_heads=32, num_kv_heads=8, head_dim=64, intermediate_size=2048,
        moe_intermediate_size=512, num_experts=16, vocab_size=32_768,
    )  # fmt: skip
    whole = WeightLayout.from_config(big).size_bytes
    together = sum(WeightLayout.from_shard(shard).size_bytes for shard in shards(big, count, split))
    assert whole <= together <= whole * 1.02


REFUSALS: dict[str, tuple[ModelConfig, int, ExpertSplit, str]] = {
    "heads": (
        replace(MOE, num_heads=6, num_kv_heads=2), 4, ExpertSplit.SLICE,
        r"num_attention_heads 6 cannot be cut evenly over 4 sockets",
    ),
    "intermediate": (
        replace(DENSE, intermediate_size=202), 2, ExpertSplit.SLICE,
        r"pairs of intermediate_size 101 cannot be cut evenly over 2 sockets",
    ),
    "experts": (
        replace(MOE, num_experts=10), 4, ExpertSplit.WHOLE,
        r"num_experts 10 cannot be cut evenly over 4 sockets",
    ),
    "expert columns": (
        replace(MOE, moe_intermediate_size=76), 4, ExpertSplit.SLICE,
        r"pairs of moe_intermediate_size 38 cannot be cut evenly over 4 sockets",
    ),
    "kv-heads": (
        replace(MOE, num_heads=12, num_kv_heads=6), 4, ExpertSplit.SLICE,
        r"6 kv-heads can be neither cut nor replicated over 4 sockets",
    ),
    "vocabulary": (
        replace(MOE, vocab_size=301), 4, ExpertSplit.SLICE,
        r"a vocabulary of 301 is too small for 4 sockets",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "count", "split", "message"), REFUSALS.values(), ids=REFUSALS.keys()
)
def test_refusals_name_the_numbers(
    config: ModelConfig, count: int, split: ExpertSplit, message: str
) -> None:
    """Whatever does not divide is refused on every socket, before memory is taken."""
    for rank in range(count):
        with pytest.raises(ConfigError, match=message):
            Shard(config, rank, count, split)
    Shard(config, expert_split=split)


def test_sizes_that_are_not_cut_may_be_odd() -> None:
    """Whole experts of any width; a dense width that no layer uses; any number if sliced."""
    Shard(replace(MOE, moe_intermediate_size=38), 0, 4, ExpertSplit.WHOLE)
    Shard(replace(MOE, intermediate_size=38, moe_layers=(True, True)), 0, 4)
    Shard(replace(MOE, num_experts=7), 0, 4)


# Most random sizes do not divide and are refused: that is half of the property.
@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(
    count=st.integers(1, 8), group=st.integers(1, 8), kv_heads=st.integers(1, 16),
    pairs=st.integers(1, 200), experts=st.integers(2, 64), vocab=st.integers(1, 5000),
    split=st.sampled_from(ExpertSplit),
)  # fmt: skip
def test_what_is_not_refused_is_complete(
    count: int, group: int, kv_heads: int, pairs: int, experts: int, vocab: int, split: ExpertSplit
) -> None:
    """For any sizes: accepted by all sockets or by none, and if accepted, then held once."""
    config = replace(
        MOE, num_heads=group * kv_heads, num_kv_heads=kv_heads, intermediate_size=2 * pairs,
        moe_intermediate_size=2 * pairs, num_experts=experts, vocab_size=vocab,
    )  # fmt: skip
    refused = 0
    for rank in range(count):
        try:
            Shard(config, rank, count, split)
        except ConfigError:
            refused += 1
    assert refused in (0, count)
    assume(not refused)
    parts = shards(config, count, split)
    assert covered(part.query_heads for part in parts) == once(group * kv_heads)
    assert covered(part.vocabulary for part in parts) == once(vocab)
    assert covered(part.intermediate(False) for part in parts) == once(2 * pairs)
    assert all(part.intermediate(True).size % 2 == 0 for part in parts)
    assert len({part.local for part in parts}) == 1
    assert set(covered(part.kv_heads for part in parts)) == set(range(kv_heads))
