"""What `ellm-serve plan` shows: a decode step and a prefill block op by op, and the memory plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from ellm_serve.cluster.memory import Memory
from ellm_serve.cluster.startup import choose_places, sizes_of
from ellm_serve.cluster.topology import Machine
from ellm_serve.config import EngineConfig
from ellm_serve.errors import MemoryPlanError
from ellm_serve.graph.listing import fold, ranges
from ellm_serve.graph.ops import Load, Op
from ellm_serve.graph.plan import MemoryPlan, Planner, gb, plan_memory
from ellm_serve.graph.program import Ceiling, OpCost, cost, lower, roofline_s
from ellm_serve.graph.qwen3 import Bases, build_qwen3
from ellm_serve.graph.tensor import Mode
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.sharding import ExpertSplit, Shard
from ellm_serve.model.weights import WeightLayout

_CONTEXT = 4096
# Work between two yield points, so large that no op is divided.
_UNDIVIDED = 1e18


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The plan, why it is refused (if it is), and what would fit."""

    plan: MemoryPlan
    refusal: MemoryPlanError | None
    longest_one_full: int
    longest_all_full: int
    most_slots: int


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of one mode."""

    name: str
    load: Load
    ops: list[Op]
    num_barriers: int


@dataclass(frozen=True, slots=True)
class Team:
    """Sockets, and threads of each."""

    sockets: int
    threads: int

    def __str__(self) -> str:
        each = f"{self.threads} threads"
        return each if self.sockets == 1 else f"{self.sockets} sockets of {each}"


def machine_for(
    config: EngineConfig, bandwidth: int | None, peak: int | None
) -> tuple[Team, Ceiling]:
    """Sockets and ceiling: what was given, and what is missing measured on this machine."""
    if bandwidth is not None and peak is not None:
        # Another machine may be meant, so its number of threads is not checked against this one.
        threads = config.threads or len(Machine.discover().allowed_cores)
        count = config.sockets or 1
        return Team(count, max(1, threads // count)), Ceiling(bandwidth, peak)
    from ellm_kernels.jit import compile_all
    from ellm_serve.cluster.probe import measure_ceiling

    compile_all()
    places = choose_places(config, Machine.discover())
    measured = measure_ceiling(tuple(core for place in places for core in place.cores))
    ceiling = Ceiling(bandwidth or measured.bytes_per_s, peak or measured.flops_per_s)
    return Team(len(places), len(places[0].cores)), ceiling


def plan_for(
    config: EngineConfig, model: ModelConfig, team: Team, available: int | None
) -> MemoryReport:
    """The memory plan, also when it does not fit."""
    if available is None:
        available = Memory.read().available_bytes
    sizes = sizes_of(config, team.threads, team.sockets)
    planner = Planner(model, sizes, available)
    longest = planner.longest(planner.starts, config.batch_size)
    refusal = None
    try:
        plan = plan_memory(model, sizes, available)
    except MemoryPlanError as error:
        length = config.sequence_length or longest or model.rope.max_length
        plan, refusal = planner.plan(length, config.batch_size), error
    return MemoryReport(
        plan,
        refusal,
        longest,
        planner.longest(planner.fills, config.batch_size),
        planner.most_slots(plan.kv.sequence_length),
    )


def stages_for(
    config: EngineConfig,
    model: ModelConfig,
    plan: MemoryPlan,
    team: Team,
    rows: int,
    context: int | None,
) -> list[Stage]:
    """A decode step of `rows` rows, and a full prefill block, as one of the sockets sees them."""
    length = plan.kv.sequence_length
    context = min(_CONTEXT, length) if context is None else context
    shard = Shard(model, 0, team.sockets, ExpertSplit(config.expert_split))
    kv = replace(plan.kv, num_kv_heads=shard.kv_heads.size)
    ops, activations = build_qwen3(shard, WeightLayout.from_shard(shard), kv, Bases())
    block = min(config.prefill_block, length)
    loads = {
        Mode.FEW: ("decode step", Load(rows, context, rows)),
        Mode.MANY: ("prefill block", Load(block, context, 1)),
    }
    stages = []
    for mode, (name, load) in loads.items():
        arena = activations.arena(mode, load.rows, load.logit_rows, team.threads, length)
        table = lower(ops, arena, _UNDIVIDED)
        stages.append(Stage(name, load, ops, table.num_barriers))
    return stages


def as_text(
    name: str, memory: MemoryReport, stages: list[Stage], ceiling: Ceiling, team: Team
) -> str:
    """For people."""
    lines = [
        f"{name} on {team}: {ceiling.bytes_per_s / 1e9:.1f} GB/s,"
        f" {ceiling.flops_per_s / 1e9:.0f} GFLOP/s"
    ]
    if team.sockets > 1:
        lines += ["bytes, operations and times of each socket:"]
    for stage in stages:
        lines += ["", *_stage_lines(stage, _share(ceiling, team))]
    return "\n".join([*lines, "", *_memory_lines(memory)])


def _share(ceiling: Ceiling, team: Team) -> Ceiling:
    """One socket's part of what all do together."""
    return Ceiling(ceiling.bytes_per_s / team.sockets, ceiling.flops_per_s / team.sockets)


