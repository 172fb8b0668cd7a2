"""What is decided before a start: cores, sizes, the complete configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ellm_serve.cluster.startup import choose_cores, load_model_config, plan_start, sizes_of
from ellm_serve.cluster.topology import allowed_cores
from ellm_serve.config import EngineConfig
from ellm_serve.errors import ConfigError, ModelError
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
               kv_budget_bytes="1GB"), 7
    )  # fmt: skip
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
