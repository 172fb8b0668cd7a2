"""Attention: against numpy, and every path bit-equal to every other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ellm_kernels.attention import attend_prefill, attention_scratch_bytes, num_prefill_units
from ellm_kernels.attention_decode import (
    DecodeWork,
    decode_attention,
    decode_pieces_bytes,
    decode_scratch_bytes,
)
from ellm_kernels.kv_layout import CHUNK, Heads
from ellm_kernels.rope import kv_write_rows, q_rows, rope_scratch_bytes
from tests.kernels.support import (
    TOL,
    KvMemory,
    QkvCase,
    Rows,
    address,
    assert_close,
    from_bf16,
    scratch,
)
from tests.naive import ops as naive

LENGTH = 1501
POSITIONS = [0, 1, 15, 16, 17, 511, 512, 513, 1023, 1024, 1500]
HEADS = [
    Heads(1, 1, 64),
    Heads(4, 2, 16),
    Heads(6, 2, 80),
    Heads(4, 1, 128),
    Heads(8, 1, 128),
    Heads(16, 1, 16),
]
LAYER = 1


def one_after_the_other(share: Callable[[int], None], num_threads: int) -> None:
    """Plays all threads; the one with a row's last chunk may come first or last."""
    for thread in np.random.default_rng(num_threads).permutation(num_threads).tolist():
        share(thread)


