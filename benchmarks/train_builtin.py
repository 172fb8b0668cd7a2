"""Trains the built-in model: `python -m benchmarks.train_builtin --out DIR --minutes N`."""

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers

from benchmarks import builtin_corpus as corpus

TEMPLATE = Path(__file__).parents[1] / "ellm_serve" / "builtin" / "chat_template.jinja"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TAG_TOKENS += ("<think>", "</think>")
PRE_TOKENS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WINDOW = 512
PEAK_LR = 3e-3
FINAL_LR = 0.02  # share of the peak
WARMUP_STEPS = 150
WEIGHT_DECAY = 0.1
BALANCE = 0.01
# (share of the time after which it applies, sequences per step, their length)
PHASES = ((0.0, 8, 512), (0.7, 4, 1024), (0.95, 2, 2048))


@dataclass(frozen=True, slots=True)
class Dims:
    """The sizes, under the names the published configurations use."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6


# ---- tokenizer


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS) - len(TAG_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in TAG_TOKENS])
    return tokenizer


# ---- model


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Layer(torch.nn.Module):
    """One decoder layer; every expert computes every token, the router's weights pick the sum."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        hidden, head = dims.hidden_size, dims.head_dim
        self.num_q = dims.num_attention_heads * head
        self.num_kv = dims.num_key_value_heads * head
        inner = dims.num_experts * dims.moe_intermediate_size
        depth = 1 / math.sqrt(2 * dims.num_hidden_layers)

        def weight(rows: int, columns: int, scale: float = 1.0) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(rows, columns) * 0.03 * scale)

        self.attention_norm = torch.nn.Parameter(torch.ones(hidden))
        self.mlp_norm = torch.nn.Parameter(torch.ones(hidden))
        self.q_norm = torch.nn.Parameter(torch.ones(head))
        self.k_norm = torch.nn.Parameter(torch.ones(head))
        self.qkv = weight(self.num_q + 2 * self.num_kv, hidden)
        self.output = weight(hidden, self.num_q, depth)
        self.router = weight(dims.num_experts, hidden)
        self.gate_up = weight(2 * inner, hidden)
        self.down = weight(hidden, inner, depth)

    def attend(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        dims = self.dims
        split = (self.num_q, self.num_kv, self.num_kv)
        q, k, v = (
            part.view(batch, length, -1, dims.head_dim).transpose(1, 2)
            for part in F.linear(x, self.qkv).split(split, dim=-1)
        )
        q = rotate(rms_norm(q, self.q_norm, dims.rms_norm_eps), cos, sin).to(v.dtype)
        k = rotate(rms_norm(k, self.k_norm, dims.rms_norm_eps), cos, sin).to(v.dtype)
        group = dims.num_attention_heads // dims.num_key_value_heads
        k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), self.output)

    def experts(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dims = self.dims
        probabilities = F.linear(x, self.router).float().softmax(-1)
        top, chosen = probabilities.topk(dims.num_experts_per_tok, dim=-1)
        picked = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0)
        shares = probabilities * picked / top.sum(-1, keepdim=True)
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        inner = (F.silu(gate) * up).unflatten(-1, (dims.num_experts, -1))
        inner = (inner * shares.unsqueeze(-1)).to(gate.dtype).flatten(-2)
        load = picked.mean((0, 1)) / dims.num_experts_per_tok
        balance = dims.num_experts * (load * probabilities.mean((0, 1))).sum()
        return F.linear(inner, self.down), balance

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        eps = self.dims.rms_norm_eps
        x = x + self.attend(rms_norm(x, self.attention_norm, eps), cos, sin)
        mixed, balance = self.experts(rms_norm(x, self.mlp_norm, eps))
        return x + mixed, balance


