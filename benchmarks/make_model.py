"""Writes a random-weight checkpoint with the dimensions of a real model.

    python -m benchmarks.make_model --preset moe6 --out DIR

Speed and memory do not depend on what weights mean, so a benchmark needs no download. A tokenizer
comes with it, so that the model can be served. The values
come from one random block read at a different place for each tensor: writing is limited by the
disk, and memory stays constant whatever the size.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from benchmarks.model_tokenizer import write_tokenizer
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.tensors import Shape, model_tensors

_COMMON: dict[str, object] = {
    "attention_bias": False,
    "bos_token_id": 0,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151_936,
}

# Qwen3-Coder-30B-A3B with fewer layers.
_MOE: dict[str, object] = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 262_144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "rope_theta": 10_000_000,
    "tie_word_embeddings": False,
}

# Qwen3-0.6B, complete.
_DENSE: dict[str, object] = _COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40_960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
}

PRESETS: dict[str, dict[str, object]] = {
    "moe6": _MOE | {"num_hidden_layers": 6},
    "moe2": _MOE | {"num_hidden_layers": 2, "vocab_size": 4096},
    "dense06": _DENSE,
}

SHARD_BYTES = 1_500_000_000
# About 1/sqrt(hidden_size): activations keep their size from layer to layer.
WEIGHT_STD = 0.02
# Odd, so that no two rows of a matrix start at the same place of the block.
BLOCK_ELEMENTS = (1 << 22) - 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if (arguments.out / "config.json").exists():
        parser.error(f"{arguments.out} already holds a model")
    started = time.perf_counter()
    num_bytes = write_preset(PRESETS[arguments.preset], arguments.out, arguments.seed)
    elapsed = time.perf_counter() - started
    print(f"{arguments.out}: {num_bytes / 1e9:.2f} GB in {elapsed:.1f} s")
    print(json.dumps({"preset": arguments.preset, "bytes": num_bytes, "seconds": elapsed}))


def write_preset(
    preset: Mapping[str, object], out: Path, seed: int = 0, shard_bytes: int = SHARD_BYTES
) -> int:
    """Writes the model; returns the bytes of its tensors."""
    out.mkdir(parents=True, exist_ok=True)
    vocab_size = preset["vocab_size"]
    assert isinstance(vocab_size, int)
    end_id = write_tokenizer(out, vocab_size)
    _write_json(out / "config.json", {**preset, "eos_token_id": end_id})
    _write_json(out / "generation_config.json", {"do_sample": True, "eos_token_id": end_id})
    tensors = model_tensors(ModelConfig.from_dir(out))
    block = _random_block(seed)
    shards = list(_split(tensors, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(out / name, shard, block)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(map(_num_bytes, tensors.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(out / "model.safetensors.index.json", index)
    return total


def _split(tensors: Mapping[str, Shape], shard_bytes: int) -> Iterator[dict[str, Shape]]:
    shard: dict[str, Shape] = {}
    filled = 0
    for name, shape in tensors.items():
        if shard and filled + _num_bytes(shape) > shard_bytes:
            yield shard
            shard, filled = {}, 0
        shard[name] = shape
        filled += _num_bytes(shape)
    yield shard


def _write_shard(path: Path, shard: Mapping[str, Shape], block: NDArray[np.uint16]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shard.items():
        begin, end = end, end + _num_bytes(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shard.items():
            _write_tensor(file, name, math.prod(shape), block)


def _write_tensor(file: BinaryIO, name: str, count: int, block: NDArray[np.uint16]) -> None:
    if name.endswith("norm.weight"):
        file.write(_bf16(np.ones(count, np.float32)).data)
        return
    position = zlib.crc32(name.encode()) % len(block)
    while count:
        part = block[position : position + count]
        file.write(part.data)
        count -= len(part)
        position = 0


def _random_block(seed: int) -> NDArray[np.uint16]:
    random = np.random.default_rng(seed)
    return _bf16(random.standard_normal(BLOCK_ELEMENTS, np.float32) * np.float32(WEIGHT_STD))


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    # Truncated, not rounded: these are random numbers.
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _num_bytes(shape: Shape) -> int:
    return 2 * math.prod(shape)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