def at_once(share: Callable[[int], None], num_threads: int) -> None:
    """Real threads."""
    threads = [threading.Thread(target=share, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Sequences:
    """Rows r of `case` are the positions of every slot; slot s holds what was prefilled into it."""

    def __init__(self, heads: Heads, num_slots: int = 1, length: int = LENGTH) -> None:
        self.heads = heads
        self.case = QkvCase.random(heads, length, length, seed=heads.num_heads)
        self.kv = KvMemory(heads, num_slots, (length - 1) // CHUNK + 1)
        self.spare = scratch(rope_scratch_bytes(heads.head_dim))

    def empty(self, num_rows: int) -> np.ndarray:
        """Room for outputs, all NaN."""
        return np.full((num_rows, self.heads.num_heads, self.heads.head_dim), 0xFFFF, np.uint16)

    def write(self, slot: int, start: int, stop: int) -> None:
        """Writes keys and values of positions start … stop-1."""
        rows = Rows.of(*((slot, p) for p in range(start, stop)))
        kv_write_rows(
            address(self.case.qkv) + start * self.case.row_stride, self.case.row_stride, rows.step,
            0, stop - start, 0, self.heads.num_kv_heads, self.case.rotary, self.heads,
            self.kv.layout, LAYER, address(self.spare),
        )  # fmt: skip

    def queries(self, start: int, stop: int) -> np.ndarray:
        """bf16 queries of positions start … stop-1."""
        rows, out = Rows.of(*((0, p) for p in range(start, stop))), self.empty(stop - start)
        q_rows(
            address(self.case.qkv) + start * self.case.row_stride, self.case.row_stride, rows.step,
            0, stop - start, 0, self.heads.num_heads, self.case.rotary, self.heads,
            address(self.spare), address(out),
        )  # fmt: skip
        return out

    def prefill(self, start: int, stop: int, slot: int = 0, backwards: bool = False) -> np.ndarray:
        """One span through the prefill kernels, a unit at a time."""
        self.write(slot, start, stop)
        q, out = self.queries(start, stop), self.empty(stop - start)
        work = scratch(attention_scratch_bytes(self.heads.head_dim))
        units = range(num_prefill_units(stop - start, self.heads))
        for unit in reversed(units) if backwards else units:
            attend_prefill(
                address(q), self.heads, self.kv.layout, LAYER, slot, start, stop - start,
                unit, unit + 1, address(work), address(out),
            )  # fmt: skip
        return out

    def decode(
        self,
        rows: Sequence[tuple[int, int]],
        num_threads: int = 1,
        kv_written: int = 0,
        run: Callable[[Callable[[int], None], int], None] = one_after_the_other,
    ) -> np.ndarray:
        """One decode step."""
        step = Rows.of(*rows)
        qkv = self.case.qkv[step.positions].copy()
        chunks = sum(p // CHUNK + 1 for _, p in rows)
        pieces = scratch(decode_pieces_bytes(chunks, self.heads.num_heads, self.heads.head_dim))
        counters = np.zeros((len(rows), self.heads.num_kv_heads), np.int64)
        out, work = self.empty(len(rows)), DecodeWork(address(pieces), address(counters))

        def share(thread: int) -> None:
            own = scratch(decode_scratch_bytes(self.heads.head_dim))
            decode_attention(
                thread, num_threads, address(qkv), self.case.row_stride, step.step, kv_written,
                self.case.rotary, self.heads, self.kv.layout, LAYER, work, address(own),
                address(out),
            )  # fmt: skip

        run(share, num_threads)
        assert not counters.any()
        return out


@pytest.fixture(
    scope="module", params=HEADS, ids=lambda h: f"{h.num_heads}/{h.num_kv_heads}x{h[2]}"
)
def prefilled(request: pytest.FixtureRequest) -> tuple[Sequences, np.ndarray]:
    """A sequence prefilled in one span, and its outputs."""
    sequences = Sequences(request.param)
    return sequences, sequences.prefill(0, LENGTH)


def test_prefill_matches_naive(prefilled: tuple[Sequences, np.ndarray]) -> None:
    """Every position of interest, every head, from keys and values read back from the tensor."""
    sequences, out = prefilled
    heads, q = sequences.heads, sequences.queries(0, LENGTH)
    group = heads.num_heads // heads.num_kv_heads
    for kv_head in range(heads.num_kv_heads):
        keys = from_bf16(sequences.kv.keys(0, LAYER, kv_head))
        values = from_bf16(sequences.kv.values(0, LAYER, kv_head))
        for head in range(kv_head * group, (kv_head + 1) * group):
            for position in POSITIONS:
                expected = naive.attention(from_bf16(q[position, head]), keys, values, position)
                assert_close(from_bf16(out[position, head]), expected, TOL["attention"])


@pytest.mark.parametrize("cuts", [[1], [16, 513], [7, 8, 511, 1000], [512, 1024]])
def test_prefill_in_parts_is_bit_equal(
    prefilled: tuple[Sequences, np.ndarray], cuts: list[int]
) -> None:
    """Spans that start anywhere, units in any order, the rest of the tensor still NaN."""
    whole = prefilled[1]
    sequences = Sequences(prefilled[0].heads)
    edges = [0, *cuts, LENGTH]
    for start, stop in zip(edges, edges[1:], strict=False):
        part = sequences.prefill(start, stop, backwards=True)
        assert (part == whole[start:stop]).all(), (start, stop)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_decode_is_bit_equal_to_prefill(
    prefilled: tuple[Sequences, np.ndarray], num_threads: int
) -> None:
    """Each position written and attended to by a decode step; later positions are NaN."""
    sequences = Sequences(prefilled[0].heads)
    done = 0
    for position in POSITIONS:
        sequences.write(0, done, position)
        out = sequences.decode([(0, position)], num_threads)
        assert (out[0] == prefilled[1][position]).all(), position
        done = position + 1


def test_decode_of_every_position_is_bit_equal(prefilled: tuple[Sequences, np.ndarray]) -> None:
    """Another order of sums shows in few of a million bf16 results: so all positions at once."""
    sequences, whole = prefilled
    rows = [(0, position) for position in range(LENGTH)]
    assert (sequences.decode(rows, num_threads=3, kv_written=1) == whole).all()


@pytest.mark.parametrize("num_threads", [1, 4, 33])
def test_decode_rows_are_independent(num_threads: int) -> None:
    """Slots of very different lengths in one step give the bits each gives alone."""
    heads = Heads(6, 2, 80)
    positions = [1500, 0, 511, 512, 3, 1030]
    sequences = Sequences(heads, num_slots=len(positions))
    expected = np.stack([Sequences(heads).prefill(0, p + 1)[p] for p in positions])
    for slot, position in enumerate(positions):
        sequences.write(slot, 0, position)
    out = sequences.decode(list(enumerate(positions)), num_threads)
    assert (out == expected).all()


def test_decode_by_real_threads() -> None:
    """Whoever finishes last merges, and sees the pieces of all others."""
    heads = Heads(4, 2, 16)
    sequences = Sequences(heads, num_slots=3)
    for slot in range(3):
        sequences.write(slot, 0, LENGTH - 1)
    rows = [(slot, LENGTH - 1) for slot in range(3)]
    expected = sequences.decode(rows)
    for _ in range(50):
        assert (sequences.decode(rows, num_threads=5, run=at_once) == expected).all()


@pytest.mark.parametrize("start", [0, 14, 509, 510, 1021])
def test_decode_of_several_positions_of_a_slot(
    prefilled: tuple[Sequences, np.ndarray], start: int
) -> None:
    """Speculated tokens: keys and values are written first, across a chunk border too."""
    sequences = Sequences(prefilled[0].heads, num_slots=2)
    rows = [(1, start + i) for i in range(5)]
    sequences.write(1, 0, start + 5)
    out = sequences.decode(rows, num_threads=3, kv_written=1)
    assert (out == prefilled[1][start : start + 5]).all()


def test_more_threads_than_items_and_no_rows() -> None:
    """Threads without work do nothing; a step without rows does nothing."""
    sequences = Sequences(Heads(2, 1, 16), length=20)
    expected = sequences.prefill(0, 4)
    again = Sequences(Heads(2, 1, 16), length=20)
    again.write(0, 0, 3)
    assert (again.decode([(0, 3)], num_threads=9)[0] == expected[3]).all()
    assert again.decode([], num_threads=2).shape == (0, 2, 16)
    assert again.prefill(4, 4).shape == (0, 2, 16)


@pytest.mark.parametrize("scale", [1e-6, 1e5, 1e30])
def test_large_and_small_magnitudes(scale: float) -> None:
    """Scores of ±10^5 (one key wins) and very large or small values stay finite and right."""
    heads, length = Heads(2, 1, 64), 600
    sequences = Sequences(heads, length=length)
    sequences.case.qkv[:, 3 * 64 :] *= np.float32(scale)
    sequences.case.q_scale = min(scale, 1e5)
    out, q = sequences.prefill(0, length), sequences.queries(0, length)
    keys = from_bf16(sequences.kv.keys(0, LAYER, 0))
    values = from_bf16(sequences.kv.values(0, LAYER, 0))
    for position in (0, 100, 513, 599):
        for head in range(2):
            expected = naive.attention(from_bf16(q[position, head]), keys, values, position)
            assert_close(from_bf16(out[position, head]), expected, TOL["attention"])
    again = Sequences(heads, length=length)
    again.case = sequences.case
    again.write(0, 0, 599)
    assert (again.decode([(0, 599)], num_threads=2)[0] == out[599]).all()
