"""The sampling kernels against their slow twins, on rows chosen to be awkward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ellm_kernels import sampling
from tests.naive import sampling as naive

pytestmark = pytest.mark.usefixtures("compiled_kernels")

Row = NDArray[np.float32]
INF = np.inf
MULTIPLE = sampling.WEIGHTS_MULTIPLE


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def rows() -> dict[str, Row]:
    """Rows by what is awkward about them."""
    normal = rng(1).standard_normal
    huge = (normal(700) * 1e30).astype(np.float32)
    masked = (normal(700) * 4).astype(np.float32)
    masked[rng(2).random(700) < 0.5] = -INF
    return {
        "one token": np.array([-3.5], np.float32),
        "two tokens": np.array([1.0, 2.0], np.float32),
        "all equal": np.full(300, 0.25, np.float32),
        "all zero, both signs": np.where(rng(3).random(50) < 0.5, 0.0, -0.0).astype(np.float32),
        "ties": rng(4).integers(-4, 5, 1000).astype(np.float32),
        "flat": (normal(5000) * 0.01).astype(np.float32),
        "normal": (normal(4099) * 3).astype(np.float32),
        "peaked": (normal(2048) * 20).astype(np.float32),
        "all negative": (-np.abs(normal(777)) - 5).astype(np.float32),
        "huge": huge,
        "float32 limits": np.array([3.4e38, -3.4e38, 1e-45, 0.0, -1e-45], np.float32),
        "masked": masked,
        "one left": np.array([-INF, -INF, 7.0, -INF], np.float32),
        "just below the top": np.nextafter(np.full(64, 8, np.float32), np.float32(0)).astype(
            np.float32
        ),
    }


ROWS = rows()
each_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())


class Scratch:
    """The buffers the kernels ask for."""

    def __init__(self, size: int) -> None:
        self.weights = np.full(-(-size // MULTIPLE) * MULTIPLE, np.nan, np.float32)
        self.ids = np.full(size, -1, np.int32)
        self.border = np.full(size, -1, np.int32)
        self.histogram = np.full(sampling.NUM_BUCKETS, np.nan)


def keep(row: Row, temperature: float, min_p: float, top_k: int, top_p: float) -> Any:
    """Kept ids, their count and the scratch memory."""
    scratch = Scratch(row.size)
    count = sampling.keep(
        row, int(sampling.argmax(row)), temperature, min_p, top_k, top_p,
        scratch.weights, scratch.ids, scratch.border, scratch.histogram,
    )  # fmt: skip
    return scratch.ids[:count].tolist(), count, scratch


@each_row
def test_argmax_is_the_lowest_id_of_the_largest(row: Row) -> None:
    """Greedy output must not depend on how a row is scanned; -0 and 0 are a tie."""
    assert sampling.argmax(row) == naive.argmax(row)


@pytest.mark.parametrize("size", [1, 15, 16, 1023, 1024, 1025, 3000])
def test_argmax_at_every_border(size: int) -> None:
    """The block that holds the maximum may be the first, the last or a partial one."""
    for index in {0, size // 2, size - 1}:
        row = np.full(size, -1.0, np.float32)
        row[index] = -0.5
        assert sampling.argmax(row) == index


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])
@pytest.mark.parametrize("index", [0, 1500, 2047])
def test_argmax_notices_every_nan(bits: int, index: int) -> None:
    """A NaN of either sign, quiet or signalling, must not be hidden by larger values."""
    row = rng(7).standard_normal(2048).astype(np.float32)
    row[5] = INF
    row.view(np.uint32)[index] = bits
    assert sampling.argmax(row) == -1


@each_row
def test_log_sum_exp_matches_naive(row: Row) -> None:
    """Log-probabilities are differences to this value."""
    scratch = Scratch(row.size)
    got = sampling.log_sum_exp(row, sampling.argmax(row), scratch.weights)
    assert got == pytest.approx(naive.log_sum_exp(row), rel=1e-6, abs=2e-6)


SETTINGS = [
    (1.0, 0.0, 0, 1.0),
    (0.7, 0.0, 20, 0.8),
    (1.0, 0.0, 1, 1.0),
    (1.0, 0.0, 7, 1.0),
    (1.0, 0.0, 100_000, 1.0),
    (1.0, 0.0, 0, 0.5),
    (1.0, 0.0, 0, 0.95),
    (1.3, 0.0, 0, 1e-9),
    (1.0, 0.05, 0, 1.0),
    (1.0, 1.0, 0, 1.0),
    (2.0, 0.01, 40, 0.9),
    (100.0, 0.0, 33, 0.7),
    (1e-5, 0.0, 3, 0.9),
    (0.3, 0.0, 3, 1.0),
]


@each_row
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_keep_matches_naive(row: Row, setting: tuple[float, float, int, float]) -> None:
    """The set that may be drawn is exactly the one that sorting everything gives."""
    got, _, scratch = keep(row, *setting)
    assert got == naive.keep(row, *setting)
    weights = scratch.weights[got].astype(np.float64)
    chances = naive.probabilities(row, setting[0], got)
    assert weights / weights.sum() == pytest.approx(chances, rel=1e-4, abs=1e-7)


def test_top_k_one_is_greedy() -> None:
    """Among logits that are nearly or exactly equal, top_k=1 still takes what greedy takes."""
    row = np.zeros(100, np.float32)
    row[60], row[40] = np.float32(1e-6), np.float32(2e-6)
    assert keep(row, 1.0, 0.0, 1, 1.0)[0] == [40] == [sampling.argmax(row)]
    assert keep(np.zeros(100, np.float32), 1.0, 0.0, 1, 1.0)[0] == [0]


def test_ties_at_the_border_go_to_the_lowest_ids() -> None:
    """Exactly top_k tokens are kept, and which ones does not depend on the algorithm."""
    row = np.array([1, 3, 2, 2, 3, 2, 2, 0], np.float32)
    assert keep(row, 1.0, 0.0, 4, 1.0)[0] == [1, 2, 3, 4]
    assert keep(row, 1.0, 0.0, 2, 1.0)[0] == [1, 4]


def test_top_p_is_the_smallest_set_that_reaches_it() -> None:
    """Reaching the limit exactly is enough; one token always stays."""
    four = np.zeros(4, np.float32)
    assert keep(four, 1.0, 0.0, 0, 0.5)[0] == [0, 1]
    assert keep(four, 1.0, 0.0, 0, 0.500001)[0] == [0, 1, 2]
    assert keep(four, 1.0, 0.0, 0, 1e-30)[0] == [0]
    # After top_k, the limit counts the mass that is left: 0.6 of two equal tokens needs both.
    assert keep(np.zeros(100, np.float32), 1.0, 0.0, 2, 0.6)[0] == [0, 1]


@each_row
def test_pick_follows_the_cumulative_distribution(row: Row) -> None:
    """Every point between 0 and 1 gives the token whose interval holds it."""
    kept, count, scratch = keep(row, 1.0, 0.0, 0, 1.0)
    edges = np.concatenate(([0.0], np.cumsum(naive.probabilities(row, 1.0, kept))))
    for point in [0.0, *rng(11).random(200), 1.0 - 2.0**-53]:
        place = kept.index(int(sampling.pick(scratch.weights, scratch.ids, count, point)))
        assert edges[place] - 1e-5 <= point <= edges[place + 1] + 1e-5


def test_pick_never_returns_a_token_without_weight() -> None:
    """Points on the very edges must not land on a token that was filtered out."""
    row = np.array([-INF, 0.0, -INF, 0.0, -INF], np.float32)
    kept, count, scratch = keep(row, 1.0, 0.0, 0, 1.0)
    assert kept == [1, 3]
    for point, token in ((0.0, 1), (0.4999, 1), (0.5, 3), (1.0 - 2.0**-53, 3)):
        assert sampling.pick(scratch.weights, scratch.ids, count, point) == token


def test_draws_are_distributed_as_asked() -> None:
    """Chi-square over 20,000 draws of fixed seeds; 9 degrees of freedom, 0.999 quantile 27.9."""
    row = rng(5).standard_normal(10).astype(np.float32)
    kept, count, scratch = keep(row, 0.8, 0.0, 0, 1.0)
    expected = naive.probabilities(row, 0.8, kept) * 20_000
    seen = np.zeros(10)
    for position in range(20_000):
        point = sampling.uniform(position % 7, position)
        seen[sampling.pick(scratch.weights, scratch.ids, count, point)] += 1
    assert ((seen - expected) ** 2 / expected).sum() < 27.9


@each_row
def test_rank_and_top_ids_agree_with_a_full_sort(row: Row) -> None:
    """Rank and alternatives use one order, so the token of rank r is the r-th alternative."""
    expected = naive.order(row)
    out = np.full(min(20, row.size), -1, np.int64)
    sampling.top_ids(row, out)
    assert out.tolist() == expected[: out.size]
    for token in {*expected[:3], expected[-1], expected[row.size // 2]}:
        assert sampling.rank(row, token) == expected.index(token) + 1


@pytest.mark.parametrize(
    "penalties", [(1.0, 0.0, 0.0), (1.5, 0.0, 0.0), (0.8, 1.0, 0.25), (1.0, -2.0, 2.0)], ids=str
)
def test_penalize_matches_naive(penalties: tuple[float, float, float]) -> None:
    """Repetition looks at prompt and output, presence and frequency at the output alone."""
    row = (rng(8).standard_normal(200) * 3).astype(np.float32)
    row[3], row[4] = 0.0, -INF
    prompt = [1, 1, 3, 7, 9]
    output = [7, 7, 7, 4, 20]
    expected = naive.penalize(row, prompt, output, *penalties)
    in_prompt = np.zeros(200, np.uint8)
    in_prompt[prompt] = 1
    counts = np.bincount(output, minlength=200).astype(np.int32)
    sampling.penalize(row, in_prompt, counts, *penalties)
    np.testing.assert_allclose(row, expected, rtol=1e-6)


def test_philox_known_answer() -> None:
    """The first two words of the published answer for an all-zero counter and key."""
    assert sampling.philox(np.uint64(0), np.uint64(0)) == 0x6627E8D5E169C58D


def test_uniform_numbers() -> None:
    """In [0, 1), one per (seed, position), and evenly spread over 16 bins of 4,096."""
    numbers = np.array([sampling.uniform(seed, at) for seed in range(16) for at in range(256)])
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    assert len(set(numbers.tolist())) == numbers.size
    bins = np.bincount((numbers * 16).astype(int), minlength=16)
    # 15 degrees of freedom, 0.999 quantile 37.7.
    assert ((bins - 256.0) ** 2 / 256.0).sum() < 37.7
