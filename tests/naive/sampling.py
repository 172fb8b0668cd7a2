"""Slow, obvious twins of `ellm_kernels.sampling`: sort everything, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]


def order(row: Row) -> list[int]:
    """All tokens by falling logit, then rising id."""
    return sorted(range(row.size), key=lambda token: (-float(row[token]), token))


def argmax(row: Row) -> int:
    """First token in order, -1 if there is a NaN."""
    return -1 if np.isnan(row).any() else order(row)[0]


def log_sum_exp(row: Row) -> float:
    """ln Σ exp(row)."""
    values = row.astype(np.float64)
    return float(values.max() + np.log(np.exp(values - values.max()).sum()))


def keep(row: Row, temperature: float, min_p: float, top_k: int, top_p: float) -> list[int]:
    """Tokens left after min_p, top_k and top_p; tokens that can never be drawn are left out."""
    scaled = row.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    # Below this a float32 weight is 0.
    kept = [t for t in order(row) if weights[t] > 2.0**-120 and weights[t] >= min_p]
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1.0:
        shares = np.cumsum(weights[kept]) / weights[kept].sum()
        kept = kept[: int(np.argmax(shares >= top_p)) + 1] if (shares >= top_p).any() else kept
    return sorted(kept)


def probabilities(row: Row, temperature: float, kept: Sequence[int]) -> NDArray[np.float64]:
    """Of the kept tokens, in their order."""
    scaled = row.astype(np.float64)[list(kept)] / temperature
    weights = np.exp(scaled - scaled.max())
    return np.asarray(weights / weights.sum())


def rank(row: Row, token: int) -> int:
    """Place in the order, from 1."""
    return order(row).index(token) + 1


def penalize(
    row: Row,
    prompt: Sequence[int],
    output: Sequence[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> Row:
    """A copy of the row with seen tokens lowered."""
    result = row.astype(np.float64)
    for token in {*prompt, *output}:
        result[token] = (
            result[token] / repetition if result[token] > 0 else result[token] * repetition
        )
    for token in set(output):
        result[token] -= presence + frequency * list(output).count(token)
    return result.astype(np.float32)
