"""Where a key or value lives: pure address arithmetic on coordinates.

A slot is an array of chunks of 512 positions. The 512 keys of one (slot, chunk, layer, kv_head)
are followed by their values:

    keys   [512/16][head_dim/2][16 positions][2 dims]   bf16
    values [512/2][head_dim][2 positions]               bf16

Both are pair-interleaved along the dimension that attention reduces over (dims for scores,
positions for outputs), so neither is ever re-packed.
"""

from __future__ import annotations

from typing import NamedTuple

from ellm_kernels.jit import kernel

CHUNK = 512  # positions
GROUP = 16  # positions of one vector of keys


class KvLayout(NamedTuple):
    """Base address and byte strides of the KV tensor (of one socket)."""

    base: int
    slot_stride: int
    chunk_stride: int
    layer_stride: int
    head_stride: int
    head_dim: int


class Heads(NamedTuple):
    """Head counts; the query heads of a kv-head are neighbours."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def head_bytes(head_dim: int) -> int:
    """Bytes of one chunk of one kv-head: keys, then values."""
    return CHUNK * head_dim * 2 * 2


def layer_bytes(num_kv_heads: int, head_dim: int) -> int:
    """Bytes of one chunk of one layer."""
    return num_kv_heads * head_bytes(head_dim)


@kernel
def chunk_keys(kv: KvLayout, slot: int, chunk: int, layer: int, kv_head: int) -> int:
    """Address of the keys of a chunk."""
    return (
        kv.base
        + slot * kv.slot_stride
        + chunk * kv.chunk_stride
        + layer * kv.layer_stride
        + kv_head * kv.head_stride
    )


@kernel
def chunk_values(keys: int, head_dim: int) -> int:
    """Address of the values that belong to the keys of a chunk."""
    return keys + CHUNK * head_dim * 2


@kernel
def key_pair(keys: int, head_dim: int, index: int) -> int:
    """Address of dims 0 and 1 of key `index` of a chunk; the next pair is 64 bytes further on."""
    return keys + (index // GROUP) * (GROUP * head_dim * 2) + (index % GROUP) * 4


@kernel
def value_dim(values: int, head_dim: int, index: int) -> int:
    """Address of dim 0 of value `index` of a chunk; the next dim is 4 bytes further on."""
    return values + (index // 2) * (head_dim * 4) + (index % 2) * 2
