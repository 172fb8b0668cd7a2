"""The KV tensor: addresses that never move, memory that comes and goes by the chunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_kernels.kv_layout import CHUNK, KvLayout, chunk_keys
from ellm_serve.errors import KVExhausted
from ellm_serve.graph.kv_tensor import KVShape, KVTensor
from ellm_serve.model.region import HUGE_PAGE, Region

SHAPE = KVShape(num_slots=3, sequence_length=1100, num_layers=2, num_kv_heads=2, head_dim=32)


def tensor(chunks: int = 1 << 20, shape: KVShape = SHAPE) -> KVTensor:
    return KVTensor(shape, Region(shape.size_bytes), chunks * shape.chunk_bytes)


def slot_bytes(kv: KVTensor, slot: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return kv._bytes(slot, size)


def test_sizes_of_a_published_model() -> None:
    """Qwen3-Coder-30B-A3B: 96 KiB per position, 48 MiB per chunk."""
    shape = KVShape(4, 262_144, 48, 4, 128)
    assert shape.token_bytes == 96 << 10
    assert shape.chunk_bytes == 48 << 20
    assert shape.chunks_per_slot == 512
    assert shape.size_bytes == 4 * 512 * (48 << 20)


@given(
    slots=st.integers(1, 4), length=st.integers(1, 3000), layers=st.integers(1, 5),
    heads=st.integers(1, 4), head_dim=st.sampled_from([16, 32, 128]),
)  # fmt: skip
def test_coordinates_do_not_overlap(
    slots: int, length: int, layers: int, heads: int, head_dim: int
) -> None:
    """Every (slot, chunk, layer, head) has a piece of its own inside the tensor."""
    shape = KVShape(slots, length, layers, heads, head_dim)
    assert shape.chunks_per_slot * CHUNK >= length > (shape.chunks_per_slot - 1) * CHUNK
    assert shape.chunk_bytes % HUGE_PAGE == 0
    layout = KvLayout(
        0, shape.slot_bytes, shape.chunk_bytes, shape.layer_bytes, shape.head_bytes, head_dim
    )
    starts = sorted(
        chunk_keys.py_func(layout, slot, chunk, layer, head)
        for slot in range(slots)
        for chunk in range(shape.chunks_per_slot)
        for layer in range(layers)
        for head in range(heads)
    )
    assert min(np.diff(starts), default=shape.head_bytes) >= shape.head_bytes
    assert starts[-1] + shape.head_bytes <= shape.size_bytes
    assert shape.head_bytes == CHUNK * head_dim * 2 * 2


def test_reserving_costs_nothing() -> None:
    """A sequence length far beyond the machine's memory is only address space."""
    kv = tensor(shape=KVShape(8, 1 << 20, 48, 4, 128))
    assert kv.shape.size_bytes > 700 << 30
    assert kv.committed_bytes == 0
    assert kv.address % HUGE_PAGE == 0


@pytest.mark.parametrize(("length", "chunks"), [(0, 0), (1, 1), (512, 1), (513, 2), (1100, 3)])
def test_commit_in_whole_chunks(length: int, chunks: int) -> None:
    """Committing a length that is there already takes nothing more."""
    kv = tensor()
    kv.commit(1, length)
    assert kv.committed_bytes == chunks * SHAPE.chunk_bytes
    kv.commit(1, length // 2)
    assert kv.committed_bytes == chunks * SHAPE.chunk_bytes


def test_budget_is_exact() -> None:
    """The last chunk within the budget can be had, the next cannot, whichever slot asks."""
    kv = tensor(chunks=3)
    kv.commit(0, 2 * CHUNK)
    kv.commit(2, 1)
    for slot, length in ((0, 2 * CHUNK + 1), (1, 1), (2, CHUNK + 1)):
        with pytest.raises(KVExhausted, match=f"{SHAPE.chunk_bytes >> 20} MiB more are needed"):
            kv.commit(slot, length)
    assert kv.committed_bytes == 3 * SHAPE.chunk_bytes
    kv.release(0)
    kv.commit(1, 2 * CHUNK)


def test_a_refused_commit_takes_nothing() -> None:
    """A length that fits in part only is not half committed."""
    kv = tensor(chunks=1)
    with pytest.raises(KVExhausted):
        kv.commit(0, 2 * CHUNK)
    assert kv.committed_bytes == 0
    kv.commit(1, CHUNK)


def test_growing_keeps_what_is_there() -> None:
    """Addresses are for ever: more chunks come behind, nothing moves."""
    kv = tensor()
    kv.commit(1, 10)
    address = kv.address
    slot_bytes(kv, 1, SHAPE.chunk_bytes)[:] = 7
    kv.commit(1, 1100)
    assert kv.address == address
    everything = slot_bytes(kv, 1, SHAPE.slot_bytes)
    assert (everything[: SHAPE.chunk_bytes] == 7).all()
    assert not everything[SHAPE.chunk_bytes :].any()


def test_release_clears_one_slot_only() -> None:
    """Released memory reads as zeros; the neighbours keep theirs."""
    kv = tensor()
    for slot in range(3):
        kv.commit(slot, 600)
        slot_bytes(kv, slot, 2 * SHAPE.chunk_bytes)[:] = slot + 1
    kv.release(1)
    kv.release(1)
    assert kv.committed_bytes == 4 * SHAPE.chunk_bytes
    assert not slot_bytes(kv, 1, 2 * SHAPE.chunk_bytes).any()
    for slot in (0, 2):
        assert (slot_bytes(kv, slot, 2 * SHAPE.chunk_bytes) == slot + 1).all()


@pytest.mark.parametrize(("length", "chunks"), [(1, 1), (512, 1), (513, 2)])
def test_copy_prefix(length: int, chunks: int) -> None:
    """Chunks that the prefix touches are copied, later ones of the target are left alone."""
    kv = tensor()
    random = np.random.default_rng(0)
    kv.commit(0, 1100)
    kv.commit(2, 1100)
    source = slot_bytes(kv, 0, SHAPE.slot_bytes)
    source[:] = random.integers(0, 256, SHAPE.slot_bytes, np.uint8)
    kv.copy_prefix(0, 2, length)
    target = slot_bytes(kv, 2, SHAPE.slot_bytes)
    assert np.array_equal(
        target[: chunks * SHAPE.chunk_bytes], source[: chunks * SHAPE.chunk_bytes]
    )
    assert not target[chunks * SHAPE.chunk_bytes :].any()
