"""Chooses tokens and reports log-probabilities, one row of logits at a time.

Log-probabilities are those of the raw logits, before bias, penalties and temperature. A draw
depends on the request's seed and the token's absolute position, never on other rows, earlier draws
or the split of the work: the same seed and prompt give the same tokens. Ties go to the lowest id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ellm_kernels import sampling as kernels
from ellm_serve.engine.logits import LogitsProcessor
from ellm_serve.engine.token_mask import TokenMask
from ellm_serve.errors import EngineError
from ellm_serve.request import SamplingParams, TokenLogprobs

MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled token, with its log-probabilities if the request wants them."""

    token_id: int
    logprobs: TokenLogprobs | None


class Sampler:
    """Scratch memory for one thread; keeps nothing from row to row."""

    def __init__(self, vocab_size: int) -> None:
        self._row = np.empty(vocab_size, np.float32)
        self._mask = TokenMask(vocab_size)
        multiple = kernels.WEIGHTS_MULTIPLE
        self._weights = np.empty(-(-vocab_size // multiple) * multiple, np.float32)
        self._ids = np.empty(vocab_size, np.int32)
        self._border = np.empty(vocab_size, np.int32)
        self._histogram = np.empty(kernels.NUM_BUCKETS, np.float64)

    def choose(
        self,
        logits: NDArray[np.float32],
        params: SamplingParams,
        processor: LogitsProcessor,
        seed: int,
        position: int,
        num_output_tokens: int,
    ) -> Choice:
        """The token at `position`, given the logits of the one before."""
        row = logits
        if processor.changes(num_output_tokens):
            np.copyto(self._row, logits)
            row = self._row
            processor.apply(row, num_output_tokens, self._mask)
        best = _argmax(row, constrained=row is not logits)
        token = best if params.greedy else self._draw(row, best, params, seed, position)
        if params.logprobs is None:
            return Choice(token, None)
        return Choice(token, self.logprobs(logits, token, params.logprobs))

    def _draw(
        self, row: NDArray[np.float32], best: int, params: SamplingParams, seed: int, position: int
    ) -> int:
        count = kernels.keep(
            row, best, params.temperature, params.min_p, max(params.top_k, 0), params.top_p,
            self._weights, self._ids, self._border, self._histogram,
        )  # fmt: skip
        point = kernels.uniform(seed & MAX_SEED, position)
        return int(kernels.pick(self._weights, self._ids, count, point))

    def logprobs(self, logits: NDArray[np.float32], token_id: int, count: int) -> TokenLogprobs:
        """Raw log-probability and rank of a token, and the `count` most likely ones."""
        total = kernels.log_sum_exp(logits, _argmax(logits), self._weights)
        top = np.empty(min(count, logits.size), np.int64)
        if top.size:
            kernels.top_ids(logits, top)
        return TokenLogprobs(
            token_id,
            min(float(logits[token_id]) - total, 0.0),
            kernels.rank(logits, token_id),
            tuple((int(token), min(float(logits[token]) - total, 0.0)) for token in top),
        )

    def prompt_logprobs(
        self, logits: NDArray[np.float32], token_ids: Sequence[int], count: int
    ) -> list[TokenLogprobs]:
        """One entry per row: how likely the token after it was."""
        pairs = zip(logits, token_ids, strict=True)
        return [self.logprobs(row, token, count) for row, token in pairs]


def _argmax(row: NDArray[np.float32], constrained: bool = False) -> int:
    best = int(kernels.argmax(row))
    if constrained and best >= 0 and row[best] == -np.inf:
        raise EngineError("What the request forbids leaves no token to choose.")
    if best < 0 or not np.isfinite(row[best]):
        value = "NaN" if best < 0 else f"a maximum of {row[best]}"
        raise EngineError(f"The model's logits are not usable: {value}.")
    return best
