"""A program of many layers is shown once per kind of layer."""

from __future__ import annotations

import pytest

from ellm_serve.graph.listing import fold, ranges
from ellm_serve.graph.program import OpCost


def op(name: str, flops: float = 1.0) -> OpCost:
    return OpCost(name, "[rows]", flops, 2.0, 0.5)


def test_equal_layers_are_folded() -> None:
    """Ops before and after the layers stay where they are."""
    names = ["embed", "0.qkv", "0.mlp", "1.qkv", "1.mlp", "2.qkv", "2.mlp", "lm_head"]
    blocks = fold(op(name) for name in names)
    assert [[cost.name for cost in block.costs] for block in blocks] == [
        ["embed"],
        ["0.qkv", "0.mlp"],
        ["lm_head"],
    ]
    assert blocks[1].layers == (0, 1, 2)
    assert [block.count for block in blocks] == [1, 3, 1]


def test_different_layers_are_kept_apart() -> None:
    """Dense layers between sparse ones are shown as well; nothing is lost."""
    costs = [op(f"{layer}.mlp", flops=float(layer % 2)) for layer in range(6)]
    assert [block.layers for block in fold(costs)] == [(0, 2, 4), (1, 3, 5)]


def test_every_op_is_counted_once() -> None:
    """Folding changes no total."""
    costs = [op("embed"), *(op(f"{i}.x", float(i == 3)) for i in range(5)), op("norm"), op("head")]
    assert sum(block.count * len(block.costs) for block in fold(costs)) == len(costs)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((1, 2, 3, 7), "1-3, 7"), ((5,), "5"), ((), ""), ((1, 3, 5), "1, 3, 5"), ((0, 1), "0-1")],
)
def test_ranges(numbers: tuple[int, ...], text: str) -> None:
    """Runs are shown by their ends."""
    assert ranges(numbers) == text
