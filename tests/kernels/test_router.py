"""Routing against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_kernels.router import route_rows
from tests.kernels.support import TOL, address, assert_close
from tests.naive import ops as naive


def _route(logits: np.ndarray, k: int, normalise: bool) -> tuple[np.ndarray, np.ndarray]:
    rows, num_experts = logits.shape
    ids = np.full((rows, k), -1, np.int32)
    weights = np.full((rows, k), np.nan, np.float32)
    route_rows(
        address(logits), num_experts, k, int(normalise), 0, rows, address(ids), address(weights)
    )
    return ids, weights


def _logits(rows: int, num_experts: int, scale: float = 2.0) -> np.ndarray:
    rng = np.random.default_rng(num_experts)
    return (rng.standard_normal((rows, num_experts)) * scale).astype(np.float32)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "k"), [(128, 8), (1, 1), (3, 3), (8, 2), (17, 5), (60, 4), (64, 16), (512, 10)]
)
@pytest.mark.parametrize("scale", [2.0, 300.0])
def test_route_rows_matches_naive(num_experts: int, k: int, normalise: bool, scale: float) -> None:
    """Ids equal and ascending; weights close, also where most probabilities underflow."""
    logits = _logits(40, num_experts, scale)
    ids, weights = _route(logits, k, normalise)
    expected_ids, expected = naive.route_rows(logits, k, normalise)
    assert (ids == expected_ids).all()
    assert_close(weights, expected, 10 * TOL["f32"])
    if normalise:
        assert np.abs(weights.sum(-1) - 1).max() < TOL["f32"]


def test_near_ties_are_told_apart() -> None:
    """Logits one float32 step apart choose as float32 says; rounding them to bf16 would not."""
    rng = np.random.default_rng(0)
    close = np.float32(3) + np.arange(128, dtype=np.float32) * np.float32(2.5e-7)
    logits = np.stack([rng.permutation(close) for _ in range(200)])
    ids, _ = _route(logits, 8, True)
    assert (ids == naive.route_rows(logits, 8, True)[0]).all()


def test_equal_logits_go_to_the_lower_expert() -> None:
    """All equal, and a tie exactly at the border of the chosen set."""
    flat = np.zeros((1, 20), np.float32)
    assert _route(flat, 4, True)[0].tolist() == [[0, 1, 2, 3]]
    border = np.array([[1, 5, 3, 3, 9, 3, 3]], np.float32)
    assert _route(border, 4, True)[0].tolist() == [[1, 2, 3, 4]]


def test_nan_logits_still_give_valid_experts() -> None:
    """Ids index weight tables: a broken row must not make them point outside."""
    logits = np.full((2, 40), np.nan, np.float32)
    logits[1, 5:] = np.arange(35)
    for row in _route(logits, 6, True)[0]:
        assert len(set(row.tolist())) == 6 and row.min() >= 0 and row.max() < 40


def test_a_row_does_not_depend_on_the_others() -> None:
    """Bit-equal alone and in company; rows outside the range stay as they were."""
    logits = _logits(6, 60)
    ids, weights = _route(logits, 4, True)
    some_ids, some = np.full((6, 4), -1, np.int32), np.full((6, 4), -1, np.float32)
    route_rows(address(logits), 60, 4, 1, 2, 4, address(some_ids), address(some))
    assert (some_ids[2:4] == ids[2:4]).all() and (some[2:4] == weights[2:4]).all()
    assert (some_ids[[0, 1, 4, 5]] == -1).all() and (some[[0, 1, 4, 5]] == -1).all()
