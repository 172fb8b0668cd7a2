"""The attention op: q/k norm, rotary embedding, KV write and causal attention of one layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ellm_kernels import opcodes as oc
from ellm_serve.graph.kv_tensor import KVShape
from ellm_serve.graph.ops import Load, Row, Stage, float_bits
from ellm_serve.graph.tensor import Tensor

# The context for which the table holds the rows of an attention part.
_PART_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Attention:
    """attended[rows, heads · head_dim] from qkv; keys and values go to the KV tensor.

    Few rows: one phase, cut along the sequence over all threads. Many rows: rows first write their
    keys and values, then tiles of queries are computed in any order.
    """

    name: str
    qkv: Tensor
    q_norm: int
    k_norm: int
    eps: float
    cos: int
    sin: int
    kv: KVShape
    kv_base: int
    layer: int
    num_heads: int
    q: Tensor
    pieces: Tensor
    scratch: Tensor
    out: Tensor

    def dims(self) -> str:
        return f"{self.num_heads}/{self.kv.num_kv_heads} heads × {self.kv.head_dim}"

    def flops(self, load: Load) -> float:
        return 4.0 * self.num_heads * self.kv.head_dim * load.context * load.rows

    def bytes(self, load: Load) -> float:
        # A prefill block reads its slot's keys and values once per tile of rows from cache; from
        # memory about once.
        slots = load.rows if load.logit_rows == load.rows else 1
        return 4.0 * self.kv.num_kv_heads * self.kv.head_dim * load.context * slots

    def _args(self, stage: Stage) -> dict[str, int]:
        arena = stage.arena
        qkv, out, scratch = arena[self.qkv], arena[self.out], arena[self.scratch]
        kv = self.kv
        return {
            "qkv": qkv.address, "qkv_stride": qkv.row_bytes, "q_norm": self.q_norm,
            "k_norm": self.k_norm, "cos": self.cos, "sin": self.sin,
            "eps": float_bits(self.eps),
            "query_scale": float_bits(math.log2(math.e) / math.sqrt(kv.head_dim)),
            "kv_base": self.kv_base, "slot_stride": kv.slot_bytes,
            "chunk_stride": kv.chunk_bytes, "layer_stride": kv.layer_bytes,
            "head_stride": kv.head_bytes, "layer": self.layer, "num_heads": self.num_heads,
            "num_kv_heads": kv.num_kv_heads, "head_dim": kv.head_dim,
            "q": 0 if stage.few else arena[self.q].address, "out": out.address,
            "scratch": scratch.address, "scratch_private": scratch.private,
            "pieces": arena[self.pieces].address if stage.few else 0,
        }  # fmt: skip

    def lower(self, stage: Stage) -> list[Row]:
        args = self._args(stage)
        if stage.few:
            # Only when a slot has several rows must all their keys be there before any is read.
            write_first = Row(oc.ROPE, oc.SYNC | oc.SHARED_SLOTS, args)
            return [write_first, Row(oc.ATTEND_FEW, oc.SYNC, args)]
        row_flops = 4.0 * self.num_heads * self.kv.head_dim * _PART_CONTEXT
        part = max(1, int(stage.part_flops / row_flops))
        return [Row(oc.ROPE, oc.SYNC, args), Row(oc.ATTEND_MANY, oc.SYNC, args, part)]
