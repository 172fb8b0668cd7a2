"""The order of operations from logits to a token, and what is reported about it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ellm_serve.engine.logits import LogitsProcessor
from ellm_serve.engine.sampler import Choice, Sampler
from ellm_serve.errors import EngineError
from ellm_serve.request import SamplingParams
from tests.naive import sampling as naive

pytestmark = pytest.mark.usefixtures("compiled_kernels")

VOCAB = 100
Row = NDArray[np.float32]


def random_row(seed: int = 0) -> Row:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * 3).astype(np.float32)


def choose(
    row: Row,
    params: SamplingParams,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    end_ids: frozenset[int] = frozenset(),
    seed: int = 0,
) -> Choice:
    processor = LogitsProcessor(params, prompt, end_ids, VOCAB)
    for token in output:
        processor.observe(token)
    position = len(prompt) + len(output)
    return Sampler(VOCAB).choose(row, params, processor, seed, position, len(output))


def greedy(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, **changes})  # type: ignore[arg-type]


def test_bias_comes_before_penalties() -> None:
    """Repetition divides the biased logit: (2 + 2) / 2 loses to 2.5, where 2 / 2 + 2 would win."""
    row = np.full(VOCAB, -50.0, np.float32)
    row[7], row[9] = 2.0, 2.5
    params = greedy(logit_bias=((7, 2.0),), repetition_penalty=2.0)
    assert choose(row, params).token_id == 7
    assert choose(row, params, prompt=(7,)).token_id == 9


def test_only_allowed_ids_are_chosen() -> None:
    """The best of them, however unlikely; a bias brings nothing else back."""
    row = random_row()
    worst = naive.order(row)[-3:]
    params = greedy(allowed_token_ids=worst, logit_bias=((naive.order(row)[0], 1000.0),))
    assert choose(row, params).token_id == worst[0]
    sampled = SamplingParams(temperature=100.0, allowed_token_ids=tuple(worst))
    drawn = {choose(row, sampled, seed=seed).token_id for seed in range(60)}
    assert drawn == set(worst)


def test_bad_words_are_never_completed() -> None:
    """Only the output counts, not the prompt; a bias does not bring the last id back."""
    row = np.zeros(VOCAB, np.float32)
    row[[7, 8, 9]] = 3.0, 2.0, 1.0
    words = ((7,), (5, 6, 8), (6, 8), (4, 8))
    params = greedy(bad_words=words, logit_bias=((7, 1000.0),))
    assert choose(row, params).token_id == 8
    assert choose(row, params, prompt=(5, 6)).token_id == 8
    assert choose(row, params, output=(6,)).token_id == 9
    assert choose(row, params, output=(6, 4)).token_id == 9
    assert choose(row, params, output=(4, 5)).token_id == 8
    three = greedy(bad_words=((5, 6, 7),))
    assert choose(row, three, output=(6,)).token_id == 7
    assert choose(row, three, output=(1, 6)).token_id == 7
    assert choose(row, three, output=(1, 5, 6)).token_id == 8
    assert choose(row, three, output=(5, 6, 1)).token_id == 7


def test_a_bad_word_longer_than_the_others_looks_back_far_enough() -> None:
    """Each word sees as much of the output as it needs."""
    row = np.zeros(VOCAB, np.float32)
    row[3] = 1.0
    params = greedy(bad_words=((9,), (1, 2, 1, 2, 3)))
    assert choose(row, params, output=(2, 1, 2)).token_id == 3
    assert choose(row, params, output=(1, 2, 1, 2)).token_id == 0
    assert choose(row, params, output=(7, 1, 2, 1, 2)).token_id == 0


def test_masks_come_before_penalties() -> None:
    """A negative penalty, which makes tokens likelier, does not bring a masked one back."""
    row = np.zeros(VOCAB, np.float32)
    params = greedy(allowed_token_ids=(3, 4), bad_words=((3,),), presence_penalty=-2.0)
    assert choose(row, params, output=(3, 5, 5)).token_id == 4


def test_bias_entries_of_one_token_add_up() -> None:
    """Two entries for a token are both applied."""
    row = np.zeros(VOCAB, np.float32)
    row[3] = 1.5
    assert choose(row, greedy(logit_bias=((8, 1.0), (8, 1.0)))).token_id == 8


def test_min_tokens_wins_over_bias_and_ends_in_time() -> None:
    """End ids are masked for exactly min_tokens tokens, however much they are wanted."""
    row = np.zeros(VOCAB, np.float32)
    params = greedy(min_tokens=2, logit_bias=((5, 100.0), (6, 99.0)))
    ends = frozenset({5, 6})
    assert choose(row, params, output=(), end_ids=ends).token_id == 0
    assert choose(row, params, output=(0,), end_ids=ends).token_id == 0
    assert choose(row, params, output=(0, 0), end_ids=ends).token_id == 5


@pytest.mark.parametrize("seed", range(5))
def test_penalties_match_naive(seed: int) -> None:
    """Greedy under all three penalties is the argmax of the slowly penalised row."""
    row = random_row(seed)
    prompt = naive.order(row)[:3]
    output = [*naive.order(row)[2:6], naive.order(row)[2]]
    params = greedy(repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.4)
    expected = naive.argmax(naive.penalize(row, prompt, output, 1.4, 0.6, 0.4))
    assert choose(row, params, prompt, output).token_id == expected


def test_logits_are_left_as_they_were() -> None:
    """The row belongs to the executor, and log-probabilities are taken from it afterwards."""
    row = random_row()
    before = row.copy()
    params = SamplingParams(
        logit_bias=((4, 9.0),), presence_penalty=1.0, min_tokens=1, top_k=3, logprobs=5
    )
    choose(row, params, output=(4,), end_ids=frozenset({1}))
    np.testing.assert_array_equal(row, before)


def test_logprobs_are_raw() -> None:
    """Bias, temperature and filters choose the token; what is reported is the model's own view."""
    row = random_row()
    unlikely = naive.order(row)[-1]
    params = SamplingParams(
        temperature=3.0, top_k=1, logit_bias=((unlikely, 100.0),), logprobs=4, seed=1
    )
    choice = choose(row, params)
    assert choice.token_id == unlikely and choice.logprobs is not None
    logprobs = row.astype(np.float64) - naive.log_sum_exp(row)
    assert choice.logprobs.logprob == pytest.approx(logprobs[unlikely], abs=1e-5)
    assert choice.logprobs.rank == VOCAB
    assert [token for token, _ in choice.logprobs.top] == naive.order(row)[:4]
    for token, value in choice.logprobs.top:
        assert value == pytest.approx(logprobs[token], abs=1e-5)
    assert sum(np.exp(logprobs)) == pytest.approx(1.0)


