"""Grouping rows by expert, and both halves of the expert MLP, against row-by-row numpy."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from ellm_kernels.experts import (
    SCRATCH_BYTES,
    experts_down,
    experts_up,
    group_all,
    group_bytes,
    group_experts,
    num_active,
)
from ellm_kernels.tiles import num_up_panels
from tests.kernels.support import TOL, address, from_bf16, scratch, to_bf16
from tests.naive import experts as naive
from tests.naive.gemm import Bits, magnitude, multiply_bound, pack_gate_up, pack_panels

HEADER = 16
F32 = NDArray[np.float32]
Groups = list[tuple[int, list[int], list[float]]]


def routing(rows: int, top_k: int, num_experts: int) -> tuple[NDArray[np.int32], F32]:
    """Ids ascending per row, as the router gives them; skewed, so that some experts stay idle."""
    rng = np.random.default_rng([rows, top_k, num_experts])
    popularity = 1.0 / np.arange(1, num_experts + 1) ** 2
    scores = np.log(popularity) + rng.gumbel(size=(rows, num_experts))
    ids = np.sort(np.argsort(-scores, axis=1)[:, :top_k], axis=1).astype(np.int32)
    return ids, rng.uniform(0.05, 1.0, (rows, top_k)).astype(np.float32)


class Group:
    """A group in memory, and what it says."""

    def __init__(self, num_experts: int, assignments: int) -> None:
        self.num_experts, self.assignments = num_experts, assignments
        self.memory = np.full(group_bytes(num_experts, assignments) // 4 + 8, -99, np.int32)
        self.address = address(self.memory)

    def fill(
        self, ids: NDArray[np.int32], weights: F32, first: int = 0, last: int | None = None,
        first_expert: int = 0,
    ) -> None:  # fmt: skip
        """Groups experts first … last-1 of those held, which begin at id `first_expert`."""
        counts = np.full(self.num_experts, -1, np.int32)
        group_experts(
            address(ids), address(weights), len(ids), ids.shape[1], first_expert,
            self.num_experts, self.address, address(counts), first,
            self.num_experts if last is None else last,
        )  # fmt: skip

    def read(self, held: int | None = None) -> Groups:
        """What the group says; it must hold `held` assignments, by default all."""
        assert (self.memory[-8:] == -99).all(), "written past its end"
        active = num_active(self.address)
        experts = self.memory[HEADER : HEADER + active]
        begins = self.memory[HEADER + self.num_experts :][: active + 1]
        assert begins[0] == 0 and begins[-1] == (self.assignments if held is None else held)
        rows = self.memory[HEADER + 2 * self.num_experts + 1 :]
        weights = rows[self.assignments :].view(np.float32)
        return [
            (int(expert), rows[low:high].tolist(), weights[low:high].tolist())
            for expert, low, high in zip(experts, begins, begins[1:], strict=False)
        ]


ROUTINGS = [(1, 1, 1), (1, 8, 128), (5, 2, 8), (64, 4, 20), (200, 8, 128), (33, 3, 3)]


@pytest.mark.parametrize(("rows", "top_k", "num_experts"), ROUTINGS)
def test_group_experts_matches_naive(rows: int, top_k: int, num_experts: int) -> None:
    """Experts by id, their rows ascending, every assignment once."""
    ids, weights = routing(rows, top_k, num_experts)
    group = Group(num_experts, rows * top_k)
    group.fill(ids, weights)
    assert group.read() == naive.group_experts(ids, weights)


@pytest.mark.parametrize(("rows", "top_k", "num_experts"), ROUTINGS)
def test_three_threads_group_like_one(rows: int, top_k: int, num_experts: int) -> None:
    """Shares of the experts sorted at the same time make the same group."""
    ids, weights = routing(rows, top_k, num_experts)
    group = Group(num_experts, rows * top_k)
    shares = [(num_experts * i // 3, num_experts * (i + 1) // 3) for i in range(3)]
    threads = [
        threading.Thread(target=group.fill, args=(ids, weights, first, last))
        for first, last in shares
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert group.read() == naive.group_experts(ids, weights)


@pytest.mark.parametrize(("rows", "top_k", "num_experts"), [(1, 8, 128), (5, 2, 8), (64, 4, 20)])
@pytest.mark.parametrize("sockets", [2, 4])
@pytest.mark.parametrize("threads", [1, 3])
def test_sockets_group_their_own_experts(
    rows: int, top_k: int, num_experts: int, sockets: int, threads: int
) -> None:
    """Together all assignments, each once, at the index its expert has among those held."""
    ids, weights = routing(rows, top_k, num_experts)
    held = num_experts // sockets
    found: Groups = []
    for begin in range(0, num_experts, held):
        group = Group(held, rows * top_k)
        # Backwards: no share of the experts may lean on another one's work.
        for i in reversed(range(threads)):
            shares = held * i // threads, held * (i + 1) // threads
            group.fill(ids, weights, *shares, first_expert=begin)
        mine = group.read(int(((ids >= begin) & (ids < begin + held)).sum()))
        assert all(0 <= expert < held for expert, _, _ in mine)
        found += [(begin + expert, members, values) for expert, members, values in mine]
    assert found == naive.group_experts(ids, weights)


def test_a_socket_nobody_chose() -> None:
    """No active expert, and down then gives zeros instead of what was there."""
    ids, weights = np.array([[0, 1], [1, 3]], np.int32), np.ones((2, 2), np.float32)
    group = Group(4, 4)
    group.fill(ids, weights, first_expert=4)
    assert group.read(0) == []
    out = np.full((2, 64), np.nan, np.float32)
    panel = np.full(64 * 64, 0x3F80, np.uint16)
    buffer = scratch(SCRATCH_BYTES)
    experts_down(
        address(panel), 128, address(panel), 32, 1, 4, group.address, 2, 0, 1, address(out), 256,
        address(buffer),
    )  # fmt: skip
    assert (out == 0).all()


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_group_all(rows: int) -> None:
    """A dense MLP's group: expert 0 with every row at weight 1, and no expert without rows."""
    group = Group(1, rows)
    group_all(group.address, rows)
    assert num_active(group.address) == min(rows, 1)
    if rows:
        assert group.read() == [(0, list(range(rows)), [1.0] * rows)]


