"""What is decided before a start: cores, sizes, the complete configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ellm_serve.cluster.startup import (
    choose_cores,
    choose_places,
    fit_shared_memory,
    load_model_config,
    plan_start,
    sizes_of,
)
from ellm_serve.cluster.topology import Machine, allowed_cores
from ellm_serve.config import EngineConfig
from ellm_serve.errors import ConfigError, MemoryPlanError, ModelError
from tests.cluster import fake_machine as fake
from tests.tiny_models import write_model


def config(**options: Any) -> EngineConfig:
    return EngineConfig.from_options(**{"model": "unused"} | options)


@pytest.mark.parametrize(("threads", "cores"), [(None, (1, 3, 5)), (2, (1, 3)), (3, (1, 3, 5))])
def test_cores(threads: int | None, cores: tuple[int, ...]) -> None:
    """All allowed cores, or the first of them."""
    assert choose_cores(config(threads=threads), (1, 3, 5)) == cores


def test_more_threads_than_cores_is_refused() -> None:
    """Two threads on one core would wait for each other at every barrier."""
    with pytest.raises(ConfigError, match="threads 4 is more than the 3 cores"):
        choose_cores(config(threads=4), (1, 3, 5))


def test_sizes_carry_every_option() -> None:
    """An option that got lost on the way would be ignored silently."""
    sizes = sizes_of(
        config(batch_size=3, sequence_length=100, prefill_block=64, max_logit_rows=5,
               kv_budget_bytes="1GB", expert_split="whole"), 7, 2
    )  # fmt: skip
    assert (sizes.num_sockets, sizes.expert_split) == (2, "whole")
    assert (sizes.num_slots, sizes.num_threads, sizes.sequence_length) == (3, 7, 100)
    assert (sizes.prefill_block, sizes.max_logit_rows) == (64, 5)
    assert sizes.kv_budget_bytes == 1_000_000_000


def test_start_is_complete(tmp_path: Path) -> None:
    """Nothing is left open, and what was given is kept."""
    write_model(tmp_path, moe=True, max_positions=1024)
    start = plan_start(config(model=str(tmp_path), batch_size=2))
    assert start.config.sequence_length == 1024
    assert start.config.threads == len(allowed_cores()) == len(start.cores)
    assert start.config.kv_budget_bytes == start.plan.kv_budget_bytes
    assert start.config.batch_size == 2
    assert start.model_dir == tmp_path


def test_weights_are_not_needed(tmp_path: Path) -> None:
    """A plan reads config.json only."""
    write_model(tmp_path, moe=False)
    (tmp_path / "model.safetensors").unlink()
    assert load_model_config(config(model=str(tmp_path)))[1].num_layers == 2


def test_length_beyond_the_model_is_refused(tmp_path: Path) -> None:
    """Before anything is loaded."""
    write_model(tmp_path, moe=False, max_positions=1024)
    with pytest.raises(ModelError, match="1024 positions"):
        plan_start(config(model=str(tmp_path), sequence_length=2048))


def test_sockets_are_planned(tmp_path: Path) -> None:
    """What was asked for is resolved: places, threads of all sockets, and memory of all shards."""
    write_model(tmp_path, moe=True)
    one = plan_start(config(model=str(tmp_path)))
    two = plan_start(config(model=str(tmp_path), sockets=2))
    assert (one.config.sockets, two.config.sockets) == (1, 2)
    assert two.config.threads == len(two.cores) == 2 * len(two.places[0].cores)
    assert two.plan.weights.experts == one.plan.weights.experts


@pytest.mark.parametrize(("workers", "count"), [("threads", 1), ("ray", 2)])
def test_auto_sockets(tmp_path: Path, workers: str, count: int) -> None:
    """Threads of one process stay together; workers take the machine's sockets."""
    files = fake.cpus([(0,), (1,), (2,), (3,)], {2: 1, 3: 1}) | fake.nodes({0: "0-1", 1: "2-3"})
    machine = Machine.discover(fake.write(tmp_path, files), range(4))
    places = choose_places(config(workers=workers), machine)
    assert len(places) == count
    assert [core for place in places for core in place.cores] == [0, 1, 2, 3]


def test_kept_weights_need_workers(tmp_path: Path) -> None:
    """Threads have their weights in their own memory, where nothing survives."""
    with pytest.raises(ConfigError, match="--workers ray"):
        plan_start(config(model=str(tmp_path), keep_weights=True))


def test_shared_memory_bounds_the_plan(tmp_path: Path) -> None:
    """A container's 64 MB of /dev/shm are refused at start, not in the first chunk."""
    write_model(tmp_path, moe=False)
    plan = plan_start(config(model=str(tmp_path), sockets=2)).plan
    fixed = plan.weights_bytes + plan.shared_bytes
    least = fixed + plan.kv.slot_bytes
    assert fit_shared_memory(plan, least).kv_budget_bytes == plan.kv.slot_bytes
    assert fit_shared_memory(plan, 1 << 50) == plan
    with pytest.raises(MemoryPlanError, match="/dev/shm has .* free, and socket workers need"):
        fit_shared_memory(plan, least - 1)