def test_certain_token_has_logprob_zero() -> None:
    """Rounding never reports a probability above 1; logprobs=0 gives the token alone."""
    row = np.full(VOCAB, -100.0, np.float32)
    row[2] = 100.0
    choice = choose(row, greedy(logprobs=0))
    assert choice.logprobs is not None
    assert (choice.logprobs.logprob, choice.logprobs.rank, choice.logprobs.top) == (0.0, 1, ())
    assert choose(row, greedy()).logprobs is None


def test_temperature_filters_and_seed_decide() -> None:
    """Over many positions exactly the tokens that the filters leave are drawn."""
    row = random_row(3)
    params = SamplingParams(temperature=5.0, top_k=12, top_p=0.85, min_p=0.05)
    processor = LogitsProcessor(params, (1,), frozenset(), VOCAB)
    sampler = Sampler(VOCAB)
    drawn = [sampler.choose(row, params, processor, 9, at, 0).token_id for at in range(600)]
    assert len(set(drawn)) > 5
    assert sorted(set(drawn)) == naive.keep(row, 5.0, 0.05, 12, 0.85)
    again = [sampler.choose(row, params, processor, 9, at, 0).token_id for at in range(600)]
    other = [sampler.choose(row, params, processor, 10, at, 0).token_id for at in range(600)]
    assert drawn == again != other


@pytest.mark.parametrize("seed", [-1, 0, (1 << 63) - 1, 1 << 63, 1 << 80])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    """Clients send negative and 64-bit seeds."""
    params = SamplingParams()
    row = random_row()
    assert choose(row, params, seed=seed) == choose(row, params, seed=seed)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_are_an_error(value: float, temperature: float) -> None:
    """A broken row must not silently become token 0."""
    row = random_row()
    row[50] = value
    with pytest.raises(EngineError, match="not usable"):
        choose(row, SamplingParams(temperature=temperature, logprobs=1))


def test_everything_masked_is_an_error() -> None:
    """If every token is an end id, min_tokens leaves nothing to choose."""
    with pytest.raises(EngineError, match="leaves no token"):
        choose(random_row(), greedy(min_tokens=1), end_ids=frozenset(range(VOCAB)))


def test_prompt_logprobs_are_of_the_next_token() -> None:
    """Row i tells how likely token i + 1 of the prompt was."""
    rows = np.stack([random_row(seed) for seed in range(3)])
    entries = Sampler(VOCAB).prompt_logprobs(rows, [5, 6, 7], 2)
    for row, token, entry in zip(rows, (5, 6, 7), entries, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]) - naive.log_sum_exp(row), abs=1e-5)
        assert entry.rank == naive.rank(row, token)
