"""Runs prompts through an executor in every way the engine might, and hands back the logits.

`Model` is a checkpoint whose shards are packed once for every way they are cut; any number of
executors share them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ellm_serve.engine.executor import Executor, LogitRows, Span
from ellm_serve.engine.group import GroupOptions
from ellm_serve.engine.solo import SoloExecutor
from ellm_serve.model.checkpoint import Checkpoint
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.packing import load_weights
from ellm_serve.model.region import Region
from ellm_serve.model.sharding import ExpertSplit, Shard
from ellm_serve.model.weights import WeightLayout

Logits = NDArray[np.float32]
Ids = tuple[int, ...]
SMALL: dict[str, Any] = {
    "num_slots": 4,
    "sequence_length": 512,
    "prefill_block": 256,
    "max_logit_rows": 256,
}


@dataclass(frozen=True)
class Model:
    """A packed checkpoint. `layout` and `weights` are those of one socket."""

    directory: Path
    config: ModelConfig
    layout: WeightLayout
    weights: Region
    shards: dict[tuple[int, ExpertSplit], list[Region]] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> Model:
        config = ModelConfig.from_dir(directory)
        weights = pack(directory, Shard(config))
        return cls(directory, config, WeightLayout.from_config(config), weights)

    def packed(self, sockets: int, split: ExpertSplit) -> list[Region]:
        """Every socket's weights."""
        if sockets == 1:
            return [self.weights]
        key = sockets, split
        if key not in self.shards:
            self.shards[key] = [
                pack(self.directory, Shard(self.config, rank, sockets, split))
                for rank in range(sockets)
            ]
        return self.shards[key]

    def executor(self, threads: int = 2, sockets: int = 1, **options: Any) -> SoloExecutor:
        """An executor with `threads` pinned threads per socket, several per core if need be."""
        cores = sorted(os.sched_getaffinity(0))
        pinned = [cores[index % len(cores)] for index in range(threads * sockets)]
        teams = tuple(
            tuple(pinned[rank * threads : (rank + 1) * threads]) for rank in range(sockets)
        )
        chosen = GroupOptions(teams, **SMALL | options)
        return SoloExecutor(self.config, self.packed(sockets, chosen.expert_split), chosen)

    def ids(self, length: int, seed: int = 0) -> Ids:
        """A random prompt."""
        drawn = np.random.default_rng(seed).integers(0, self.config.vocab_size, length)
        return tuple(int(token) for token in drawn)


def pack(directory: Path, shard: Shard) -> Region:
    """The memory one socket computes with."""
    layout = WeightLayout.from_shard(shard)
    weights = Region(layout.size_bytes)
    load_weights(shard, Checkpoint.open(directory), layout, weights, 2)
    return weights


def prefill(
    executor: Executor,
    ids: Ids,
    *,
    slot: int = 0,
    start: int = 0,
    block: int | None = None,
    budget_s: float = 0.0,
) -> Logits:
    """Logits of every position, computed in blocks of at most `block` tokens."""
    limits = executor.limits
    size = block or min(limits.prefill_block, limits.max_logit_rows)
    executor.commit(slot, start + len(ids))
    rows = [
        run_block(executor, [Span(slot, start + at, ids[at : at + size], LogitRows.ALL)], budget_s)
        for at in range(0, len(ids), size)
    ]
    return np.concatenate(rows)


def run_block(executor: Executor, spans: Sequence[Span], budget_s: float = 0.0) -> Logits:
    """One prefill block from start to end."""
    executor.start_prefill(spans)
    logits = executor.run_prefill(budget_s)
    while logits is None:
        logits = executor.run_prefill(budget_s)
    return logits.copy()


def decode(executor: Executor, ids: Ids, *, slot: int = 0, start: int = 0) -> Logits:
    """Logits of every position, computed one token at a time."""
    executor.commit(slot, start + len(ids))
    return np.concatenate(list(decode_steps(executor, ids, slot, start)))


def decode_steps(executor: Executor, ids: Ids, slot: int, start: int = 0) -> Iterator[Logits]:
    """One decode step per token."""
    for position, token in enumerate(ids, start=start):
        yield executor.decode([Span(slot, position, (token,), LogitRows.LAST)]).copy()


def difference(a: Logits, b: Logits) -> str:
    """What to print when two results should have been the same."""
    if a.shape != b.shape:
        return f"shapes {a.shape} and {b.shape}"
    distance = np.abs(a.astype(np.float64) - b)
    rows = np.flatnonzero((a != b).any(1))
    return f"rows {rows[:8].tolist()} differ; max {distance.max():.3g}, mean {distance.mean():.3g}"


def assert_same(a: Logits, b: Logits) -> None:
    """Bit for bit."""
    assert np.isfinite(a).all() and np.isfinite(b).all()
    assert np.array_equal(a, b), difference(a, b)
