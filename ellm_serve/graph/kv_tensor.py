"""The KV tensor: one address for every (slot, chunk, layer, kv-head, position), for ever.

Address space for all slots is reserved at start; a chunk of 512 positions of all layers is one
contiguous piece which is committed when a slot first reaches it and given back when the slot is
released. Holds no bookkeeping of who owns what.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ellm_kernels.kv_layout import CHUNK, head_bytes, layer_bytes
from ellm_serve.errors import KVExhausted
from ellm_serve.model.region import HUGE_PAGE, Memory, round_up


@dataclass(frozen=True, slots=True)
class KVShape:
    """Dimensions and byte strides; layout `[slot][chunk][layer][kv_head]{keys, values}`.

    `num_sockets`: for a plan, whose sizes are those of as many tensors with a share of the kv-heads
    each.
    """

    num_slots: int
    sequence_length: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_sockets: int = 1

    @property
    def head_bytes(self) -> int:
        return head_bytes(self.head_dim)

    @property
    def layer_bytes(self) -> int:
        return layer_bytes(self.num_kv_heads, self.head_dim)

    @property
    def chunk_bytes(self) -> int:
        """One chunk of all layers, in whole huge pages."""
        share = self.num_layers * self.layer_bytes // self.num_sockets
        return self.num_sockets * round_up(share, HUGE_PAGE)

    @property
    def chunks_per_slot(self) -> int:
        return -(-self.sequence_length // CHUNK)

    @property
    def slot_bytes(self) -> int:
        return self.chunks_per_slot * self.chunk_bytes

    @property
    def token_bytes(self) -> int:
        """KV bytes of one position."""
        return self.num_layers * self.layer_bytes // CHUNK

    @property
    def size_bytes(self) -> int:
        return self.num_slots * self.slot_bytes


class KVTensor:
    """The memory behind a `KVShape`, with a budget on what may be committed."""

    def __init__(self, shape: KVShape, memory: Memory, budget_bytes: int) -> None:
        assert memory.size_bytes >= shape.size_bytes
        self.shape = shape
        self.budget_bytes = budget_bytes
        self._memory = memory
        self._committed = [0] * shape.num_slots  # chunks

    @property
    def address(self) -> int:
        return self._memory.address

    @property
    def committed_bytes(self) -> int:
        return sum(self._committed) * self.shape.chunk_bytes

    def commit(self, slot: int, length: int) -> None:
        """Makes sure that positions [0, length) of a slot have memory.

        Raises:
            KVExhausted: the budget or the machine's memory does not allow it.
        """
        chunks = -(-length // CHUNK)
        missing = chunks - self._committed[slot]
        if missing <= 0:
            return
        size = missing * self.shape.chunk_bytes
        if self.committed_bytes + size > self.budget_bytes:
            raise KVExhausted(
                f"the KV tensor holds {self.committed_bytes >> 20} MiB of its"
                f" {self.budget_bytes >> 20} MiB budget; {size >> 20} MiB more are needed"
            )
        try:
            self._memory.commit(self._offset(slot, self._committed[slot]), size)
        except MemoryError as error:
            raise KVExhausted(str(error)) from error
        self._committed[slot] = chunks

    def release(self, slot: int) -> None:
        """Gives a slot's memory back."""
        if self._committed[slot]:
            size = self._committed[slot] * self.shape.chunk_bytes
            self._memory.discard(self._offset(slot, 0), size)
            self._committed[slot] = 0

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copies positions [0, length), in whole chunks; the target must be committed."""
        size = -(-length // CHUNK) * self.shape.chunk_bytes
        self._bytes(target, size)[:] = self._bytes(source, size)

    def _bytes(self, slot: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return self._memory.array(self._offset(slot, 0), (size,), np.uint8)

    def _offset(self, slot: int, chunk: int) -> int:
        return slot * self.shape.slot_bytes + chunk * self.shape.chunk_bytes
