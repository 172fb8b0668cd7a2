"""Routed experts, one row and one expert at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tests.naive.gemm import Bits, multiply_panel, widen

F64 = NDArray[np.float64]


def group_experts(
    ids: NDArray[np.int32], weights: NDArray[np.float32]
) -> list[tuple[int, list[int], list[float]]]:
    """(expert, its rows, their weights) of every expert that has rows, in order."""
    return [
        (
            int(expert),
            [int(row) for row in np.nonzero(ids == expert)[0]],
            [float(weight) for weight in weights[ids == expert]],
        )
        for expert in np.unique(ids)
    ]


def experts_up(x: Bits, gate: Bits, up: Bits, weights: Sequence[float]) -> F64:
    """weight · SiLU(x · gateᵀ) · (x · upᵀ) of one expert, not rounded yet."""
    g = multiply_panel(x, gate)
    return np.array(weights)[:, None] * g / (1.0 + np.exp(-g)) * multiply_panel(x, up)


def experts_down(
    hidden: Sequence[Bits], down: Sequence[Bits], rows: int,
    groups: Sequence[tuple[int, list[int], list[float]]],
) -> F64:  # fmt: skip
    """Σ hidden · downᵀ; `hidden[i]` are the activated, weighted rows of the i-th group."""
    out = np.zeros((rows, down[0].shape[0]))
    for activated, (expert, members, _) in zip(hidden, groups, strict=True):
        product = widen(activated).astype(np.float64) @ widen(down[expert]).astype(np.float64).T
        for row, line in zip(members, product, strict=True):
            out[row] += line
    return out
