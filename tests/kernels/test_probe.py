"""Probes do the work they claim: a loop that the compiler removed would report any speed."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_kernels import isa, probe
from ellm_serve.model.region import Region


@pytest.mark.parametrize("lines", [0, 16, 48])
def test_read_stream_reads_every_byte(compiled_kernels: None, lines: int) -> None:
    """The result is the XOR of all words, so no load can be left out."""
    region = Region(1 << 16)
    words = region.array(0, (1 << 14,), np.uint32)
    words[:] = np.random.default_rng(0).integers(0, 1 << 32, words.shape, np.uint32)
    expected = int(np.bitwise_xor.reduce(words[: lines * 16])) if lines else 0
    assert probe.read_stream(region.address, lines * 64) == expected


def test_read_stream_ignores_a_partial_turn(compiled_kernels: None) -> None:
    """Nothing past the last whole multiple is touched."""
    region = Region(1 << 12)
    region.array(0, (1 << 10,), np.uint32)[probe.READ_BYTES // 4] = 7
    assert probe.read_stream(region.address, probe.READ_BYTES + 64) == 0


@pytest.mark.parametrize("iterations", [0, 1, 7, 1000])
def test_bf16_peak_multiplies(compiled_kernels: None, iterations: int) -> None:
    """Every iteration adds two products of 1 to each element."""
    assert probe.bf16_peak(iterations) == 2.0 * iterations


@pytest.mark.parametrize("iterations", [0, 1, 7, 1000])
def test_int8_peak_multiplies(compiled_kernels: None, iterations: int) -> None:
    """Every iteration adds four products of 1 to each element, where there is an instruction."""
    expected = 4 * iterations if probe.HAS_INT8_DOT else 0
    assert probe.int8_peak(iterations) == expected


def test_operations_match_the_tile() -> None:
    """One iteration is one pair of every element of the register tile."""
    chosen = isa.active()
    elements = chosen.mr * chosen.nv * 16
    assert elements * 2 * 2 == probe.BF16_OPS