@dataclass(frozen=True)
class Mlp:
    """Random experts, row-major and packed."""

    gate: list[Bits]
    up: list[Bits]
    down: list[Bits]
    packed_up: Bits
    packed_down: Bits

    @classmethod
    def random(cls, num_experts: int, hidden: int, intermediate: int) -> Mlp:
        rng = np.random.default_rng([num_experts, hidden, intermediate])

        def draw(outputs: int, inputs: int) -> list[Bits]:
            scale = np.float32(inputs**-0.5)
            shape = (num_experts, outputs, inputs)
            return list(to_bf16(rng.standard_normal(shape, np.float32) * scale))

        gate, up = draw(intermediate, hidden), draw(intermediate, hidden)
        down = draw(hidden, intermediate)
        packed_up = np.stack([pack_gate_up(g, u) for g, u in zip(gate, up, strict=True)])
        return cls(gate, up, down, packed_up, np.stack([pack_panels(d) for d in down]))


HIDDEN = 128
# (rows, top_k, experts, intermediate); the last two are dense.
CASES = [
    (1, 2, 8, 64), (1, 8, 20, 96), (5, 2, 8, 38), (40, 3, 6, 130), (100, 4, 20, 66),
    (1, 1, 1, 192), (97, 1, 1, 70),
]  # fmt: skip
cases = pytest.mark.parametrize(("rows", "top_k", "num_experts", "intermediate"), CASES)


