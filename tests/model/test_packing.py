"""Packed weights, unpacked again: the sockets' shards together are the checkpoint, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ellm_serve.errors import ModelError
from ellm_serve.model.checkpoint import Checkpoint
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.packing import load_weights
from ellm_serve.model.region import Region
from ellm_serve.model.sharding import ExpertSplit, Shard
from ellm_serve.model.tensors import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix, model_tensors
from ellm_serve.model.weights import ExpertPlaces, LayerPlaces, Place, WeightLayout
from tests.tiny_models import Array, random_tensors, store, widen, write_model, write_weights

Bits = NDArray[np.uint16]
Held = dict[str, Array]

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"moe": False, "intermediate": 200},
    "dense, tied, uneven vocabulary": {
        "moe": False, "tie": True, "vocab": 450, "heads": 8, "kv_heads": 1, "head_dim": 16,
    },
    "experts": {"moe": True, "vocab": 450, "heads": 8, "kv_heads": 4, "moe_intermediate": 72},
    "experts and a dense layer, tied, several files": {
        "moe": True, "tie": True, "mlp_only_layers": (0,), "intermediate": 136, "shards": 3,
    },
}  # fmt: skip


@pytest.fixture(params=list(MODELS.values()), ids=list(MODELS))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model(tmp_path, **request.param)


class Unpacked:
    """What one socket holds, by the names of the checkpoint's tensors."""

    def __init__(self, directory: Path, shard: Shard) -> None:
        self.layout = WeightLayout.from_shard(shard)
        self.shard = shard
        self.region = Region(self.layout.size_bytes)
        # Nothing may be left as it was where a kernel reads.
        self.region.array(0, (self.region.size_bytes // 2,), np.uint16)[:] = 0x7FC1
        load_weights(shard, Checkpoint.open(directory), self.layout, self.region, 2)
        self.held: Held = {}
        self._unpack()

    def _unpack(self) -> None:
        layout = self.layout
        if layout.embedding is None:
            self.held[EMBEDDING] = self._matrix(layout.lm_head)
        else:
            shape = (layout.embedding.outputs, self.shard.whole.hidden_size)
            self.held[EMBEDDING] = self.region.array(layout.embedding.offset, shape, np.uint16)
            self.held[LM_HEAD] = self._matrix(layout.lm_head)
        self.held[FINAL_NORM] = self._vector(layout.final_norm)
        for index, layer in enumerate(layout.layers):
            self._unpack_layer(layer_prefix(index), layer)

    def _unpack_layer(self, prefix: str, layer: LayerPlaces) -> None:
        local, held = self.shard.local, self.held
        held[f"{prefix}input_layernorm.weight"] = self._vector(layer.input_norm)
        held[f"{prefix}post_attention_layernorm.weight"] = self._vector(layer.post_norm)
        attention = f"{prefix}self_attn."
        held[f"{attention}q_norm.weight"] = self._vector(layer.q_norm)
        held[f"{attention}k_norm.weight"] = self._vector(layer.k_norm)
        q, kv = local.q_size, local.kv_size
        parts = np.split(self._matrix(layer.qkv), [q, q + kv])
        for kind, part in zip("qkv", parts, strict=True):
            held[f"{attention}{kind}_proj.weight"] = part
        held[f"{attention}o_proj.weight"] = self._matrix(layer.o_proj)
        if layer.router is None:
            self._unpack_expert(f"{prefix}mlp.", layer.experts, 0)
            return
        held[f"{prefix}mlp.gate.weight"] = self._matrix(layer.router)
        for index in range(layer.experts.num_experts):
            number = self.shard.experts.begin + index
            self._unpack_expert(f"{prefix}mlp.experts.{number}.", layer.experts, index)

    def _unpack_expert(self, prefix: str, places: ExpertPlaces, index: int) -> None:
        width = places.intermediate
        both = self._panels(places.up, places.num_experts, index)
        for kind, half in (("gate", both[:, :32]), ("up", both[:, 32:])):
            rows = half.reshape(-1, places.up.inputs)
            assert not rows[width:].any(), "padding"
            self.held[f"{prefix}{kind}_proj.weight"] = rows[:width]
        down = self._panels(places.down, places.num_experts, index)
        self.held[f"{prefix}down_proj.weight"] = down.reshape(-1, width)

    def _vector(self, place: Place) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self.region.array(place.offset, (place.outputs,), np.float32)
        return values

    def _matrix(self, place: Place) -> Bits:
        rows = self._panels(place).reshape(-1, place.inputs)
        assert not rows[place.outputs :].any(), "padding"
        return rows[: place.outputs]

    def _panels(self, place: Place, copies: int = 1, index: int = 0) -> Bits:
        """[panel][64][inputs] of one copy."""
        shape = (copies, -1, place.inputs // 2, 64, 2)
        flat = self.region.array(place.offset, (place.size_bytes // 2,), np.uint16)
        panels = flat.reshape(shape)[index].transpose(0, 2, 1, 3)
        return np.ascontiguousarray(panels).reshape(-1, 64, place.inputs)


def unpack(directory: Path, count: int, split: ExpertSplit) -> list[Held]:
    config = ModelConfig.from_dir(directory)
    return [Unpacked(directory, Shard(config, rank, count, split)).held for rank in range(count)]


ROWS = re.compile(r".*(q_proj|lm_head|embed_tokens)\.weight")
COLUMNS = re.compile(r".*o_proj\.weight")
MLP = re.compile(r".*(gate|up|down)_proj\.weight")
REPLICATED = re.compile(r".*(norm|mlp\.gate)\.weight")
KV = re.compile(r".*[kv]_proj\.weight")


def join(name: str, parts: list[Array], config: ModelConfig, split: ExpertSplit) -> Array:
    """The tensor that the sockets hold together; checks that copies are copies."""
    if REPLICATED.fullmatch(name):
        assert all(np.array_equal(part, parts[0]) for part in parts)
        return parts[0]
    if KV.fullmatch(name):
        copies = max(1, len(parts) // config.num_kv_heads)
        for index, part in enumerate(parts):
            assert np.array_equal(part, parts[index // copies * copies])
        return np.concatenate(parts[::copies])
    if ".experts." in name and split is ExpertSplit.WHOLE:
        (whole,) = parts
        return whole
    assert ROWS.fullmatch(name) or COLUMNS.fullmatch(name) or MLP.fullmatch(name), name
    across = COLUMNS.fullmatch(name) or "down_proj" in name
    return np.concatenate(parts, axis=1 if across else 0)


@pytest.mark.parametrize("split", ExpertSplit)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_shards_together_are_the_checkpoint(
    directory: Path, count: int, split: ExpertSplit
) -> None:
    """No tensor is left out, moved by a row or cut at the wrong head, whatever the cut."""
    config = ModelConfig.from_dir(directory)
    sockets = unpack(directory, count, split)
    expected = random_tensors(directory)
    assert {name for held in sockets for name in held} == set(model_tensors(config))
    for name, values in expected.items():
        whole = join(name, [held[name] for held in sockets if name in held], config, split)
        if whole.dtype == np.float32:
            assert np.array_equal(whole, widen(values)), name
        else:
            assert np.array_equal(whole, values), name


@pytest.mark.parametrize("count", [2, 4])
def test_experts_are_on_one_socket_or_on_all(tmp_path: Path, count: int) -> None:
    """Whole experts in order of their numbers; slices of every expert everywhere."""
    directory = write_model(tmp_path, moe=True)
    expert = re.compile(r"model\.layers\.0\.mlp\.experts\.(\d+)\.up_proj\.weight")
    for split in ExpertSplit:
        held = [
            [int(match[1]) for name in socket if (match := expert.fullmatch(name))]
            for socket in unpack(directory, count, split)
        ]
        if split is ExpertSplit.WHOLE:
            assert held == np.arange(8).reshape(count, -1).tolist()
        else:
            assert held == [list(range(8))] * count


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("split", ExpertSplit)
def test_other_dtypes_are_cut_like_bf16(tmp_path: Path, dtype: str, split: ExpertSplit) -> None:
    """Columns of a tensor that is converted on the way are the right ones, too."""
    directory = write_model(tmp_path, moe=True, dtype=dtype, vocab=450, moe_intermediate=72)
    config = ModelConfig.from_dir(directory)
    sockets = unpack(directory, 4, split)
    for name, values in random_tensors(directory, dtype).items():
        whole = join(name, [held[name] for held in sockets if name in held], config, split)
        exact = values.astype(np.float32)
        assert np.array_equal(whole, exact if whole.dtype == np.float32 else store(exact, "bf16"))


@pytest.mark.parametrize("split", ExpertSplit)
@pytest.mark.parametrize("rank", range(4))
def test_a_shard_comes_from_its_slices_alone(
    directory: Path, rank: int, split: ExpertSplit, tmp_path: Path
) -> None:
    """Values that belong to other sockets do not matter: poisoned, they leave no trace."""
    shard = Shard(ModelConfig.from_dir(directory), rank, 4, split)
    clean = Unpacked(directory, shard)
    tensors = random_tensors(directory)
    assert poison(tensors, shard) > 0
    write_model(tmp_path / "poisoned", **_arguments(directory))
    write_weights(tmp_path / "poisoned", tensors)
    poisoned = Unpacked(tmp_path / "poisoned", shard)
    for name, values in clean.held.items():
        assert np.array_equal(values, poisoned.held[name]), name
        assert not np.isnan(widen(values)).any(), name


def _arguments(directory: Path) -> dict[str, Any]:
    """Those that wrote the directory, in one file."""
    config = ModelConfig.from_dir(directory)
    (arguments,) = [
        one for one in MODELS.values()
        if one["moe"] == bool(config.num_experts)
        and one.get("tie", False) == config.tie_word_embeddings
    ]  # fmt: skip
    return {name: value for name, value in arguments.items() if name != "shards"}


def poison(tensors: dict[str, Array], shard: Shard) -> int:
    """NaN wherever the shard has nothing to look for; returns the number of tensors touched."""
    config, d = shard.whole, shard.whole.head_dim
    touched = 0
    for name, values in tensors.items():
        keep = np.zeros(values.shape, bool)
        if REPLICATED.fullmatch(name):
            continue
        if ".experts." in name:
            number = int(name.split(".experts.")[1].split(".")[0])
            if not shard.experts.begin <= number < shard.experts.end:
                values[...] = 0x7FC1
                touched += 1
                continue
        if KV.fullmatch(name):
            part = shard.kv_heads
            keep[part.begin * d : part.end * d] = True
        elif "q_proj" in name:
            part = shard.query_heads
            keep[part.begin * d : part.end * d] = True
        elif COLUMNS.fullmatch(name):
            part = shard.query_heads
            keep[:, part.begin * d : part.end * d] = True
        elif MLP.fullmatch(name):
            part = shard.intermediate(".experts." in name)
            if "down_proj" in name:
                keep[:, part.begin : part.end] = True
            else:
                keep[part.begin : part.end] = True
        else:
            assert values.shape[0] == config.vocab_size
            keep[shard.vocabulary.begin : shard.vocabulary.end] = True
        values[~keep] = 0x7FC1
        touched += int(not keep.all())
    return touched


def test_other_sockets_experts_are_checked(tmp_path: Path) -> None:
    """A tensor that another socket would refuse is refused here: all start or none does."""
    directory = write_model(tmp_path, moe=True)
    tensors = random_tensors(directory)
    name = "model.layers.1.mlp.experts.7.down_proj.weight"
    write_weights(directory, tensors | {name: tensors[name][:, :-2].copy()})
    shard = Shard(ModelConfig.from_dir(directory), 0, 2, ExpertSplit.WHOLE)
    with pytest.raises(ModelError, match=r"experts\.7\.down_proj"):
        Unpacked(directory, shard)
