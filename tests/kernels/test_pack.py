"""Packing against numpy: tails, interleaving, and reading rows back out of panels."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_kernels.embedding import embed_packed_rows, embed_rows
from ellm_kernels.pack import pack_panels
from ellm_kernels.tiles import HALF_PANEL, PANEL, packed_bytes, packed_up_bytes
from tests.kernels.support import address
from tests.naive import gemm as naive

UNTOUCHED = 0x5A5A


def matrix(outputs: int, inputs: int, seed: int = 0) -> naive.Bits:
    """Every 16-bit pattern may occur: packing must not interpret values."""
    return np.random.default_rng([seed, outputs, inputs]).integers(
        0, 1 << 16, (outputs, inputs), np.uint16
    )


@pytest.mark.parametrize("outputs", [1, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("inputs", [2, 6, 32, 34, 130])
def test_pack_panels_matches_naive(outputs: int, inputs: int) -> None:
    """Whole and partial panels, whole and partial runs of words; nothing behind them is written."""
    source = matrix(outputs, inputs)
    size = packed_bytes(outputs, inputs) // 2
    out = np.full(size + 64, UNTOUCHED, np.uint16)
    pack_panels(address(source), 2 * inputs, outputs, inputs, address(out), PANEL, 0)
    assert np.array_equal(out[:size], naive.pack_panels(source).reshape(-1))
    assert (out[size:] == UNTOUCHED).all()


def test_rows_may_lie_apart() -> None:
    """`row_bytes` is the distance of two rows, whatever part of them is packed."""
    wide = matrix(70, 48)
    out = np.zeros(packed_bytes(70, 20) // 2, np.uint16)
    pack_panels(address(wide), 2 * 48, 70, 20, address(out), PANEL, 0)
    assert np.array_equal(out, naive.pack_panels(wide[:, :20]).reshape(-1))


@pytest.mark.parametrize("outputs", [2, 31, 32, 33, 64, 70, 128])
def test_gate_and_up_share_panels(outputs: int) -> None:
    """32 columns of each; packing one leaves the other's columns alone, tails become zero."""
    inputs = 38
    gate, up = matrix(outputs, inputs, 1), matrix(outputs, inputs, 2)
    size = packed_up_bytes(outputs, inputs) // 2
    out = np.full(size + 64, UNTOUCHED, np.uint16)
    for source, column in ((gate, 0), (up, HALF_PANEL)):
        pack_panels(address(source), 2 * inputs, outputs, inputs, address(out), HALF_PANEL, column)
        if column == 0:
            columns = out[:size].reshape(-1, inputs // 2, 64, 2)
            assert (columns[:, :, HALF_PANEL:] == UNTOUCHED).all()
    assert np.array_equal(out[:size], naive.pack_gate_up(gate, up).reshape(-1))
    assert (out[size:] == UNTOUCHED).all()


@pytest.mark.parametrize("vocab", [64, 100, 257])
@pytest.mark.parametrize("hidden", [64, 128, 192])
def test_embed_packed_rows_equals_embed_rows(vocab: int, hidden: int) -> None:
    """A tied model reads its embeddings from lm_head's panels and gets the same bits."""
    table = matrix(vocab, hidden)
    panels = naive.pack_panels(table)
    ids = np.array([0, vocab - 1, 63, 1, 62, vocab // 2, 0], np.int32)
    plain, packed = (np.full((len(ids), hidden), -7, np.float32) for _ in range(2))
    for embed, held, out in ((embed_rows, table, plain), (embed_packed_rows, panels, packed)):
        embed(address(held), address(ids), 0, vocab, hidden, 1, len(ids), address(out))
    assert np.array_equal(packed.view(np.uint32), plain.view(np.uint32))
    assert np.array_equal(packed[1:].view(np.uint32) >> 16, table[ids[1:]])
    assert (packed[0] == -7).all()
