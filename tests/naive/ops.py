"""Slow, obvious twins of the kernels: float64, whole arrays, no layout.

A twin has its kernel's name and computes the same thing from plain arrays. It rounds only where the
format says so: operands that a kernel stores as bf16 arrive here already rounded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.floating]


def rms_norm_rows(x: Float, weight: Float, eps: float) -> Float:
    """RMSNorm over the last axis."""
    x = x.astype(np.float64)
    result: Float = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return result


def embed_rows(table: Float, token_ids: NDArray[np.int32]) -> Float:
    """One row of the table per token."""
    return table[token_ids]


def rotate_half(x: Float, cos: Float, sin: Float) -> Float:
    """Rotates (x[i], x[i + half]) by angle i; cos, sin: [..., half]."""
    low, high = np.split(x.astype(np.float64), 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def multiply_block(a: Float, b: Float) -> Float:
    """a · b"""
    return a.astype(np.float64) @ b.astype(np.float64)


def attention(q: Float, keys: Float, values: Float, position: int) -> Float:
    """One query that carries softmax_scale · log2(e), at `position` of its sequence."""
    scores = keys[: position + 1].astype(np.float64) @ q.astype(np.float64)
    p = np.exp2(scores - scores.max())
    result: Float = (p / p.sum()) @ values[: position + 1].astype(np.float64)
    return result


def route_rows(
    logits: Float, k: int, norm_topk_prob: bool
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids (ascending) and weights of each row's k most probable experts."""
    e = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    probabilities = e / e.sum(-1, keepdims=True)
    # A stable sort of the negated logits keeps the lower expert first among equals.
    ids = np.sort(np.argsort(-logits, axis=-1, kind="stable")[:, :k], axis=-1)
    weights = np.take_along_axis(probabilities, ids, axis=-1)
    if norm_topk_prob:
        weights = weights / weights.sum(-1, keepdims=True)
    return ids, weights
