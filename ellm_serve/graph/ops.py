"""The ops a model's program is made of.

Each is a frozen value that knows its tensors and weights, what it costs (`flops`, `bytes`) and how
it is lowered to rows of the interpreter's table. `Stage` carries what lowering needs besides: the
mode, the arena and the number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ellm_kernels import opcodes as oc
from ellm_kernels.tiles import num_panels, num_up_panels, padded
from ellm_serve.graph.tensor import Arena, Mode, Tensor
from ellm_serve.model.sharding import Part


@dataclass(frozen=True, slots=True)
class Load:
    """The size of a step for which an op's cost is asked: rows, mean context, logit rows."""

    rows: int
    context: int
    logit_rows: int


@dataclass(frozen=True, slots=True)
class Stage:
    """What lowering needs to know. `part_flops`: work between two yield points of a prefill."""

    arena: Arena
    num_threads: int
    part_flops: float

    @property
    def few(self) -> bool:
        return self.arena.mode is Mode.FEW

    def part_rows(self, flops_per_row: float) -> int:
        """Rows whose work fills one part; 0: the op is not cut."""
        if self.few or flops_per_row * self.arena.num_rows <= self.part_flops:
            return 0
        return max(1, int(self.part_flops / flops_per_row))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table, arguments by name."""

    opcode: int
    flags: int
    args: Mapping[str, int]
    part_rows: int = 0

    def words(self) -> list[int]:
        """The int64 words of the row."""
        names = oc.ARGS[self.opcode]
        assert set(names) == set(self.args), (self.opcode, set(names) ^ set(self.args))
        words = [self.opcode, self.flags, self.part_rows, *(self.args[name] for name in names)]
        return words + [0] * (oc.OP_WORDS - len(words))


class Op(Protocol):
    """What all ops have in common."""

    @property
    def name(self) -> str: ...

    def dims(self) -> str:
        """Dimensions for people."""
        ...

    def flops(self, load: Load) -> float:
        """Arithmetic of a step; a multiply-add counts as two."""
        ...

    def bytes(self, load: Load) -> float:
        """Bytes of weights and KV that a step must read."""
        ...

    def lower(self, stage: Stage) -> list[Row]:
        """Rows of the table."""
        ...


def float_bits(value: float) -> int:
    """A float32 in the lower half of a word."""
    return int(np.float32(value).view(np.uint32))


def _runs(count: int, run: int) -> int:
    return -(-count // run)


@dataclass(frozen=True, slots=True)
class Embed:
    """The embeddings of the token ids this socket holds; zeros for the others."""

    name: str
    table: int
    packed: bool
    hidden: int
    first_token: int
    num_tokens: int
    out: Tensor

    def dims(self) -> str:
        return f"[rows] → [rows, {self.hidden}]"

    def flops(self, load: Load) -> float:
        return 0.0

    def bytes(self, load: Load) -> float:
        return load.rows * self.hidden * 2.0

    def lower(self, stage: Stage) -> list[Row]:
        args = {
            "table": self.table, "hidden": self.hidden, "first_token": self.first_token,
            "num_tokens": self.num_tokens, "out": stage.arena[self.out].address,
        }  # fmt: skip
        flags = oc.SYNC | oc.ALL_TEAMS
        return [Row(oc.EMBED_PACKED if self.packed else oc.EMBED, flags, args)]


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """residual += all sockets' shares of delta; out = RMSNorm(residual) · weight.

    `fresh`: the residual starts here. `last`: only the rows whose logits are wanted, closed up.
    """

    name: str
    residual: Tensor
    delta: Tensor
    weight: int
    eps: float
    hidden: int
    out: Tensor
    fresh: bool = False
    last: bool = False

    def dims(self) -> str:
        return f"[{'logit ' if self.last else ''}rows, {self.hidden}]"

    def flops(self, load: Load) -> float:
        return 4.0 * self.hidden * (load.logit_rows if self.last else load.rows)

    def bytes(self, load: Load) -> float:
        return 4.0 * self.hidden

    def lower(self, stage: Stage) -> list[Row]:
        residual, out = stage.arena[self.residual], stage.arena[self.out]
        shares = stage.arena.exchange(self.delta)
        args = {
            "residual": residual.address, "residual_private": residual.private,
            "delta": shares.base, "delta_stride": shares.stride, "num_deltas": shares.count,
            "fresh": int(self.fresh), "weight": self.weight, "eps": float_bits(self.eps),
            "hidden": self.hidden, "out": out.address, "out_private": out.private,
        }  # fmt: skip
        flags = oc.PRIVATE if stage.few else oc.SYNC
        return [Row(oc.LAST_NORM if self.last else oc.NORM, flags, args)]


@dataclass(frozen=True, slots=True)
class Linear:
    """out[rows, outputs] = x[rows, inputs] · weightᵀ. `shared`: other sockets read out."""

    name: str
    x: Tensor
    weight: int
    inputs: int
    outputs: int
    out: Tensor
    last: bool = False
    shared: bool = False

    def dims(self) -> str:
        rows = "logit rows" if self.last else "rows"
        return f"[{rows}, {self.inputs}] · [{self.inputs}, {self.outputs}]"

    def flops(self, load: Load) -> float:
        return 2.0 * self.inputs * self.outputs * (load.logit_rows if self.last else load.rows)

    def bytes(self, load: Load) -> float:
        return 2.0 * self.inputs * self.outputs if (load.logit_rows or not self.last) else 0.0

    def lower(self, stage: Stage) -> list[Row]:
        x, out = stage.arena[self.x], stage.arena[self.out]
        rows = stage.arena.num_logit_rows if self.last else stage.arena.num_rows
        # A run of rows is a unit of work; rows stream past a panel that stays in cache.
        run = rows if stage.few else min(256, rows)
        panels = num_panels(self.outputs)
        args = {
            "x": x.address, "x_private": x.private, "x_stride": x.row_bytes,
            "weight": self.weight, "num_pairs": self.inputs // 2, "panels": panels,
            "out": out.address, "out_stride": out.row_bytes, "of_logit_rows": int(self.last),
            "row_run": run,
        }  # fmt: skip
        part = 0 if self.last else stage.part_rows(2.0 * self.inputs * self.outputs)
        flags = oc.SYNC | (oc.ALL_TEAMS if self.shared else 0)
        return [Row(oc.LINEAR, flags, args, part)]


@dataclass(frozen=True, slots=True)
class Router:
    """Top-k of the softmax over all experts, then the rows of every expert this socket holds."""

    name: str
    logits: Tensor
    num_experts: int
    held: Part
    top_k: int
    renormalise: bool
    ids: Tensor
    weights: Tensor
    group: Tensor
    counts: Tensor

    def dims(self) -> str:
        return f"[rows, {self.num_experts}] → top {self.top_k}"

    def flops(self, load: Load) -> float:
        return 20.0 * self.num_experts * load.rows

    def bytes(self, load: Load) -> float:
        return 0.0

    def lower(self, stage: Stage) -> list[Row]:
        arena = stage.arena
        logits, ids, weights, group, counts = (
            arena[tensor]
            for tensor in (self.logits, self.ids, self.weights, self.group, self.counts)
        )
        flags = oc.PRIVATE if stage.few else oc.SYNC
        chosen = {
            "ids": ids.address, "ids_private": ids.private, "weights": weights.address,
            "weights_private": weights.private, "top_k": self.top_k,
        }  # fmt: skip
        route = chosen | {
            "num_experts": self.num_experts,
            "logits": logits.address, "logits_stride": logits.row_bytes,
            "renormalise": int(self.renormalise),
        }  # fmt: skip
        grouped = chosen | {
            "first_expert": self.held.begin, "num_experts": self.held.size,
            "group": group.address, "group_private": group.private, "counts": counts.address,
            "counts_private": counts.private,
        }  # fmt: skip
        return [Row(oc.ROUTE, flags, route), Row(oc.GROUP, flags, grouped)]


@dataclass(frozen=True, slots=True)
class AllRows:
    """The group of a dense MLP: every row goes to the one expert."""

    name: str
    group: Tensor

    def dims(self) -> str:
        return "[rows]"

    def flops(self, load: Load) -> float:
        return 0.0

    def bytes(self, load: Load) -> float:
        return 0.0

    def lower(self, stage: Stage) -> list[Row]:
        group = stage.arena[self.group]
        args = {"group": group.address, "group_private": group.private}
        return [Row(oc.GROUP_ALL, oc.PRIVATE if stage.few else oc.SYNC, args)]


@dataclass(frozen=True, slots=True)
class Experts:
    """This socket's share of Σ over a row's experts of weight · down(SiLU(gate(x)) · up(x)).

    `num_experts` are those held here, `share` is their part of all.
    """

    name: str
    x: Tensor
    up_weight: int
    down_weight: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    group: Tensor
    activated: Tensor
    scratch: Tensor
    out: Tensor
    share: float = 1.0

    def dims(self) -> str:
        experts = f"{self.top_k} of {self.num_experts}"
        return f"[rows, {self.hidden}] · {experts} × 3 × {self.intermediate}"

    def flops(self, load: Load) -> float:
        return 6.0 * self.hidden * self.intermediate * self.top_k * self.share * load.rows

    def bytes(self, load: Load) -> float:
        unused = (1.0 - self.top_k * self.share / self.num_experts) ** load.rows
        return 6.0 * self.hidden * self.intermediate * self.num_experts * (1.0 - unused)

    def lower(self, stage: Stage) -> list[Row]:
        return [self._up(stage), self._down(stage)]

    def _up(self, stage: Stage) -> Row:
        x, scratch = stage.arena[self.x], stage.arena[self.scratch]
        group, activated = stage.arena[self.group], stage.arena[self.activated]
        rows = stage.arena.num_rows
        panels = num_up_panels(self.intermediate)
        panel_run, row_run = (1, rows) if stage.few else (min(8, panels), min(256, rows))
        args = {
            "x": x.address, "x_private": x.private, "x_stride": x.row_bytes,
            "weight": self.up_weight, "num_pairs": self.hidden // 2, "panels": panels,
            "num_experts": self.num_experts, "group": group.address,
            "group_private": group.private, "top_k": self.top_k, "panel_run": panel_run,
            "row_run": row_run, "hidden": activated.address,
            "hidden_stride": 2 * padded(self.intermediate), "scratch": scratch.address,
            "scratch_private": scratch.private,
        }  # fmt: skip
        part = stage.part_rows(self.flops(Load(1, 0, 0)) * 2 / 3)
        return Row(oc.EXPERTS_UP, oc.SYNC, args, part)

    def _down(self, stage: Stage) -> Row:
        out, scratch = stage.arena[self.out], stage.arena[self.scratch]
        group, activated = stage.arena[self.group], stage.arena[self.activated]
        panels = num_panels(self.hidden)
        # An expert's rows are read from cache for all panels of an item: 1 panel 0.64 of the bf16
        # peak, 4 panels 0.73, 8 no more. But every thread should have a few items.
        panel_run = 1 if stage.few else max(1, min(4, panels // (4 * stage.num_threads)))
        args = {
            "hidden": activated.address, "hidden_stride": 2 * padded(self.intermediate),
            "weight": self.down_weight, "num_pairs": self.intermediate // 2, "panels": panels,
            "num_experts": self.num_experts, "group": group.address,
            "group_private": group.private, "panel_run": panel_run, "out": out.address,
            "out_stride": out.row_bytes, "scratch": scratch.address,
            "scratch_private": scratch.private,
        }  # fmt: skip
        part = stage.part_rows(self.flops(Load(1, 0, 0)) / 3)
        return Row(oc.EXPERTS_DOWN, oc.SYNC | oc.ALL_TEAMS, args, part)
