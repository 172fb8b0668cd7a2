"""Writes tiny random Qwen3 and Qwen3-MoE checkpoints, in the layout they are published in.

Weights are scaled so that every part of the network matters to the logits, and each tensor's values
depend on the seed and its own name only: sharding or leaving a tensor out changes no other one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ellm_serve.model.checkpoint import Checkpoint
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.tensors import model_tensors

Array = NDArray[Any]

TORCH_NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
FIXED: dict[str, object] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
}
GENERATION: dict[str, object] = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
}
INDEX = "model.safetensors.index.json"


def write_model(
    directory: Path,
    *,
    moe: bool,
    tie: bool = False,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 192,
    moe_intermediate: int = 64,
    experts: int = 8,
    top_k: int = 2,
    norm_topk_prob: bool = True,
    mlp_only_layers: Sequence[int] = (),
    decoder_sparse_step: int = 1,
    vocab: int = 256,
    rope_theta: float = 10_000.0,
    rope_scaling: Mapping[str, object] | None = None,
    max_positions: int = 1024,
    eos_token_ids: Sequence[int] = (),
    dtype: str = "bf16",
    shards: int = 1,
    seed: int = 0,
    overrides: Mapping[str, object] | None = None,
) -> Path:
    """Writes config.json, generation_config.json and the weights; returns the directory.

    The end ids are the last two of the vocabulary unless given. `overrides` go into config.json
    last.
    """
    directory.mkdir(parents=True, exist_ok=True)
    ends = list(eos_token_ids) or [vocab - 1, vocab - 2]
    config: dict[str, object] = FIXED | {
        "architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if moe else "qwen3",
        "eos_token_id": ends[0],
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_positions,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rope_scaling": rope_scaling,
        "rope_theta": rope_theta,
        "tie_word_embeddings": tie,
        "torch_dtype": TORCH_NAMES[dtype],
        "vocab_size": vocab,
    }
    if moe:
        config |= {
            "decoder_sparse_step": decoder_sparse_step,
            "mlp_only_layers": list(mlp_only_layers),
            "moe_intermediate_size": moe_intermediate,
            "norm_topk_prob": norm_topk_prob,
            "num_experts": experts,
            "num_experts_per_tok": top_k,
        }
    _write_json(directory / "config.json", config | dict(overrides or {}))
    _write_json(directory / "generation_config.json", GENERATION | {"eos_token_id": ends})
    write_weights(directory, random_tensors(directory, dtype, seed), shards)
    return directory


def random_tensors(directory: Path, dtype: str = "bf16", seed: int = 0) -> dict[str, Array]:
    """Weights for the directory's config.json, as they are stored on disk."""
    config = ModelConfig.from_dir(directory)
    return {
        name: store(_values(name, shape, seed, config.tie_word_embeddings), dtype)
        for name, shape in model_tensors(config).items()
    }


def _values(name: str, shape: tuple[int, ...], seed: int, tied: bool) -> Array:
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = random.standard_normal(shape, np.float32)
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.1) * noise
    # Wide router logits and token logits keep choices clear of rounding.
    scale = 3.0 if name == "lm_head.weight" else 2.0 if name.endswith("mlp.gate.weight") else 1.0
    if name == "model.embed_tokens.weight":
        scale = 3.0 if tied else shape[-1] ** 0.5
    return noise * np.float32(scale / shape[-1] ** 0.5)


def store(values: Array, dtype: str) -> Array:
    """float32 -> the array that holds the dtype's bits; bf16 rounds to nearest even."""
    if dtype == "bf16":
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype({"f16": np.float16, "f32": np.float32}[dtype])


def write_weights(directory: Path, tensors: Mapping[str, Array], shards: int = 1) -> None:
    """One model.safetensors, or `shards` files and their index."""
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return
    names = list(tensors)
    per_file = -(-len(names) // shards)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = names[shard * per_file : (shard + 1) * per_file]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        write_safetensors(directory / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / INDEX, index)


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Independent of the package's reader; uint16 arrays are written as BF16."""
    names = {"uint16": "BF16", "float16": "F16", "float32": "F32", "int64": "I64", "uint8": "U8"}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        dtype = names[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def load_float32(directory: Path) -> dict[str, NDArray[np.float32]]:
    """Every tensor of a checkpoint, widened: what a plain reference model computes with."""
    checkpoint = Checkpoint.open(directory)
    return {name: widen(checkpoint.array(name)) for name in checkpoint.names}


def widen(array: Array) -> NDArray[np.float32]:
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
