"""Embedding rows against numpy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ellm_kernels.embedding import embed_packed_rows, embed_rows
from tests.kernels.support import address, from_bf16, to_bf16
from tests.naive import ops as naive
from tests.naive.gemm import pack_panels


@pytest.mark.parametrize("hidden", [16, 24, 64, 103])
def test_embed_rows_matches_naive(hidden: int) -> None:
    """First, last and repeated ids; only the range is written."""
    table = to_bf16(np.random.default_rng(hidden).standard_normal((50, hidden)))
    ids = np.array([49, 0, 7, 7, 3], np.int32)
    out = np.full((5, hidden), -1, np.float32)
    embed_rows(address(table), address(ids), 0, 50, hidden, 0, 4, address(out))
    assert (out[:4] == naive.embed_rows(from_bf16(table), ids[:4])).all()
    assert (out[4] == -1).all()


def test_no_rows() -> None:
    """An empty range writes nothing."""
    table, ids = np.zeros((1, 16), np.uint16), np.zeros(1, np.int32)
    out = np.full((1, 16), -1, np.float32)
    embed_rows(address(table), address(ids), 0, 1, 16, 0, 0, address(out))
    assert (out == -1).all()


@pytest.mark.parametrize("packed", [False, True], ids=["table", "panels"])
@pytest.mark.parametrize(
    ("hidden", "shares"),
    [(64, (0, 64, 128, 150)), (192, (0, 128, 150)), (64, (0, 64, 65))],
)
def test_shares_of_the_vocabulary_add_up(
    packed: bool, hidden: int, shares: tuple[int, ...]
) -> None:
    """A token is one share's row and zeros, not garbage, in all others; ids at the borders too."""
    table = to_bf16(np.random.default_rng(hidden).standard_normal((shares[-1], hidden)))
    ids = np.array([0, *(edge + i for edge in shares[1:-1] for i in (-1, 0, 1)), shares[-1] - 1])
    ids = ids[ids < shares[-1]].astype(np.int32)
    expected = naive.embed_rows(from_bf16(table), ids)
    total = np.zeros_like(expected)
    for first, stop in pairwise(shares):
        out = np.full((len(ids), hidden), np.nan, np.float32)
        held = pack_panels(table[first:stop]) if packed else table[first:stop].copy()
        embed = embed_packed_rows if packed else embed_rows
        embed(address(held), address(ids), first, stop - first, hidden, 0, len(ids), address(out))
        mine = (ids >= first) & (ids < stop)
        assert mine.any() and (out[~mine].view(np.uint32) == 0).all()
        assert (out[mine] == expected[mine]).all()
        total += out
    assert (total == expected).all()


@pytest.mark.parametrize("hidden", [16, 24, 103])
def test_a_row_of_zeros_ends_where_it_should(hidden: int) -> None:
    """Rows whose length is no multiple of 16 are cleared to their end and no further."""
    table, ids = np.ones((1, hidden), np.uint16), np.array([5], np.int32)
    out = np.full((2, hidden), -1, np.float32)
    embed_rows(address(table), address(ids), 6, 1, hidden, 0, 1, address(out))
    assert (out[0] == 0).all() and (out[1] == -1).all()
