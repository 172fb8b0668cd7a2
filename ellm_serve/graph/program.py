"""A model lowered to the table of the interpreter, and what its ops cost on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ellm_kernels import opcodes as oc
from ellm_serve.graph.ops import Load, Op, Row, Stage
from ellm_serve.graph.tensor import Arena, Mode


@dataclass(frozen=True, slots=True)
class Table:
    """The lowered program of one mode; `op_of_row[i]` is the index of the op row i came from."""

    mode: Mode
    words: NDArray[np.int64]
    op_of_row: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return len(self.op_of_row)

    @property
    def num_barriers(self) -> int:
        """Times per step that all threads wait for each other."""
        flags = self.words[:, 1]
        always = (flags & oc.SYNC != 0) & (flags & oc.SHARED_SLOTS == 0)
        return int(always.sum())


def lower(ops: Sequence[Op], arena: Arena, part_flops: float) -> Table:
    """The table of a mode: every op's rows, in order."""
    stage = Stage(arena, arena.num_threads, part_flops)
    rows: list[Row] = []
    op_of_row: list[int] = []
    for index, op in enumerate(ops):
        lowered = op.lower(stage)
        rows += lowered
        op_of_row += [index] * len(lowered)
    words = np.array([row.words() for row in rows], np.int64)  # [row, word]
    return Table(arena.mode, words, tuple(op_of_row))


@dataclass(frozen=True, slots=True)
class OpCost:
    """One op in the plan: its work, the time the machine's ceilings allow, and the time it took."""

    name: str
    dims: str
    flops: float
    bytes: float
    predicted_s: float
    measured_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the machine can do: bytes read per second and bf16 operations per second."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, flops: float, num_bytes: float) -> float:
        """The least time for this work, whichever limit binds."""
        return max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)


def cost(
    ops: Sequence[Op],
    load: Load,
    ceiling: Ceiling,
    measured_s: Sequence[float] | None = None,
) -> list[OpCost]:
    """Every op's cost for a step of this size."""
    return [
        OpCost(
            op.name, op.dims(), op.flops(load), op.bytes(load),
            ceiling.seconds(op.flops(load), op.bytes(load)),
            measured_s[index] if measured_s is not None else None,
        )
        for index, op in enumerate(ops)
    ]  # fmt: skip


def roofline_s(ops: Sequence[Op], load: Load, ceiling: Ceiling) -> float:
    """The least time of a whole step: max of all bytes over bandwidth and all flops over peak."""
    flops = sum(op.flops(load) for op in ops)
    num_bytes = sum(op.bytes(load) for op in ops)
    return ceiling.seconds(flops, num_bytes)
