"""The dimensions of a model, read from its `config.json`.

Fields the file leaves out get the value transformers would give them. What this engine cannot
run exactly (another architecture, a quantised checkpoint, biases, a sliding window) is refused
here, before any memory is taken. Knows nothing of tensors, text or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ellm_serve.errors import ModelError
from ellm_serve.model.fields import JsonFields
from ellm_serve.model.rope import RopeConfig

MAX_LAYERS = 4096
SUPPORTED_WEIGHTS = "unquantised safetensors in bf16, fp16 or fp32"


class Architecture(StrEnum):
    """The model classes that can be served, by their Hugging Face names."""

    QWEN3 = "Qwen3ForCausalLM"
    QWEN3_MOE = "Qwen3MoeForCausalLM"


_BY_MODEL_TYPE = {"qwen3": Architecture.QWEN3, "qwen3_moe": Architecture.QWEN3_MOE}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions and constants of one model.

    `moe_layers[i]` tells whether layer i routes to experts; without any, the expert fields are 0.
    `eos_token_ids` are those of `config.json` alone (see `generation_config.end_token_ids`).
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    moe_layers: tuple[bool, ...]
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        _check_dims(self)

    @property
    def q_size(self) -> int:
        """Output columns of q_proj."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Output columns of k_proj, and of v_proj."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_dir(cls, path: Path) -> ModelConfig:
        _refuse_other_formats(path)
        fields = JsonFields.from_file(path / "config.json")
        architecture = _architecture(fields)
        _refuse_quantised(fields)
        _refuse_unsupported(fields, architecture)
        moe = architecture is Architecture.QWEN3_MOE
        num_layers = fields.positive_int("num_hidden_layers")
        if num_layers > MAX_LAYERS:
            raise fields.refuse("num_hidden_layers", f"at most {MAX_LAYERS}")
        moe_layers = _moe_layers(fields, num_layers) if moe else (False,) * num_layers
        routed = any(moe_layers)
        num_heads = fields.positive_int("num_attention_heads")
        hidden_size = fields.positive_int("hidden_size")
        max_position_embeddings = fields.positive_int("max_position_embeddings", 32_768)
        return cls(
            architecture=architecture,
            vocab_size=fields.positive_int("vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(fields, num_heads, moe),
            # The two classes differ: the MoE one has no default of its own.
            head_dim=fields.positive_int("head_dim", hidden_size // num_heads if moe else 128),
            intermediate_size=fields.positive_int("intermediate_size", 6144 if moe else None),
            moe_intermediate_size=fields.positive_int("moe_intermediate_size") if routed else 0,
            num_experts=_num_experts(fields) if routed else 0,
            num_experts_per_tok=fields.positive_int("num_experts_per_tok", 8) if routed else 0,
            norm_topk_prob=routed and fields.flag("norm_topk_prob", False),
            moe_layers=moe_layers,
            rms_norm_eps=fields.positive_number("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_fields(fields, max_position_embeddings),
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            eos_token_ids=fields.ids("eos_token_id"),
            bos_token_id=next(iter(fields.ids("bos_token_id")), None),
        )


def _refuse_other_formats(path: Path) -> None:
    if path.suffix.lower() == ".gguf":
        raise ModelError(f"{path} is a GGUF file; supported are {SUPPORTED_WEIGHTS}")
    if not path.is_dir():
        raise ModelError(f"{path} is not a model directory")
    if not (path / "config.json").exists() and any(path.glob("*.gguf")):
        raise ModelError(f"{path} holds GGUF files; supported are {SUPPORTED_WEIGHTS}")


def _architecture(fields: JsonFields) -> Architecture:
    names = fields.texts("architectures")
    model_type = fields.text("model_type", "")
    if not names and model_type in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[model_type]
    name = names[0] if names else model_type
    try:
        return Architecture(name)
    except ValueError:
        raise ModelError(
            f"{fields.source}: architecture {name!r} is not supported"
            f" (supported: {', '.join(Architecture)})"
        ) from None


def _refuse_quantised(fields: JsonFields) -> None:
    for key in ("quantization_config", "compression_config"):
        section = fields.child(key)
        if section is not None:
            scheme = section.text("quant_method", "of unknown method")
            raise ModelError(
                f"{fields.source}: the checkpoint is quantised ({scheme}), which is not supported;"
                f" use {SUPPORTED_WEIGHTS}"
            )


def _refuse_unsupported(fields: JsonFields, architecture: Architecture) -> None:
    if fields.flag("attention_bias", False):
        raise ModelError(f"{fields.source}: attention_bias true is not supported")
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{fields.source}: hidden_act {activation!r} is not supported, only silu")
    if _has_sliding_window(fields, architecture):
        raise ModelError(
            f"{fields.source}: sliding-window attention is not supported; the model must use full"
            " attention in every layer (use_sliding_window false)"
        )


def _has_sliding_window(fields: JsonFields, architecture: Architecture) -> bool:
    if any(kind != "full_attention" for kind in fields.texts("layer_types")):
        return True
    # An explicit null switches the window off; an absent key means 4096.
    window = fields.values.get("sliding_window", 4096) is not None
    if not window or not fields.flag("use_sliding_window", False):
        return False
    if architecture is Architecture.QWEN3_MOE:
        return True
    # Dense models say per layer, or use the window from layer `max_window_layers` on.
    first_layer = fields.number("max_window_layers", 28)
    return not fields.has("layer_types") and first_layer < fields.positive_int("num_hidden_layers")


def _num_kv_heads(fields: JsonFields, num_heads: int, moe: bool) -> int:
    if moe:
        return fields.positive_int("num_key_value_heads", 4)
    explicit_null = "num_key_value_heads" in fields.values and not fields.has("num_key_value_heads")
    return fields.positive_int("num_key_value_heads", num_heads if explicit_null else 32)


def _num_experts(fields: JsonFields) -> int:
    # transformers writes either name for the same number.
    return fields.positive_int(
        "num_experts" if fields.has("num_experts") else "num_local_experts", 128
    )


def _moe_layers(fields: JsonFields, num_layers: int) -> tuple[bool, ...]:
    """Layer i routes unless it is listed as dense or falls between the sparse steps."""
    dense = set(fields.ids("mlp_only_layers"))
    step = fields.positive_int("decoder_sparse_step", 1)
    if fields.values.get("num_experts") == 0:
        return (False,) * num_layers
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def _check_dims(config: ModelConfig) -> None:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads ({heads}) must be a multiple of"
            f" num_key_value_heads ({kv_heads})"
        )
    for name, value, multiple in (
        ("hidden_size", config.hidden_size, 2),
        ("head_dim", config.head_dim, 16),
        ("intermediate_size", config.intermediate_size, 2),
        ("moe_intermediate_size", config.moe_intermediate_size, 2),
    ):
        if value % multiple:
            raise ModelError(f"config.json: {name} ({value}) must be a multiple of {multiple}")
    if config.num_experts_per_tok > config.num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok ({config.num_experts_per_tok}) exceeds"
            f" num_experts ({config.num_experts})"
        )
    assert len(config.moe_layers) == config.num_layers
    for token_id in config.eos_token_ids:
        if token_id >= config.vocab_size:
            raise ModelError(
                f"config.json: eos_token_id {token_id} is outside the vocabulary of"
                f" {config.vocab_size}"
            )
