"""What one of several sockets holds of a model: pure arithmetic.

Attention is cut by kv-heads with their query heads (a kv-head is replicated when there are more
sockets than kv-heads, and its query heads are cut), MLPs along the intermediate dimension or by
whole experts, the vocabulary in whole panels. Whatever does not divide is refused with the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from ellm_kernels.tiles import PANEL, num_panels
from ellm_serve.errors import ConfigError
from ellm_serve.model.config import ModelConfig


class ExpertSplit(StrEnum):
    """How experts are cut: every expert's columns, or whole experts."""

    SLICE = "slice"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Part:
    """A range of rows or columns."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Shard:
    """Socket `rank` of `count`; `whole` is the model's configuration."""

    whole: ModelConfig
    rank: int = 0
    count: int = 1
    expert_split: ExpertSplit = ExpertSplit.SLICE

    def __post_init__(self) -> None:
        _check(self)

    @property
    def query_heads(self) -> Part:
        return self._even(self.whole.num_heads)

    @property
    def kv_heads(self) -> Part:
        """The kv-heads of this socket's query heads."""
        heads = self.query_heads
        group = self.whole.num_heads // self.whole.num_kv_heads
        return Part(heads.begin // group, -(-heads.end // group))

    @property
    def experts(self) -> Part:
        """Whole experts, or all of them when each is sliced."""
        if self.expert_split is ExpertSplit.WHOLE and self.whole.num_experts:
            return self._even(self.whole.num_experts)
        return Part(0, self.whole.num_experts)

    def intermediate(self, moe: bool) -> Part:
        """Columns of an MLP's intermediate dimension."""
        if moe and self.expert_split is ExpertSplit.WHOLE:
            return Part(0, self.whole.moe_intermediate_size)
        size = self.whole.moe_intermediate_size if moe else self.whole.intermediate_size
        return self._even(size)

    @property
    def vocabulary_width(self) -> int:
        """Columns of logits that every socket has room for, in whole panels."""
        return -(-num_panels(self.whole.vocab_size) // self.count) * PANEL

    @property
    def vocabulary(self) -> Part:
        """Token ids whose logits (and embedding rows) this socket holds."""
        begin = self.rank * self.vocabulary_width
        return Part(begin, min(begin + self.vocabulary_width, self.whole.vocab_size))

    @property
    def local(self) -> ModelConfig:
        """The model this socket computes, as a configuration of its own.

        `vocab_size` and the expert counts stay those of the whole model: rows of logits and the
        router's choice are about all of them.
        """
        whole = self.whole
        return replace(
            whole,
            num_heads=self.query_heads.size,
            num_kv_heads=self.kv_heads.size,
            intermediate_size=self.intermediate(False).size,
            moe_intermediate_size=self.intermediate(True).size,
        )

    def _even(self, size: int) -> Part:
        return Part(size * self.rank // self.count, size * (self.rank + 1) // self.count)


def _check(shard: Shard) -> None:
    whole, count = shard.whole, shard.count
    assert 0 <= shard.rank < count
    if count == 1:
        return
    sizes = {"num_attention_heads": whole.num_heads}
    if not all(whole.moe_layers):
        sizes["intermediate_size"] = whole.intermediate_size // 2
    if whole.num_experts:
        if shard.expert_split is ExpertSplit.WHOLE:
            sizes["num_experts"] = whole.num_experts
        else:
            sizes["moe_intermediate_size"] = whole.moe_intermediate_size // 2
    for name, size in sizes.items():
        if size % count:
            what = f"pairs of {name}" if name.endswith("size") else name
            raise ConfigError(f"{what} {size} cannot be cut evenly over {count} sockets")
    if max(whole.num_kv_heads, count) % min(whole.num_kv_heads, count):
        raise ConfigError(
            f"{whole.num_kv_heads} kv-heads can be neither cut nor replicated over {count} sockets"
        )
    if (count - 1) * shard.vocabulary_width >= whole.vocab_size:
        raise ConfigError(f"a vocabulary of {whole.vocab_size} is too small for {count} sockets")
