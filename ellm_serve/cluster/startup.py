"""Everything that is decided before an engine starts: model, cores, memory, resolved configuration.

Reads `config.json` and the machine, and takes no memory; what cannot work is refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ellm_serve.cluster.memory import Memory
from ellm_serve.cluster.topology import Machine
from ellm_serve.config import EngineConfig, resolve
from ellm_serve.errors import ConfigError
from ellm_serve.graph.plan import MemoryPlan, Sizes, plan_memory
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.hub import WANTED, resolve_model

# What `ModelConfig` reads.
CONFIG_ONLY = ("config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class Start:
    """A start that will work. `config` holds no None where a number is needed."""

    config: EngineConfig
    model_dir: Path
    model: ModelConfig
    cores: tuple[int, ...]
    plan: MemoryPlan


def plan_start(config: EngineConfig) -> Start:
    """Finds (downloads) the model and decides what was left open.

    Raises:
        StartupError: it cannot work; one line says what to change.
    """
    cores = choose_cores(config, Machine.discover().allowed_cores)
    # The configuration first: a plan that is refused should not cost a download.
    model = load_model_config(config)[1]
    plan = plan_memory(model, sizes_of(config, len(cores)), Memory.read().available_bytes)
    resolved = resolve(
        config,
        sequence_length=plan.kv.sequence_length,
        threads=len(cores),
        kv_budget_bytes=plan.kv_budget_bytes,
    )
    return Start(resolved, find_model(config, WANTED), model, cores, plan)


def find_model(config: EngineConfig, wanted: Sequence[str]) -> Path:
    """The model's directory with at least the files that match `wanted`."""
    cache_dir = Path(config.cache_dir) if config.cache_dir else None
    return resolve_model(config.model, config.revision, cache_dir, config.offline, wanted)


def load_model_config(config: EngineConfig) -> tuple[Path, ModelConfig]:
    """The model's directory and dimensions; downloads nothing but its configuration."""
    directory = find_model(config, CONFIG_ONLY)
    return directory, ModelConfig.from_dir(directory)


def choose_cores(config: EngineConfig, allowed: tuple[int, ...]) -> tuple[int, ...]:
    """The cores to pin compute threads to."""
    if config.threads is None:
        return allowed
    if config.threads > len(allowed):
        raise ConfigError(
            f"threads {config.threads} is more than the {len(allowed)} cores this process may use"
            " (see ellm-serve doctor); lower --threads or widen the cpuset or CPU limit"
        )
    return allowed[: config.threads]


def sizes_of(config: EngineConfig, num_threads: int) -> Sizes:
    """What memory depends on."""
    return Sizes(
        num_slots=config.batch_size,
        num_threads=num_threads,
        sequence_length=config.sequence_length,
        prefill_block=config.prefill_block,
        max_logit_rows=config.max_logit_rows,
        kv_budget_bytes=config.kv_budget_bytes,
    )