class Run:
    """One routed batch, its group, and the two kernels on it."""

    def __init__(self, rows: int, top_k: int, num_experts: int, intermediate: int) -> None:
        self.rows, self.total, self.intermediate = rows, rows * top_k, intermediate
        self.mlp = Mlp.random(num_experts, HIDDEN, intermediate)
        self.x = to_bf16(np.random.default_rng(rows).standard_normal((rows, HIDDEN), np.float32))
        self.group = Group(num_experts, self.total)
        if num_experts == 1:
            group_all(self.group.address, rows)
        else:
            self.group.fill(*routing(rows, top_k, num_experts))
        self.groups = self.group.read()
        self.panels = num_up_panels(intermediate)
        self.scratch = scratch(SCRATCH_BYTES)

    def up(self, panel_run: int = 1, row_run: int = 1 << 20, reverse: bool = False) -> Bits:
        """Activated rows [assignment][whole panels], computed item by item."""
        width = self.panels * 32
        out = np.full((self.total, width), 0x7FC1, np.uint16)
        runs, row_runs = -(-self.panels // panel_run), -(-self.rows // row_run)
        items = range(len(self.groups) * runs * row_runs)
        for item in reversed(items) if reverse else items:
            experts_up(
                address(self.x), HIDDEN * 2, address(self.mlp.packed_up), HIDDEN // 2, self.panels,
                self.group.num_experts, self.group.address, self.total, panel_run, row_run,
                row_runs, item, item + 1, address(out), width * 2, address(self.scratch),
            )  # fmt: skip
        return out

    def down(self, activated: Bits, step: int = 2) -> F32:
        """Sums [row][hidden], `step` panels at a time."""
        out = np.full((self.rows, HIDDEN), np.nan, np.float32)
        for panel in range(0, HIDDEN // 64, step):
            experts_down(
                address(activated), activated.shape[1] * 2, address(self.mlp.packed_down),
                self.intermediate // 2, HIDDEN // 64, self.group.num_experts, self.group.address,
                self.rows, panel, panel + step, address(out), HIDDEN * 4,
                address(self.scratch),
            )  # fmt: skip
        return out

    def of_groups(self, activated: Bits) -> list[Bits]:
        """The activated rows of every group, without padding."""
        begins = np.cumsum([0] + [len(rows) for _, rows, _ in self.groups])
        pairs = zip(begins, begins[1:], strict=False)
        return [activated[low:high, : self.intermediate] for low, high in pairs]


@cases
def test_experts_up_matches_naive(
    rows: int, top_k: int, num_experts: int, intermediate: int
) -> None:
    """Idle experts, single experts and partial last panels; padding comes out as zeros."""
    run = Run(rows, top_k, num_experts, intermediate)
    activated = run.up()
    assert not activated[:, intermediate:].any()
    for (expert, members, weights), got in zip(run.groups, run.of_groups(activated), strict=True):
        x = run.x[members]
        gate, up = run.mlp.gate[expert], run.mlp.up[expert]
        expected = naive.experts_up(x, gate, up, weights)
        spread = multiply_bound(x, gate) * multiply_bound(x, up)
        error = np.abs(from_bf16(got) - expected)
        assert (error <= TOL["bf16"] * np.abs(expected) + TOL["f32"] * spread).all()


@cases
def test_experts_down_matches_naive(
    rows: int, top_k: int, num_experts: int, intermediate: int
) -> None:
    """The weighted sum over a row's experts; what was in `out` before does not matter."""
    run = Run(rows, top_k, num_experts, intermediate)
    activated = run.up()
    hidden = run.of_groups(activated)
    expected = naive.experts_down(hidden, run.mlp.down, rows, run.groups)
    bound = naive.experts_down(
        [magnitude(bits) for bits in hidden], [magnitude(down) for down in run.mlp.down], rows,
        run.groups,
    )  # fmt: skip
    assert (np.abs(run.down(activated) - expected) <= TOL["f32"] * bound).all()


@cases
def test_results_do_not_depend_on_how_items_are_cut(
    rows: int, top_k: int, num_experts: int, intermediate: int
) -> None:
    """Any runs of panels and rows, in any order, give the same bits."""
    run = Run(rows, top_k, num_experts, intermediate)
    activated = run.up()
    for panel_run, row_run in ((2, 1 << 20), (1, 7), (3, 32), (4, 256)):
        assert np.array_equal(activated, run.up(panel_run, row_run, reverse=True))
    assert np.array_equal(run.down(activated, 2), run.down(activated, 1))


def test_a_row_does_not_depend_on_the_others() -> None:
    """Bit-equal sums for a row alone and in a batch that shares its experts."""
    rows, top_k, num_experts, intermediate = 100, 4, 20, 66
    run = Run(rows, top_k, num_experts, intermediate)
    together = run.down(run.up())
    ids, weights = routing(rows, top_k, num_experts)
    for row in (0, 17, 99):
        alone = Run(1, top_k, num_experts, intermediate)
        alone.x = run.x[row : row + 1].copy()
        alone.group.fill(ids[row : row + 1].copy(), weights[row : row + 1].copy())
        alone.groups = alone.group.read()
        assert np.array_equal(alone.down(alone.up())[0], together[row])
