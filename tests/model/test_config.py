"""ModelConfig: what config.json means, and what is refused before any memory is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ellm_serve.errors import ModelError
from ellm_serve.model.config import Architecture, ModelConfig
from tests.tiny_models import write_model

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
MOE: dict[str, Any] = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


def read(directory: Path, config: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    return ModelConfig.from_dir(directory)


def test_reads_every_dimension(tmp_path: Path) -> None:
    """A field read from the wrong key would show as a wrong number here."""
    write_model(tmp_path, moe=True, hidden=96, layers=3, heads=6, kv_heads=3, head_dim=48,
                intermediate=160, moe_intermediate=80, experts=5, top_k=3, vocab=300,
                max_positions=777, mlp_only_layers=[1], eos_token_ids=[7, 9])  # fmt: skip
    config = ModelConfig.from_dir(tmp_path)
    assert config.architecture is Architecture.QWEN3_MOE
    assert str(config.architecture) == "Qwen3MoeForCausalLM"
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (96, 3, 300)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 3, 48)
    assert (config.q_size, config.kv_size) == (288, 144)
    assert (config.intermediate_size, config.moe_intermediate_size) == (160, 80)
    assert (config.num_experts, config.num_experts_per_tok) == (5, 3)
    assert config.norm_topk_prob
    assert config.moe_layers == (True, False, True)
    assert config.max_position_embeddings == 777
    assert config.eos_token_ids == (7,)
    assert config.bos_token_id == 0


def test_absent_fields_get_transformers_defaults(tmp_path: Path) -> None:
    """The two classes differ in head_dim: 128 against hidden/heads."""
    dense = read(tmp_path, DENSE)
    assert dense.head_dim == 128
    assert not dense.tie_word_embeddings
    assert dense.rms_norm_eps == 1e-6
    assert dense.max_position_embeddings == 32_768
    assert dense.rope.theta == 10_000
    assert dense.eos_token_ids == ()
    assert (dense.num_experts, dense.num_experts_per_tok, dense.moe_intermediate_size) == (0, 0, 0)
    assert dense.moe_layers == (False,) * 4
    moe = read(tmp_path, MOE)
    assert moe.head_dim == 32
    assert not moe.norm_topk_prob


def test_model_type_names_the_class_when_architectures_is_absent(tmp_path: Path) -> None:
    config = {k: v for k, v in MOE.items() if k != "architectures"} | {"model_type": "qwen3_moe"}
    assert read(tmp_path, config).architecture is Architecture.QWEN3_MOE


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"decoder_sparse_step": 3}, (False, False, True, False)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, (False, False, False, True)),
        ({"mlp_only_layers": None}, (True, True, True, True)),
        ({"num_experts": 0}, (False, False, False, False)),
    ],
)
def test_moe_layers(tmp_path: Path, fields: dict[str, Any], expected: tuple[bool, ...]) -> None:
    """Sparse steps count from 1: step 2 makes the second layer the first to route."""
    assert read(tmp_path, MOE | fields).moe_layers == expected


def test_both_names_of_the_expert_count(tmp_path: Path) -> None:
    """Files saved by recent transformers say num_local_experts."""
    config = {k: v for k, v in MOE.items() if k != "num_experts"} | {"num_local_experts": 6}
    assert read(tmp_path, config).num_experts == 6


def test_end_ids_may_be_a_list(tmp_path: Path) -> None:
    assert read(tmp_path, DENSE | {"eos_token_id": [5, 3]}).eos_token_ids == (5, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM'.*Qwen3ForCausalLM, Qwen3Moe"),
        ({"architectures": []}, "architecture ''"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "'gelu'.*only silu"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer, found 0"),
        ({"hidden_size": 128.0}, "found 128.0"),
        ({"hidden_size": True}, "found true"),
        ({"hidden_size": 129}, r"hidden_size \(129\) must be a multiple of 2"),
        ({"head_dim": 40}, r"head_dim \(40\) must be a multiple of 16"),
        ({"num_key_value_heads": 3}, r"\(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"eos_token_id": 256}, "256 is outside the vocabulary of 256"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"use_sliding_window": True, "max_window_layers": 2}, "sliding-window"),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "sliding-window"),
    ],
)
def test_refusals_name_the_key_and_the_value(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path, DENSE | fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) exceeds num_experts \(8\)"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"use_sliding_window": True}, "sliding-window"),
    ],
)
def test_moe_refusals(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, MOE | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"use_sliding_window": False, "sliding_window": 64},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "max_window_layers": 4},
        {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention"] * 4},
    ],
)
def test_a_sliding_window_that_never_applies_is_fine(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Published Qwen3 files carry window fields although no layer uses them."""
    assert read(tmp_path, DENSE | fields).num_layers == 4


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "gptq", "desc_act": True},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ],
)
def test_quantised_checkpoints_are_refused_by_name(
    tmp_path: Path, quantization: dict[str, Any]
) -> None:
    """Packed integers taken for weights give noise instead of an error."""
    with pytest.raises(ModelError, match=f"{quantization['quant_method']}.*bf16, fp16 or fp32"):
        read(tmp_path, DENSE | {"quantization_config": quantization})


def test_gguf_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    for path in (file, tmp_path):
        with pytest.raises(ModelError, match="GGUF.*safetensors"):
            ModelConfig.from_dir(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"hidden_size": ', "\xff", "[" * 100_000])
def test_a_broken_file_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match="config.json") as caught:
        ModelConfig.from_dir(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is .* a model directory"):
        ModelConfig.from_dir(tmp_path)
    with pytest.raises(ModelError, match="not a model directory"):
        ModelConfig.from_dir(tmp_path / "absent")
