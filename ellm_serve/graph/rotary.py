"""Tables of the rotary embedding: cos and sin of every position and pair."""

from __future__ import annotations

import numpy as np

from ellm_serve.model.config import ModelConfig
from ellm_serve.model.region import Region
from ellm_serve.model.rope import rope_frequencies

_ROWS = 4096


def rotary_bytes(config: ModelConfig, sequence_length: int) -> int:
    """Bytes of both tables, float32 [position][head_dim/2] each."""
    return 2 * 4 * sequence_length * (config.head_dim // 2)


def write_rotary_tables(config: ModelConfig, sequence_length: int) -> tuple[Region, int, int]:
    """The memory and the addresses of cos and sin.

    Angles are formed in float32 as transformers forms them: position times the float32 frequency.
    """
    frequencies, factor = rope_frequencies(config.rope, config.head_dim)
    half = config.head_dim // 2
    region = Region(rotary_bytes(config, sequence_length))
    tables = region.array(0, (2, sequence_length, half), np.float32)
    steps = frequencies.astype(np.float32)  # [pair]
    for first in range(0, sequence_length, _ROWS):
        stop = min(first + _ROWS, sequence_length)
        angles = np.arange(first, stop, dtype=np.float32)[:, None] * steps  # [position, pair]
        tables[0, first:stop] = np.cos(angles) * factor
        tables[1, first:stop] = np.sin(angles) * factor
    return region, region.address, region.address + tables[0].nbytes
