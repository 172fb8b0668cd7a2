"""The tensors a published Qwen3 checkpoint consists of: names and shapes, nothing else.

Shapes are [rows, columns] = [outputs, inputs], as Hugging Face stores them.
"""

from __future__ import annotations

from ellm_serve.model.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

Shape = tuple[int, ...]


def model_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor the model needs; a tied model has no lm_head of its own."""
    tensors: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        tensors |= layer_tensors(config, layer)
    tensors[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        tensors[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return tensors


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, Shape]:
    """Tensors of one decoder layer, under their full names."""
    hidden = config.hidden_size
    prefix = layer_prefix(layer)
    return {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}self_attn.q_proj.weight": (config.q_size, hidden),
        f"{prefix}self_attn.k_proj.weight": (config.kv_size, hidden),
        f"{prefix}self_attn.v_proj.weight": (config.kv_size, hidden),
        f"{prefix}self_attn.q_norm.weight": (config.head_dim,),
        f"{prefix}self_attn.k_norm.weight": (config.head_dim,),
        f"{prefix}self_attn.o_proj.weight": (hidden, config.q_size),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
        **(_experts if config.moe_layers[layer] else _dense_mlp)(config, prefix),
    }


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def _dense_mlp(config: ModelConfig, prefix: str) -> dict[str, Shape]:
    return _gated_mlp(f"{prefix}mlp.", config.hidden_size, config.intermediate_size)


def _experts(config: ModelConfig, prefix: str) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {
        f"{prefix}mlp.gate.weight": (config.num_experts, config.hidden_size)
    }
    for expert in range(config.num_experts):
        tensors |= _gated_mlp(
            f"{prefix}mlp.experts.{expert}.", config.hidden_size, config.moe_intermediate_size
        )
    return tensors


def _gated_mlp(prefix: str, hidden: int, intermediate: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (intermediate, hidden),
        f"{prefix}up_proj.weight": (intermediate, hidden),
        f"{prefix}down_proj.weight": (hidden, intermediate),
    }