def _stage_lines(stage: Stage, ceiling: Ceiling) -> Iterator[str]:
    load = stage.load
    yield f"{stage.name}: {load.rows} row(s), context {load.context}"
    yield f"  {'op':<16}{'dims':<44}{'bytes':>10}{'GFLOP':>12}{'predicted':>14}"
    costs = cost(stage.ops, load, ceiling)
    for block in fold(costs):
        for op in block.costs:
            yield _op_line(op)
        if block.count > 1:
            yield f"  layers {ranges(block.layers[1:])} like {block.layers[0]}"
    seconds = roofline_s(stage.ops, load, ceiling)
    total = OpCost(
        "total", f"{stage.num_barriers} barriers", sum(op.flops for op in costs),
        sum(op.bytes for op in costs), sum(op.predicted_s for op in costs),
    )  # fmt: skip
    yield _op_line(total)
    yield f"  at best {load.rows / seconds:.1f} tokens/s"


def _op_line(op: OpCost) -> str:
    return (
        f"  {op.name:<16}{op.dims:<44}{gb(op.bytes) if op.bytes else '-':>10}"
        f"{op.flops / 1e9:>12.3f}{_time(op.predicted_s):>14}"
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} µs"


def _memory_lines(memory: MemoryReport) -> Iterator[str]:
    plan, shape = memory.plan, memory.plan.kv
    yield f"memory: {plan.summary()}"
    parts = {f"weights, {kind}": size for kind, size in asdict(plan.weights).items() if size} | {
        "activations, decode": plan.decode_bytes,
        "activations, prefill": plan.prefill_bytes,
        "rotary tables": plan.rotary_bytes,
        "mailboxes, exchanges": plan.shared_bytes,
        "Python and kernels": plan.runtime_bytes,
    }
    for part, size in parts.items():
        yield f"  {part:<24}{gb(size):>10}"
    yield f"  {'taken at start':<24}{gb(plan.fixed_bytes):>10}"
    yield (
        f"  {'KV, one full slot':<24}{gb(shape.slot_bytes):>10}"
        f"  ({gb(shape.token_bytes)} per token)"
    )
    full = f"{plan.num_full_slots} of {shape.num_slots} slots full"
    yield f"  {'KV budget':<24}{gb(plan.kv_budget_bytes):>10}  ({full})"
    yield f"  {'kept free':<24}{gb(plan.kept_free_bytes):>10}"
    yield f"  {'available':<24}{gb(plan.available_bytes):>10}"
    yield (
        f"  largest sequence length with batch size {shape.num_slots}: {memory.longest_one_full},"
        f" or {memory.longest_all_full} with all slots full at once"
    )
    yield (
        f"  largest batch size with sequence length {shape.sequence_length}, all slots full:"
        f" {memory.most_slots}"
    )
    if plan.warning:
        yield f"  note: {plan.warning}"


def as_json(
    name: str, memory: MemoryReport, stages: list[Stage], ceiling: Ceiling, team: Team
) -> str:
    """For programs: every op of every layer, nothing folded."""
    plan, share = memory.plan, _share(ceiling, team)
    program = {
        stage.name.replace(" ", "_"): asdict(stage.load)
        | {
            "barriers": stage.num_barriers,
            "predicted_s": roofline_s(stage.ops, stage.load, share),
            "ops": [asdict(op) for op in cost(stage.ops, stage.load, share)],
        }
        for stage in stages
    }
    sizes = {
        "fixed_bytes": plan.fixed_bytes,
        "kv_token_bytes": plan.kv.token_bytes,
        "kv_slot_bytes": plan.kv.slot_bytes,
        "kv_bytes": plan.kv.size_bytes,
        "longest_one_full": memory.longest_one_full,
        "longest_all_full": memory.longest_all_full,
        "most_slots": memory.most_slots,
        "fits": memory.refusal is None,
    }
    machine = asdict(ceiling) | {"threads": team.sockets * team.threads, "sockets": team.sockets}
    return json.dumps(
        {"model": name, "machine": machine, "memory": asdict(plan) | sizes} | program, indent=1
    )
