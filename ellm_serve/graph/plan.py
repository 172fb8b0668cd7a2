"""How much memory a model takes on this machine, computed before any byte of it is loaded.

Weights, activations, rotary tables and mailboxes are taken at start. KV is reserved as address
space and committed chunk by chunk, so an engine starts if one slot can be filled to its end; what
is left over is the budget that all slots share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from ellm_kernels.kv_layout import CHUNK
from ellm_serve.errors import ConfigError, MemoryPlanError
from ellm_serve.graph.group_layout import GroupLayout, StepSizes
from ellm_serve.graph.kv_tensor import KVShape
from ellm_serve.graph.qwen3 import Activations
from ellm_serve.graph.rotary import rotary_bytes
from ellm_serve.graph.tensor import Mode
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.region import HUGE_PAGE, round_up
from ellm_serve.model.sharding import ExpertSplit, Shard
from ellm_serve.model.weights import LayerPlaces, Place, WeightLayout

# Python, NumPy, Numba with LLVM, tokenizer and all compiled kernels: resident size of a process
# that has loaded everything but a model, measured at 300-340 MB.
RUNTIME_BYTES = 350_000_000
# One part in 32 of what is available stays free: other programs and the page cache move too, and
# running into a control group's limit is death, not an error code.
_KEPT_FREE = 32
_MAX_BATCH = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is chosen besides the model. `sequence_length` None: as long as model and memory allow;
    `kv_budget_bytes` None: all that is left."""

    num_slots: int
    num_threads: int  # of each socket
    num_sockets: int = 1
    expert_split: ExpertSplit = ExpertSplit.SLICE
    sequence_length: int | None = None
    prefill_block: int = 2048
    max_logit_rows: int = 32
    kv_budget_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Packed weights by what they are for. `experts` are the MLPs of dense models too."""

    embedding: int
    attention: int
    router: int
    experts: int
    norms: int
    lm_head: int

    @classmethod
    def of(cls, layout: WeightLayout) -> WeightBytes:
        layers = layout.layers
        return cls(
            embedding=_size(layout.embedding),
            attention=sum(_size(layer.qkv) + _size(layer.o_proj) for layer in layers),
            router=sum(_size(layer.router) for layer in layers),
            experts=sum(_size(layer.experts.up) + _size(layer.experts.down) for layer in layers),
            norms=sum(_norm_bytes(layer) for layer in layers) + _size(layout.final_norm),
            lm_head=_size(layout.lm_head),
        )

    def times(self, count: int) -> WeightBytes:
        """The same on every one of `count` sockets."""
        return WeightBytes(**{name: size * count for name, size in asdict(self).items()})

    @property
    def total(self) -> int:
        return (
            self.embedding + self.attention + self.router + self.experts + self.norms + self.lm_head
        )


def _size(place: Place | None) -> int:
    return place.size_bytes if place is not None else 0


def _norm_bytes(layer: LayerPlaces) -> int:
    norms = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
    return sum(norm.size_bytes for norm in norms)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Every byte of an engine. Made by `plan_memory`, which refuses what does not fit."""

    weights: WeightBytes
    weights_bytes: int  # with alignment
    kv: KVShape
    decode_bytes: int
    prefill_bytes: int
    rotary_bytes: int
    shared_bytes: int
    available_bytes: int
    kv_budget_bytes: int
    warning: str | None = None
    runtime_bytes: int = RUNTIME_BYTES

    @property
    def kept_free_bytes(self) -> int:
        """Left to others."""
        return self.available_bytes // _KEPT_FREE

    @property
    def left_bytes(self) -> int:
        """What KV may take; negative when not even the rest fits."""
        return self.available_bytes - self.kept_free_bytes - self.fixed_bytes

    @property
    def fixed_bytes(self) -> int:
        """Taken at start, before the first token."""
        return (
            self.weights_bytes + self.decode_bytes + self.prefill_bytes + self.rotary_bytes
            + self.shared_bytes + self.runtime_bytes
        )  # fmt: skip

    @property
    def num_full_slots(self) -> int:
        """Slots that can be filled to their end at the same time."""
        return min(self.kv.num_slots, self.kv_budget_bytes // self.kv.slot_bytes)

    def summary(self) -> str:
        """The line for the log."""
        shape = self.kv
        line = (
            f"{shape.num_slots} slots x {shape.sequence_length} tokens, KV {gb(shape.size_bytes)}"
        )
        if self.kv_budget_bytes < shape.size_bytes:
            line += f" reserved, at most {gb(self.kv_budget_bytes)} of it in use"
        return line


def gb(size: float) -> str:
    """Bytes for people, in powers of ten."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= 0.9995 * scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


class Planner:
    """Sizes of one model, for any sequence length and batch size."""

    def __init__(self, model: ModelConfig, sizes: Sizes, available_bytes: int) -> None:
        self._model = model
        self._shard = Shard(model, 0, sizes.num_sockets, sizes.expert_split)
        self._layout = WeightLayout.from_shard(self._shard)
        self._activations = Activations(self._shard)
        self._sizes = sizes
        self._available = available_bytes

    def plan(self, length: int, num_slots: int) -> MemoryPlan:
        """The plan for these sizes, whether it fits or not (then the KV budget is too small)."""
        sizes, model, count = self._sizes, self._model, self._sizes.num_sockets
        # The heads of all sockets: more than the model has where they are replicated.
        kv_heads = count * self._shard.kv_heads.size
        kv = KVShape(num_slots, length, model.num_layers, kv_heads, model.head_dim, count)
        plan = MemoryPlan(
            weights=WeightBytes.of(self._layout).times(count),
            weights_bytes=count * round_up(self._layout.size_bytes, HUGE_PAGE),
            kv=kv,
            decode_bytes=self._arena_bytes(Mode.FEW, num_slots, num_slots, length),
            prefill_bytes=self._arena_bytes(
                Mode.MANY, sizes.prefill_block, sizes.max_logit_rows, length
            ),
            rotary_bytes=count * round_up(rotary_bytes(model, length), HUGE_PAGE),
            shared_bytes=self._shared_bytes(num_slots),
            available_bytes=self._available,
            kv_budget_bytes=0,
        )
        asked = kv.size_bytes if sizes.kv_budget_bytes is None else sizes.kv_budget_bytes
        budget = min(max(0, plan.left_bytes), asked, kv.size_bytes)
        return replace(plan, kv_budget_bytes=budget)

    def _arena_bytes(self, mode: Mode, rows: int, logit_rows: int, length: int) -> int:
        threads = self._sizes.num_threads
        arena = self._activations.arena(mode, rows, logit_rows, threads, length)
        return self._sizes.num_sockets * round_up(arena.size_bytes, HUGE_PAGE)

    def _shared_bytes(self, num_slots: int) -> int:
        """Control block, mailboxes, exchanges and logits."""
        sizes = self._sizes
        block = sizes.prefill_block
        few = StepSizes(Mode.FEW, num_slots, num_slots)
        many = StepSizes(Mode.MANY, block, min(sizes.max_logit_rows, block))
        layout = GroupLayout(self._shard, sizes.num_threads, few, many)
        return round_up(layout.size_bytes, HUGE_PAGE)

    def starts(self, length: int, num_slots: int) -> bool:
        """Whether one slot can be filled to its end."""
        plan = self.plan(length, num_slots)
        return plan.kv_budget_bytes >= plan.kv.slot_bytes

    def fills(self, length: int, num_slots: int) -> bool:
        """Whether all slots can be filled at the same time."""
        plan = self.plan(length, num_slots)
        return plan.kv_budget_bytes >= plan.kv.size_bytes

    def longest(self, fits: Callable[[int, int], bool], num_slots: int) -> int:
        """The largest sequence length for which `fits` holds, in whole chunks; 0: none."""
        most = self._model.rope.max_length
        if fits(most, num_slots):
            return most
        return CHUNK * _last_true(lambda chunks: fits(chunks * CHUNK, num_slots), most // CHUNK)

    def most_slots(self, length: int) -> int:
        """The largest batch size with which all slots can be filled; 0: none."""
        return _last_true(lambda slots: self.fills(length, slots), _MAX_BATCH)


def _last_true(holds: Callable[[int], bool], most: int) -> int:
    """The largest n in [0, most] for which `holds`, which is true up to some n and false after."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def plan_memory(model: ModelConfig, sizes: Sizes, available_bytes: int) -> MemoryPlan:
    """The plan for a start.

    Raises:
        ModelError: the model cannot tell that many positions apart.
        ConfigError: a size contradicts another.
        MemoryPlanError: it does not fit; the message says what would.
    """
    planner = Planner(model, sizes, available_bytes)
    longest = planner.longest(planner.starts, sizes.num_slots)
    length, warning = sizes.sequence_length, None
    if length is None:
        length = longest or min(CHUNK, model.rope.max_length)
    else:
        warning = model.rope.check_length(length, model.max_position_embeddings)
    plan = replace(planner.plan(length, sizes.num_slots), warning=warning)
    _check_budget(sizes, plan)
    if plan.kv_budget_bytes < plan.kv.slot_bytes:
        raise _does_not_fit(plan, longest)
    return plan


def _check_budget(sizes: Sizes, plan: MemoryPlan) -> None:
    asked = sizes.kv_budget_bytes
    if asked is None:
        return
    if asked < plan.kv.slot_bytes:
        raise ConfigError(
            f"kv_budget_bytes {gb(asked)} is less than one slot of {plan.kv.sequence_length} tokens"
            f" ({gb(plan.kv.slot_bytes)}); raise it or lower --sequence-length"
        )
    left = plan.left_bytes
    if plan.kv.slot_bytes <= left < min(asked, plan.kv.size_bytes):
        raise MemoryPlanError(
            f"kv_budget_bytes {gb(asked)} does not fit: {gb(plan.available_bytes)} available,"
            f" {gb(plan.fixed_bytes + plan.kept_free_bytes)} of it for everything else; at most"
            f" {gb(left)}"
        )


def _does_not_fit(plan: MemoryPlan, longest: int) -> MemoryPlanError:
    """One line with the numbers and what to change."""
    kv, slots = plan.kv, plan.kv.num_slots
    needed = (plan.fixed_bytes + kv.slot_bytes) * _KEPT_FREE // (_KEPT_FREE - 1)
    other = needed - kv.slot_bytes - plan.weights_bytes
    if longest:
        remedy = f"the largest --sequence-length that fits with --batch-size {slots} is {longest}"
    else:
        remedy = (
            "no --sequence-length fits; use a smaller model or a machine with at least"
            f" {gb(needed)} free"
        )
    return MemoryPlanError(
        f"{gb(needed)} needed, {gb(plan.available_bytes)} available: weights"
        f" {gb(plan.weights_bytes)}, activations, runtime and reserve {gb(other)}, one slot of"
        f" {kv.sequence_length} tokens {gb(kv.slot_bytes)}; {remedy}"
    )
