"""Where every packed weight lies: names, sizes and offsets, computed from the dimensions alone.

Offsets count from the start of one region that holds all weights of the model, so a plan can be
made without a checkpoint. A dense MLP is stored as one expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from ellm_kernels.attention_decode import MAX_GROUP
from ellm_kernels.tiles import packed_bytes, packed_up_bytes
from ellm_serve.errors import ModelError
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.region import round_up
from ellm_serve.model.sharding import Shard

_ALIGNMENT = 4096
_PANEL = 64


@dataclass(frozen=True, slots=True)
class Place:
    """A weight in the region. `inputs` is 0 for a vector and for a row-major table."""

    offset: int
    size_bytes: int
    outputs: int
    inputs: int = 0


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """All experts of a layer: per expert panels of gate and up; per expert panels of down."""

    up: Place
    down: Place
    num_experts: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class LayerPlaces:
    """One decoder layer; `router` is None in a dense one."""

    input_norm: Place
    qkv: Place
    q_norm: Place
    k_norm: Place
    o_proj: Place
    post_norm: Place
    router: Place | None
    experts: ExpertPlaces


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """All weights of a model. `embedding` is None if lm_head's panels serve for both."""

    layers: tuple[LayerPlaces, ...]
    embedding: Place | None
    final_norm: Place
    lm_head: Place
    size_bytes: int

    @classmethod
    def from_config(cls, config: ModelConfig) -> WeightLayout:
        """The layout of a model on one socket."""
        return cls.from_shard(Shard(config))

    @classmethod
    def from_shard(cls, shard: Shard) -> WeightLayout:
        """The layout of what one socket holds."""
        config = shard.local
        _check_panels(config)
        cursor = _Cursor()
        layers = tuple(_layer(cursor, config, shard, moe) for moe in config.moe_layers)
        rows, hidden = shard.vocabulary.size, config.hidden_size
        embedding = None if config.tie_word_embeddings else cursor.table(rows, hidden)
        final_norm = cursor.vector(hidden)
        lm_head = cursor.matrix(rows, hidden)
        return cls(layers, embedding, final_norm, lm_head, cursor.size_bytes)


def _check_panels(config: ModelConfig) -> None:
    if config.hidden_size % _PANEL:
        raise ModelError(
            f"hidden_size {config.hidden_size} is no multiple of {_PANEL}, which the kernels need"
        )
    shared = config.num_heads // config.num_kv_heads
    if shared > MAX_GROUP:
        raise ModelError(
            f"{config.num_heads} query heads on {config.num_kv_heads} kv-heads make {shared} per"
            f" kv-head; the kernels take at most {MAX_GROUP}"
        )
    sizes = {"intermediate_size": 0 if all(config.moe_layers) else config.intermediate_size}
    sizes["moe_intermediate_size"] = config.moe_intermediate_size
    for name, size in sizes.items():
        if size % 2:
            raise ModelError(f"{name} {size} is odd; the kernels need an even one")


class _Cursor:
    """Hands out aligned places one behind the other."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def _place(self, size_bytes: int, outputs: int, inputs: int = 0) -> Place:
        place = Place(self.size_bytes, size_bytes, outputs, inputs)
        self.size_bytes = round_up(self.size_bytes + size_bytes, _ALIGNMENT)
        return place

    def vector(self, size: int) -> Place:
        """float32 [size]"""
        return self._place(4 * size, size)

    def table(self, rows: int, width: int) -> Place:
        """bf16 [rows, width]"""
        return self._place(2 * rows * width, rows)

    def matrix(self, outputs: int, inputs: int, copies: int = 1) -> Place:
        """`copies` packed bf16 matrices, one behind the other."""
        return self._place(copies * packed_bytes(outputs, inputs), outputs, inputs)

    def gate_up(self, intermediate: int, inputs: int, copies: int) -> Place:
        """`copies` packed pairs of gate and up projections."""
        return self._place(copies * packed_up_bytes(intermediate, inputs), intermediate, inputs)


def _layer(cursor: _Cursor, config: ModelConfig, shard: Shard, moe: bool) -> LayerPlaces:
    hidden = config.hidden_size
    return LayerPlaces(
        input_norm=cursor.vector(hidden),
        qkv=cursor.matrix(config.q_size + 2 * config.kv_size, hidden),
        q_norm=cursor.vector(config.head_dim),
        k_norm=cursor.vector(config.head_dim),
        o_proj=cursor.matrix(hidden, config.q_size),
        post_norm=cursor.vector(hidden),
        router=cursor.matrix(config.num_experts, hidden) if moe else None,
        experts=_experts(
            cursor,
            hidden,
            shard.experts.size if moe else 1,
            config.moe_intermediate_size if moe else config.intermediate_size,
        ),
    )


def _experts(cursor: _Cursor, hidden: int, num_experts: int, intermediate: int) -> ExpertPlaces:
    return ExpertPlaces(
        up=cursor.gate_up(intermediate, hidden, num_experts),
        down=cursor.matrix(hidden, intermediate, num_experts),
        num_experts=num_experts,
        intermediate=intermediate,
    )
