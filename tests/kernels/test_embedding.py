"""Embedding rows against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_kernels.embedding import embed_rows
from tests.kernels.support import address, from_bf16, to_bf16
from tests.naive import ops as naive


@pytest.mark.parametrize("hidden", [16, 24, 64, 103])
def test_embed_rows_matches_naive(hidden: int) -> None:
    """First, last and repeated ids; only the range is written."""
    table = to_bf16(np.random.default_rng(hidden).standard_normal((50, hidden)))
    ids = np.array([49, 0, 7, 7, 3], np.int32)
    out = np.full((5, hidden), -1, np.float32)
    embed_rows(address(table), address(ids), hidden, 0, 4, address(out))
    assert (out[:4] == naive.embed_rows(from_bf16(table), ids[:4])).all()
    assert (out[4] == -1).all()


def test_no_rows() -> None:
    """An empty range writes nothing."""
    table, ids = np.zeros((1, 16), np.uint16), np.zeros(1, np.int32)
    out = np.full((1, 16), -1, np.float32)
    embed_rows(address(table), address(ids), 16, 0, 0, address(out))
    assert (out == -1).all()
