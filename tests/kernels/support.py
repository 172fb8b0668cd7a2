"""What the kernel tests share: bf16 in numpy, addresses, comparison, a KV tensor full of NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ellm_kernels.kv_layout import CHUNK, Heads, KvLayout, head_bytes, layer_bytes
from ellm_kernels.rope import Rotary, StepRows

# Largest difference allowed, relative to the size of the values compared.
TOL = {
    "exp2": 3e-7,  # a polynomial fitted to 1e-7, then rounded
    "f32": 2e-6,  # float32 sums of some hundred terms
    "bf16": 2.0**-8 + 1e-5,  # one rounding to 8 significant bits
    "attention": 8e-3,  # probabilities and the output are rounded to bf16
}
NAN_BF16 = 0x7FC1


def to_bf16(x: NDArray[Any]) -> NDArray[np.uint16]:
    """Rounds to nearest even. Finite values only."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def from_bf16(x: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Widens."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def address(array: NDArray[Any]) -> int:
    """Where the array's memory starts. The caller keeps the array alive."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


def scratch(size: int) -> NDArray[np.uint8]:
    """Scratch memory that no result may depend on."""
    return np.full(size, 0xFF, np.uint8)


def assert_close(actual: NDArray[Any], expected: NDArray[Any], tolerance: float) -> None:
    """Every difference is within `tolerance` × the largest expected magnitude of its row."""
    assert actual.shape == expected.shape
    if expected.size == 0:
        return
    size = np.abs(expected).max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        difference = np.abs(actual.astype(np.float64) - expected) / np.maximum(size, 1e-30)
    worst, mean = float(difference.max()), float(difference.mean())
    assert worst <= tolerance, f"relative difference: max {worst:.3g}, mean {mean:.3g}"


class KvMemory:
    """A KV tensor of a few slots and two layers; every element is NaN until it is written."""

    def __init__(self, heads: Heads, num_slots: int, num_chunks: int, num_layers: int = 2) -> None:
        d = heads.head_dim
        chunk_bytes = num_layers * layer_bytes(heads.num_kv_heads, d)
        self.heads = heads
        self.memory = np.full(
            (num_slots, num_chunks, num_layers, heads.num_kv_heads, head_bytes(d) // 2),
            NAN_BF16,
            np.uint16,
        )
        self.layout = KvLayout(
            address(self.memory),
            num_chunks * chunk_bytes,
            chunk_bytes,
            layer_bytes(heads.num_kv_heads, d),
            head_bytes(d),
            d,
        )

    def keys(self, slot: int, layer: int, kv_head: int) -> NDArray[np.uint16]:
        """bf16 [position][head_dim] of a slot, all chunks."""
        d = self.heads.head_dim
        packed = self.memory[slot, :, layer, kv_head, : CHUNK * d]
        return packed.reshape(-1, d // 2, 16, 2).transpose(0, 2, 1, 3).reshape(-1, d)

    def values(self, slot: int, layer: int, kv_head: int) -> NDArray[np.uint16]:
        """bf16 [position][head_dim] of a slot, all chunks."""
        d = self.heads.head_dim
        packed = self.memory[slot, :, layer, kv_head, CHUNK * d :]
        return packed.reshape(-1, d, 2).transpose(0, 2, 1).reshape(-1, d)


@dataclass
class QkvCase:
    """Rows of a qkv product, the norms' weights and the rotary tables."""

    heads: Heads
    qkv: NDArray[np.float32]  # [row][q heads | k heads | v heads]
    q_weight: NDArray[np.float32]
    k_weight: NDArray[np.float32]
    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    eps: float = 1e-6
    q_scale: float = 0.125

    @classmethod
    def random(cls, heads: Heads, num_rows: int, num_positions: int, seed: int = 0) -> QkvCase:
        """Row r is meant for position r, but any position fits."""
        rng = np.random.default_rng(seed)
        d = heads.head_dim
        width = (heads.num_heads + 2 * heads.num_kv_heads) * d
        angles = np.arange(num_positions)[:, None] * 100.0 ** (-np.arange(d // 2) / (d // 2))
        return cls(
            heads,
            rng.standard_normal((num_rows, width), dtype=np.float32),
            rng.uniform(0.5, 1.5, d).astype(np.float32),
            rng.uniform(0.5, 1.5, d).astype(np.float32),
            np.cos(angles).astype(np.float32),
            np.sin(angles).astype(np.float32),
        )

    @property
    def rotary(self) -> Rotary:
        """The kernels' view; valid while this object lives."""
        return Rotary(
            address(self.q_weight),
            address(self.k_weight),
            address(self.cos),
            address(self.sin),
            np.float32(self.eps),  # type: ignore[arg-type]
            np.float32(self.q_scale),  # type: ignore[arg-type]
        )

    @property
    def row_stride(self) -> int:
        """Bytes from row to row of qkv."""
        return int(self.qkv.shape[1]) * 4


@dataclass
class Rows:
    """Slots and positions of a step."""

    slots: NDArray[np.int32]
    positions: NDArray[np.int32]

    @classmethod
    def of(cls, *rows: tuple[int, int]) -> Rows:
        """From (slot, position) pairs."""
        table = np.array(rows, np.int32).reshape(-1, 2)
        return cls(table[:, 0].copy(), table[:, 1].copy())

    @property
    def step(self) -> StepRows:
        """The kernels' view; valid while this object lives."""
        return StepRows(len(self.slots), address(self.slots), address(self.positions))