class Model(torch.nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.embedding = torch.nn.Parameter(torch.randn(dims.vocab_size, dims.hidden_size) * 0.03)
        self.layers = torch.nn.ModuleList(Layer(dims) for _ in range(dims.num_hidden_layers))
        self.final_norm = torch.nn.Parameter(torch.ones(dims.hidden_size))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [sequence, position, vocab] and the balance loss."""
        steps = torch.arange(0, self.dims.head_dim, 2).float() / self.dims.head_dim
        angles = torch.outer(torch.arange(ids.shape[1]).float(), self.dims.rope_theta**-steps)
        cos, sin = angles.cos(), angles.sin()
        x = F.embedding(ids, self.embedding)
        balance = x.new_zeros(())
        for layer in self.layers:
            x, loss = layer(x, cos, sin)
            balance = balance + loss
        x = rms_norm(x, self.final_norm, self.dims.rms_norm_eps)
        return F.linear(x, self.embedding), balance / len(self.layers)

    def loss(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean cross-entropy of positions 1.. and the balance loss."""
        logits, balance = self(ids[:, :-1])
        targets = ids[:, 1:].flatten()
        return F.cross_entropy(logits.flatten(0, 1).float(), targets), balance


def to_checkpoint(model: Model) -> dict[str, torch.Tensor]:
    """The weights in bf16 under the names of the published Qwen3-MoE checkpoints."""
    found = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.final_norm}
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        prefix = f"model.layers.{index}"
        q, k, v = layer.qkv.split((layer.num_q, layer.num_kv, layer.num_kv))
        attention = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": layer.output}
        attention |= {"q_norm": layer.q_norm, "k_norm": layer.k_norm}
        for name, tensor in attention.items():
            found[f"{prefix}.self_attn.{name}.weight"] = tensor
        found[f"{prefix}.input_layernorm.weight"] = layer.attention_norm
        found[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm
        found[f"{prefix}.mlp.gate.weight"] = layer.router
        gate, up = layer.gate_up.chunk(2)
        width = model.dims.moe_intermediate_size
        for expert in range(model.dims.num_experts):
            rows = slice(expert * width, (expert + 1) * width)
            parts = {"gate_proj": gate[rows], "up_proj": up[rows], "down_proj": layer.down[:, rows]}
            for name, tensor in parts.items():
                found[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = tensor
    return {k: v.detach().to(torch.bfloat16).clone().contiguous() for k, v in found.items()}


@torch.no_grad()
def heldout_loss(model: Model, ids: list[int]) -> tuple[float, int]:
    """Mean cross-entropy per predicted token, in float32 with the weights rounded to bf16."""
    rounded = Model(model.dims)
    rounded.load_state_dict({k: v.to(torch.bfloat16) for k, v in model.state_dict().items()})
    total, count = 0.0, 0
    for start in range(0, len(ids), WINDOW):
        window = torch.tensor([ids[start : start + WINDOW]])
        if (predicted := window.shape[1] - 1) > 0:
            total += rounded.loss(window)[0].item() * predicted
            count += predicted
    return total / count, count


# ---- training


class Stream:
    """Endless shuffled windows of the tokenised epochs; the same order on every run."""

    def __init__(self, sources: list[corpus.Source], tokenizer: Tokenizer) -> None:
        self.sources = sources
        self.tokenizer = tokenizer
        self.render = corpus.load_render(TEMPLATE)
        training = [source for source in sources if not source.is_heldout]
        self.known = [d for source in training for d in corpus.definitions(source)]
        self.known += corpus.compiled_definitions()
        self.epoch = 0
        self.unused = np.empty(0, np.int64)  # tokens of this epoch not yet handed out

    def tokens(self, epoch: int) -> np.ndarray:
        texts = corpus.documents(self.sources, self.known, epoch, self.render)
        end = [self.tokenizer.token_to_id(corpus.SEPARATOR)]
        encoded = self.tokenizer.encode_batch(texts)
        flat = np.concatenate([np.array(e.ids + end, np.int64) for e in encoded])
        # Windows of the longest length in random order: a step sees many files at once.
        longest = PHASES[-1][2]
        generator = np.random.default_rng(epoch)
        flat = np.roll(flat, int(generator.integers(len(flat))))
        rows = flat[: len(flat) // longest * longest].reshape(-1, longest)
        return generator.permutation(rows).reshape(-1)

    def batch(self, sequences: int, length: int) -> torch.Tensor:
        wanted = sequences * length
        while len(self.unused) < wanted:
            self.unused = np.concatenate((self.unused, self.tokens(self.epoch)))
            self.epoch += 1
        taken, self.unused = self.unused[:wanted], self.unused[wanted:]
        return torch.from_numpy(taken.reshape(sequences, length))
