"""Qwen3 and Qwen3-MoE as a list of ops; reads like the forward pass.

    delta = embedding(token)
    per layer:  residual += delta
                delta = o_proj(attention(qkv(norm(residual))))
                residual += delta
                delta = experts(norm(residual))        (a dense MLP is one expert for every row)
    logits = lm_head(norm(residual + delta))           (wanted rows only)

With several sockets each computes its shard of every product; a delta then is one share per socket,
and the norm that follows adds up the shares in the order of the sockets.
"""

from __future__ import annotations

from dataclasses import dataclass

from ellm_kernels.attention import attention_scratch_bytes
from ellm_kernels.attention_decode import decode_pieces_bytes, decode_scratch_bytes
from ellm_kernels.experts import SCRATCH_BYTES, group_bytes
from ellm_kernels.kv_layout import CHUNK
from ellm_serve.graph.attention_op import Attention
from ellm_serve.graph.kv_tensor import KVShape
from ellm_serve.graph.ops import AllRows, Embed, Experts, Linear, Op, RmsNorm, Router
from ellm_serve.graph.tensor import Arena, Exchange, Mode, Per, Tensor, bf16_rows, f32_rows
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.sharding import Shard
from ellm_serve.model.weights import LayerPlaces, WeightLayout


@dataclass(frozen=True, slots=True)
class Bases:
    """Addresses that become known when memory exists; all 0 for a plan."""

    weights: int = 0
    kv: int = 0
    cos: int = 0
    sin: int = 0


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Where the tensors lie that sockets share, for one mode; all 0 in a plan."""

    attention: Exchange = Exchange()
    mlp: Exchange = Exchange()
    logits: Exchange = Exchange()


class Activations:
    """The tensors of one socket's share of a model, and the arenas that hold them."""

    def __init__(self, shard: Shard) -> None:
        config = shard.local
        self._config = config
        self._width = shard.vocabulary_width * shard.count
        experts, top_k = max(config.num_experts, 1), max(config.num_experts_per_tok, 1)
        widest = max(
            config.moe_intermediate_size * top_k,
            0 if all(config.moe_layers) else config.intermediate_size,
        )
        self.residual = f32_rows("residual", config.hidden_size, local=True)
        self.normed = bf16_rows("normed", config.hidden_size, local=True)
        self.qkv = f32_rows("qkv", config.q_size + 2 * config.kv_size)
        self.q = bf16_rows("q", config.q_size, only=Mode.MANY)
        self.attended = bf16_rows("attended", config.q_size)
        self.attention_delta = f32_rows("attention_delta", config.hidden_size)
        self.mlp_delta = f32_rows("mlp_delta", config.hidden_size)
        self.router_logits = f32_rows("router_logits", experts)
        self.expert_ids = Tensor("expert_ids", 4 * top_k, local=True)
        self.expert_weights = Tensor("expert_weights", 4 * top_k, local=True)
        # Each assignment's activated row is padded to whole panels.
        self.activated = Tensor("activated", 2 * (widest + 64 * top_k))
        self.last_normed = bf16_rows("last_normed", config.hidden_size, Per.LOGIT_ROW, local=True)
        self.logits = Tensor("logits", 4 * self._width, Per.LOGIT_ROW)

    def sized(self, num_rows: int, sequence_length: int) -> list[Tensor]:
        """The socket's own tensors, those included whose size is not a multiple of the rows."""
        config = self._config
        experts, top_k = max(config.num_experts, 1), max(config.num_experts_per_tok, 1)
        d = config.head_dim
        chunks = num_rows * -(-sequence_length // CHUNK)
        scratch = max(attention_scratch_bytes(d), decode_scratch_bytes(d), SCRATCH_BYTES)
        pieces = decode_pieces_bytes(chunks, config.num_heads, d)
        return [
            self.residual, self.normed, self.qkv, self.q, self.attended, self.router_logits,
            self.expert_ids, self.expert_weights, self.activated, self.last_normed,
            Tensor(GROUP.name, group_bytes(experts, num_rows * top_k), Per.STEP, local=True),
            Tensor(COUNTS.name, 4 * experts, Per.THREAD),
            Tensor(SCRATCH.name, scratch, Per.THREAD),
            Tensor(PIECES.name, -(-pieces // num_rows), only=Mode.FEW),
        ]  # fmt: skip

    def arena(
        self,
        mode: Mode,
        rows: int,
        logit_rows: int,
        threads: int,
        length: int,
        base: int = 0,
        exchanges: Exchanges | None = None,
    ) -> Arena:
        """An arena of a mode with every tensor in it."""
        arena = Arena(mode, rows, logit_rows, threads, base)
        for tensor in self.sized(rows, length):
            arena.add(tensor)
        exchanges = exchanges or Exchanges()
        arena.share(self.attention_delta, exchanges.attention)
        arena.share(self.mlp_delta, exchanges.mlp)
        arena.share(self.logits, exchanges.logits)
        return arena


# Tensors that ops know by name only; their sizes depend on the arena.
GROUP = Tensor("group", 0)
COUNTS = Tensor("counts", 0)
SCRATCH = Tensor("scratch", 0)
PIECES = Tensor("pieces", 0)


def build_qwen3(
    shard: Shard, layout: WeightLayout, kv: KVShape, bases: Bases
) -> tuple[list[Op], Activations]:
    """The ops of one forward pass on one socket, in order."""
    config, held = shard.local, shard.vocabulary
    a = Activations(shard)
    w = bases.weights
    table = layout.embedding or layout.lm_head
    ops: list[Op] = [
        Embed("embed", w + table.offset, layout.embedding is None, config.hidden_size, held.begin,
              held.size, a.mlp_delta)
    ]  # fmt: skip
    for index, layer in enumerate(layout.layers):
        ops += _attention_ops(config, layer, kv, bases, a, index)
        ops += _mlp_ops(shard, layer, w, a, index)
    norm = layout.final_norm
    ops.append(
        RmsNorm("final_norm", a.residual, a.mlp_delta, w + norm.offset, config.rms_norm_eps,
                config.hidden_size, a.last_normed, last=True)
    )  # fmt: skip
    ops.append(
        Linear("lm_head", a.last_normed, w + layout.lm_head.offset, config.hidden_size, held.size,
               a.logits, last=True, shared=True)
    )  # fmt: skip
    return ops, a


def _attention_ops(
    config: ModelConfig, layer: LayerPlaces, kv: KVShape, bases: Bases, a: Activations, index: int
) -> list[Op]:
    w, eps, hidden = bases.weights, config.rms_norm_eps, config.hidden_size
    return [
        RmsNorm(f"{index}.input_norm", a.residual, a.mlp_delta, w + layer.input_norm.offset, eps,
                hidden, a.normed, fresh=index == 0),
        Linear(f"{index}.qkv", a.normed, w + layer.qkv.offset, hidden, layer.qkv.outputs, a.qkv),
        Attention(
            f"{index}.attention", a.qkv, w + layer.q_norm.offset, w + layer.k_norm.offset, eps,
            bases.cos, bases.sin, kv, bases.kv, index, config.num_heads, a.q, PIECES, SCRATCH,
            a.attended,
        ),
        Linear(f"{index}.o_proj", a.attended, w + layer.o_proj.offset, config.q_size, hidden,
               a.attention_delta, shared=True),
    ]  # fmt: skip


def _mlp_ops(shard: Shard, layer: LayerPlaces, w: int, a: Activations, index: int) -> list[Op]:
    config, experts = shard.local, layer.experts
    hidden = config.hidden_size
    norm = RmsNorm(f"{index}.post_norm", a.residual, a.attention_delta,
                   w + layer.post_norm.offset, config.rms_norm_eps, hidden, a.normed)  # fmt: skip
    top_k = config.num_experts_per_tok if layer.router else 1
    mlp = Experts(
        f"{index}.experts" if layer.router else f"{index}.mlp", a.normed,
        w + experts.up.offset, w + experts.down.offset, hidden, experts.intermediate,
        experts.num_experts, top_k, GROUP, a.activated, SCRATCH, a.mlp_delta,
        experts.num_experts / config.num_experts if layer.router else 1.0,
    )  # fmt: skip
    if layer.router is None:
        return [norm, AllRows(f"{index}.all_rows", GROUP), mlp]
    return [
        norm,
        Linear(f"{index}.router", a.normed, w + layer.router.offset, hidden, config.num_experts,
               a.router_logits),
        Router(f"{index}.route", a.router_logits, config.num_experts, shard.experts, top_k,
               config.norm_topk_prob, a.expert_ids, a.expert_weights, GROUP, COUNTS),
        mlp,
    ]  # fmt: skip
