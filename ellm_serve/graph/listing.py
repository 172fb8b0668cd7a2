"""A program's ops as lines for people: identical layers are shown once.

Two layers are alike when their ops have the same names, dimensions and costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from ellm_serve.graph.program import OpCost


@dataclass(frozen=True, slots=True)
class Block:
    """Ops in order. `layers` that look like this, in rising order; empty outside the layers."""

    costs: tuple[OpCost, ...]
    layers: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How often the block occurs."""
        return len(self.layers) or 1


def fold(costs: Iterable[OpCost]) -> list[Block]:
    """The blocks of a program in the order of their first occurrence."""
    blocks: dict[object, Block] = {}
    for layer, group in groupby(costs, key=lambda cost: _layer(cost.name)):
        ops = tuple(group)
        if layer is None:
            blocks[ops] = Block(ops)
            continue
        shape = tuple((_role(op.name), op.dims, op.flops, op.bytes) for op in ops)
        first = blocks.get(shape, Block(ops))
        blocks[shape] = Block(first.costs, (*first.layers, layer))
    return list(blocks.values())


def _layer(name: str) -> int | None:
    """`3.qkv` → 3"""
    number, dot, _ = name.partition(".")
    return int(number) if dot and number.isdecimal() else None


def _role(name: str) -> str:
    return name.partition(".")[2]


def ranges(numbers: Sequence[int]) -> str:
    """(1, 2, 3, 7) → `1-3, 7`; numbers rise."""
    parts: list[str] = []
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    for _, run in runs:
        members = [number for _, number in run]
        first, last = members[0], members[-1]
        parts.append(str(first) if first == last else f"{first}-{last}")
    return ", ".join(parts)
