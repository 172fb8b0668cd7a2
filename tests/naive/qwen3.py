"""Qwen3 and Qwen3-MoE in plain numpy: the arithmetic this engine promises, and nothing else.

`bf16` marks every place where the engine rounds: weight matrices, the operands of each product, and
attention's probabilities. All else is float32: sums, residual stream, scores, router, logits. No
cache, no blocks, no threads: one prompt in, logits of every position out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ellm_serve.model.config import ModelConfig
from ellm_serve.model.rope import rope_frequencies
from tests.naive import ops
from tests.tiny_models import load_float32, store, widen

F32 = NDArray[np.float32]
CHUNK = 512  # positions whose probabilities share one maximum


def bf16(x: NDArray[np.floating]) -> F32:
    """Rounded to the nearest bf16, ties to even."""
    return widen(store(x, "bf16"))


def f32(x: NDArray[np.floating]) -> F32:
    return x.astype(np.float32)


@dataclass(frozen=True)
class Qwen3:
    """A checkpoint and its dimensions. `scores`: the last prompt's router logits, by layer."""

    config: ModelConfig
    weights: Mapping[str, F32]
    scores: list[F32] = field(default_factory=list)

    @classmethod
    def load(cls, directory: Path) -> Qwen3:
        return cls(ModelConfig.from_dir(directory), load_float32(directory))

    def logits(self, token_ids: tuple[int, ...]) -> F32:
        """[position, vocab]"""
        self.scores.clear()
        positions = np.arange(len(token_ids))
        residual = bf16(self.weights["model.embed_tokens.weight"])[list(token_ids)]
        for layer in range(self.config.num_layers):
            prefix = f"model.layers.{layer}."
            x = self._norm(residual, f"{prefix}input_layernorm")
            residual = residual + self._attention(x, f"{prefix}self_attn.", positions)
            x = self._norm(residual, f"{prefix}post_attention_layernorm")
            if self.config.moe_layers[layer]:
                residual = residual + self._experts(x, f"{prefix}mlp.")
            else:
                residual = residual + self._mlp(x, f"{prefix}mlp.")
        tied = self.config.tie_word_embeddings
        head = "model.embed_tokens" if tied else "lm_head"
        return self._linear(self._norm(residual, "model.norm"), head)

    def routing_gaps(self, token_ids: tuple[int, ...]) -> F32:
        """Per position, by how much of the router logits' deviation the last chosen expert beat
        the next one, least of all layers: how near another rounding is to another choice."""
        self.logits(token_ids)
        gaps = np.full(len(token_ids), np.inf, np.float32)
        for scores in self.scores:
            best = np.sort(scores, axis=1)[:, ::-1]
            last = self.config.num_experts_per_tok - 1
            gaps = np.minimum(gaps, (best[:, last] - best[:, last + 1]) / scores.std())
        return gaps

    def _linear(self, x: F32, name: str) -> F32:
        """x · weightᵀ; x has been rounded by whoever made it.

        The sum is exact before it is rounded to float32, so it does not depend on numpy's order.
        """
        return f32(ops.multiply_block(x, bf16(self.weights[f"{name}.weight"]).T))

    def _norm(self, x: F32, name: str) -> F32:
        weight = self.weights[f"{name}.weight"]
        return bf16(ops.rms_norm_rows(x, weight, self.config.rms_norm_eps))

    # --- attention -------------------------------------------------------------------------------

    def _attention(self, x: F32, prefix: str, positions: NDArray[np.int64]) -> F32:
        config = self.config
        q = self._heads(x, f"{prefix}q_proj", config.num_heads)  # [row, head, dim]
        k = self._heads(x, f"{prefix}k_proj", config.num_kv_heads)
        v = bf16(self._heads(x, f"{prefix}v_proj", config.num_kv_heads))
        # The softmax scale and the change to powers of two are part of the rounded query.
        scale = np.float32(math.log2(math.e) / math.sqrt(config.head_dim))
        q = bf16(self._rotate(q, f"{prefix}q_norm", positions) * scale)
        k = bf16(self._rotate(k, f"{prefix}k_norm", positions))
        shared = config.num_heads // config.num_kv_heads
        heads = [
            attend(q[:, head], k[:, head // shared], v[:, head // shared])
            for head in range(config.num_heads)
        ]
        return self._linear(bf16(np.concatenate(heads, axis=1)), f"{prefix}o_proj")

    def _heads(self, x: F32, name: str, count: int) -> F32:
        return self._linear(x, name).reshape(len(x), count, self.config.head_dim)

    def _rotate(self, x: F32, norm: str, positions: NDArray[np.int64]) -> F32:
        """RMSNorm of every head, then the rotary embedding."""
        config = self.config
        frequencies, factor = rope_frequencies(config.rope, config.head_dim)
        angles = f32(positions[:, None] * frequencies)[:, None]  # [row, 1, pair]
        normed = ops.rms_norm_rows(x, self.weights[f"{norm}.weight"], config.rms_norm_eps)
        return f32(ops.rotate_half(normed, np.cos(angles) * factor, np.sin(angles) * factor))

    # --- MLP -------------------------------------------------------------------------------------

    def _mlp(self, x: F32, prefix: str, weights: F32 | float = 1.0) -> F32:
        """down(weight · SiLU(gate) · up): scaling before the product is the same as after it."""
        gate, up = self._linear(x, f"{prefix}gate_proj"), self._linear(x, f"{prefix}up_proj")
        hidden = f32(gate / (1 + np.exp(-gate)) * up * weights)
        return self._linear(bf16(hidden), f"{prefix}down_proj")

    def _experts(self, x: F32, prefix: str) -> F32:
        """Each row's experts, added up in the order of their ids."""
        config = self.config
        scores = self._linear(x, f"{prefix}gate")
        self.scores.append(scores)
        ids, weights = ops.route_rows(scores, config.num_experts_per_tok, config.norm_topk_prob)
        out = np.zeros_like(x)
        for expert in range(config.num_experts):
            rows, places = np.nonzero(ids == expert)
            if len(rows):
                chosen = f32(weights[rows, places])[:, None]
                out[rows] += self._mlp(x[rows], f"{prefix}experts.{expert}.", chosen)
        return out


def attend(q: F32, keys: F32, values: F32) -> F32:
    """Causal attention of one head, [row, dim] each; scores are exponents of two.

    Every chunk of positions has its own maximum m, sum l of probabilities and output o made of
    rounded probabilities; chunks are then put together in order.
    """
    rows = np.arange(len(q))
    m, total, out = np.full(len(q), -np.inf, np.float32), np.zeros(len(q)), np.zeros_like(q)
    for first in range(0, len(keys), CHUNK):
        seen = rows >= first  # rows that see anything of this chunk
        part = slice(first, first + CHUNK)
        scores = q[seen] @ keys[part].T
        hidden = rows[seen][:, None] < np.arange(first, min(first + CHUNK, len(keys)))
        scores[hidden] = -np.inf
        largest = scores.max(1)
        p = np.exp2(scores - largest[:, None])
        both = np.maximum(m[seen], largest)
        old, new = np.exp2(m[seen] - both), np.exp2(largest - both)
        total[seen] = total[seen] * old + p.sum(1) * new
        out[seen] = out[seen] * old[:, None] + (bf16(p) @ values[part]) * new[:, None]
        m[seen] = both
    return f32(out / total[:, None])
