"""Queries, keys and values on their way from the qkv product to their places."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_kernels.kv_layout import Heads
from ellm_kernels.rope import kv_write_rows, q_rows, rope_scratch_bytes
from tests.kernels.support import (
    NAN_BF16,
    TOL,
    KvMemory,
    QkvCase,
    Rows,
    address,
    assert_close,
    from_bf16,
    scratch,
    to_bf16,
)
from tests.naive import ops as naive

HEADS = [Heads(4, 2, 16), Heads(3, 1, 64), Heads(2, 2, 80), Heads(8, 1, 128), Heads(1, 1, 256)]
POSITIONS = [0, 1, 15, 16, 511, 512, 513, 1023, 1500]


def _expected(case: QkvCase, row: int, head: int, weight: np.ndarray, position: int) -> np.ndarray:
    d = case.heads.head_dim
    x = case.qkv[row, head * d : (head + 1) * d]
    normed = naive.rms_norm_rows(x, weight, case.eps)
    return naive.rotate_half(normed, case.cos[position], case.sin[position])


def _write(case: QkvCase, rows: Rows, kv: KvMemory, layer: int = 1) -> None:
    spare = scratch(rope_scratch_bytes(case.heads.head_dim))
    kv_write_rows(
        address(case.qkv), case.row_stride, rows.step, 0, len(rows.slots),
        0, case.heads.num_kv_heads, case.rotary, case.heads, kv.layout, layer, address(spare),
    )  # fmt: skip


@pytest.mark.parametrize("heads", HEADS)
def test_queries_match_naive(heads: Heads) -> None:
    """Norm, rotation by the row's own position, softmax scale."""
    case = QkvCase.random(heads, len(POSITIONS), 1501)
    rows = Rows.of(*((0, p) for p in POSITIONS))
    out = np.zeros((len(POSITIONS), heads.num_heads, heads.head_dim), np.uint16)
    spare = scratch(rope_scratch_bytes(heads.head_dim))
    q_rows(
        address(case.qkv), case.row_stride, rows.step, 0, len(POSITIONS), 0, heads.num_heads,
        case.rotary, heads, address(spare), address(out),
    )  # fmt: skip
    for row, position in enumerate(POSITIONS):
        for head in range(heads.num_heads):
            expected = _expected(case, row, head, case.q_weight, position) * case.q_scale
            assert_close(from_bf16(out[row, head]), expected, TOL["bf16"])


def test_queries_of_a_range_equal_those_of_the_whole() -> None:
    """Rows and heads may be split anyhow, and nothing outside the range is written."""
    heads = HEADS[0]
    case, rows = QkvCase.random(heads, 5, 5), Rows.of(*((0, p) for p in range(5)))
    spare = scratch(rope_scratch_bytes(heads.head_dim))
    whole, part = np.zeros((2, 5, heads.num_heads, heads.head_dim), np.uint16)
    for out, ranges in ((whole, (0, 5, 0, 4)), (part, (1, 3, 2, 4))):
        q_rows(
            address(case.qkv), case.row_stride, rows.step, *ranges, case.rotary, heads,
            address(spare), address(out),
        )  # fmt: skip
    assert (part[1:3, 2:4] == whole[1:3, 2:4]).all() and part[1:3, 2:4].any()
    part[1:3, 2:4] = 0
    assert not part.any()


@pytest.mark.parametrize("heads", HEADS)
def test_keys_and_values_land_at_their_coordinates(heads: Heads) -> None:
    """Isolated positions across chunk borders; everything else in the tensor stays as it was."""
    case, kv = QkvCase.random(heads, len(POSITIONS), 1501), KvMemory(heads, 2, 3)
    _write(case, Rows.of(*((1, p) for p in POSITIONS)), kv)
    for kv_head in range(heads.num_kv_heads):
        keys, values = kv.keys(1, 1, kv_head), kv.values(1, 1, kv_head)
        for row, position in enumerate(POSITIONS):
            expected = _expected(case, row, heads.num_heads + kv_head, case.k_weight, position)
            assert_close(from_bf16(keys[position]), expected, TOL["bf16"])
            column = (heads.num_heads + heads.num_kv_heads + kv_head) * heads.head_dim
            value = case.qkv[row, column : column + heads.head_dim]
            assert (values[position] == to_bf16(value)).all()
        others = np.setdiff1d(np.arange(len(keys)), POSITIONS)
        assert (keys[others] == NAN_BF16).all()
    assert (kv.memory[0] == NAN_BF16).all() and (kv.memory[1, :, 0] == NAN_BF16).all()


@pytest.mark.parametrize(
    ("rows", "zeroed", "kept"),
    [
        ([(0, 4)], [5], [3, 6]),
        ([(0, 5)], [], [4, 6]),
        ([(0, 3), (0, 4)], [5], [2, 6]),
        ([(0, 510)], [511], [509, 512]),
        ([(0, 512)], [513], [511, 514]),
        ([(0, 2), (1, 3)], [3], [1, 4]),
    ],
)
def test_partner_of_the_last_value_becomes_zero(
    rows: list[tuple[int, int]], zeroed: list[int], kept: list[int]
) -> None:
    """Attention multiplies the partner by 0: NaN there would leak. Others are never touched."""
    heads = Heads(1, 1, 16)
    case, kv = QkvCase.random(heads, len(rows), 1024), KvMemory(heads, 2, 2)
    _write(case, Rows.of(*rows), kv)
    values = kv.values(0, 1, 0)
    assert (values[zeroed] == 0).all()
    assert (values[kept] == NAN_BF16).all()


def test_even_position_inside_a_span_leaves_its_partner_alone() -> None:
    """The partner belongs to whichever thread writes it: rewriting row 0 must not clear row 1."""
    heads = Heads(1, 1, 16)
    case, kv, rows = QkvCase.random(heads, 2, 2), KvMemory(heads, 1, 1), Rows.of((0, 0), (0, 1))
    _write(case, rows, kv)
    before = kv.memory.copy()
    spare = scratch(rope_scratch_bytes(16))
    kv_write_rows(
        address(case.qkv), case.row_stride, rows.step, 0, 1, 0, 1, case.rotary, heads, kv.layout,
        1, address(spare),
    )  # fmt: skip
    assert (kv.memory == before).all()
    assert (kv.values(0, 1, 0)[1] == to_bf16(case.qkv[1, 32:48])).all()


def test_no_rows() -> None:
    """An empty step writes nothing."""
    heads = Heads(1, 1, 16)
    case, kv = QkvCase.random(heads, 1, 1), KvMemory(heads, 1, 1)
    _write(case, Rows.of(), kv)
    assert (kv.memory == NAN_BF16).all()
