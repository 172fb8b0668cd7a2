"""Everything that is decided before an engine starts: model, cores, memory, resolved configuration.

Reads `config.json` and the machine, and takes no memory; what cannot work is refused here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ellm_kernels import isa
from ellm_serve.cluster.memory import Memory
from ellm_serve.cluster.segment import SHM
from ellm_serve.cluster.sockets import SocketPlace, choose_sockets
from ellm_serve.cluster.topology import Machine
from ellm_serve.config import EngineConfig, resolve
from ellm_serve.errors import ConfigError, MemoryPlanError
from ellm_serve.graph.plan import MemoryPlan, Sizes, gb, plan_memory
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.hub import WANTED, resolve_model
from ellm_serve.model.sharding import ExpertSplit

# What `ModelConfig` reads.
CONFIG_ONLY = ("config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class Start:
    """A start that will work. `config` holds no None where a number is needed."""

    config: EngineConfig
    model_dir: Path
    model: ModelConfig
    places: tuple[SocketPlace, ...]
    plan: MemoryPlan

    @property
    def cores(self) -> tuple[int, ...]:
        """Of all sockets."""
        return tuple(core for place in self.places for core in place.cores)

    @property
    def summary(self) -> str:
        """One line: what runs where, with which kernels and how much memory."""
        threads = _count(len(self.cores), "thread")
        return (
            f"{_count(len(self.places), 'socket')}, {threads}, {isa.active().name};"
            f" weights {gb(self.plan.weights_bytes)}, {self.plan.summary()}"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def plan_start(config: EngineConfig) -> Start:
    """Finds (downloads) the model and decides what was left open.

    Raises:
        StartupError: it cannot work; one line says what to change.
    """
    if config.keep_weights and config.workers != "ray":
        raise ConfigError("keep_weights needs socket workers; add --workers ray")
    places = choose_places(config, Machine.discover())
    # The configuration first: a plan that is refused should not cost a download.
    model = load_model_config(config)[1]
    sizes = sizes_of(config, len(places[0].cores), len(places))
    plan = plan_memory(model, sizes, Memory.read().available_bytes)
    if config.workers == "ray":
        plan = fit_shared_memory(plan, free_bytes(SHM))
    resolved = resolve(
        config,
        sequence_length=plan.kv.sequence_length,
        threads=sizes.num_threads * len(places),
        kv_budget_bytes=plan.kv_budget_bytes,
        sockets=len(places),
    )
    return Start(resolved, find_model(config, WANTED), model, places, plan)


def fit_shared_memory(plan: MemoryPlan, free: int) -> MemoryPlan:
    """The same plan with a KV budget that shared memory, where workers keep everything, can hold.

    Raises:
        MemoryPlanError: it cannot hold a single slot.
    """
    fixed = plan.weights_bytes + plan.shared_bytes
    needed = fixed + plan.kv.slot_bytes
    if needed > free:
        raise MemoryPlanError(
            f"{SHM} has {gb(free)} free, and socket workers need {gb(needed)}; make it larger"
            " (docker --shm-size, a Memory emptyDir with a larger sizeLimit), run ellm-serve clean,"
            " or use --workers threads"
        )
    return replace(plan, kv_budget_bytes=min(plan.kv_budget_bytes, free - fixed))


def free_bytes(directory: Path) -> int:
    """Space left in a file system."""
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


def find_model(config: EngineConfig, wanted: Sequence[str]) -> Path:
    """The model's directory with at least the files that match `wanted`."""
    cache_dir = Path(config.cache_dir) if config.cache_dir else None
    return resolve_model(config.model, config.revision, cache_dir, config.offline, wanted)


def load_model_config(config: EngineConfig) -> tuple[Path, ModelConfig]:
    """The model's directory and dimensions; downloads nothing but its configuration."""
    directory = find_model(config, CONFIG_ONLY)
    return directory, ModelConfig.from_dir(directory)


def choose_places(config: EngineConfig, machine: Machine) -> tuple[SocketPlace, ...]:
    """The cores to pin every socket's compute threads to."""
    if config.sockets is None and config.workers == "threads" and not config.housekeeping_cores:
        return (SocketPlace(choose_cores(config, machine.allowed_cores)),)
    count = config.sockets
    if count is None and config.workers == "threads":
        count = 1
    return choose_sockets(machine, count, config.threads, config.housekeeping_cores)


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


def sizes_of(config: EngineConfig, num_threads: int, num_sockets: int = 1) -> Sizes:
    """What memory depends on; `num_threads` are those of one socket."""
    return Sizes(
        num_slots=config.batch_size,
        num_threads=num_threads,
        num_sockets=num_sockets,
        expert_split=ExpertSplit(config.expert_split),
        sequence_length=config.sequence_length,
        prefill_block=config.prefill_block,
        max_logit_rows=config.max_logit_rows,
        kv_budget_bytes=config.kv_budget_bytes,
    )
