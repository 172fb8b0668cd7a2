"""What a request changes in its logits before a token is chosen.

Order: what the grammar forbids, then all but the allowed ids masked, then the last ids of bad
words, then logit_bias, then end ids until `min_tokens` (so a bias cannot bring anything back), then
repetition, presence and frequency penalties. If the grammar leaves nothing but an end, it comes,
whatever the others say. Works in place on a copy of the row; O(vocabulary) memory only for requests
that ask for penalties or allowed ids.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ellm_kernels import sampling as kernels
from ellm_serve.engine.token_mask import TokenMask
from ellm_serve.grammar.constraint import Constraint
from ellm_serve.request import SamplingParams

# Dividing by less would leave the range of float32; no token's rank changes any more down here.
_LEAST_PENALTY = 1e-30


class LogitsProcessor:
    """One sequence's adjustments. `observe` keeps its counts in step with the output."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        end_ids: frozenset[int],
        vocab_size: int,
        constraint: Constraint | None = None,
    ) -> None:
        self._params = params
        self._constraint = constraint
        self._min_tokens = params.min_tokens if end_ids else 0
        self._ends = end_ids
        self._end_ids = np.array(sorted(end_ids), np.int64)
        self._bias_ids = np.array([token for token, _ in params.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in params.logit_bias], np.float32)
        allowed = params.allowed_token_ids
        self._masked: NDArray[np.bool_] | None = None  # [token]
        if allowed is not None:
            self._masked = np.ones(vocab_size, np.bool_)
            self._masked[np.array(allowed, np.int64)] = False
        single = [word[0] for word in params.bad_words if len(word) == 1]
        self._bad_ids = np.array(single, np.int64)
        # Longer bad words by the token before their last.
        self._bad_words: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in params.bad_words:
            if len(word) > 1:
                self._bad_words[word[-2]].append(word)
        # The end of the output, as long as a bad word may look back.
        self._tail: deque[int] = deque(maxlen=max(map(len, params.bad_words), default=1) - 1)
        self._penalizes = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self._always = (
            self._penalizes
            or self._bias_ids.size > 0
            or self._masked is not None
            or constraint is not None
            or len(params.bad_words) > 0
        )
        size = vocab_size if self._penalizes else 0
        self._in_prompt = np.zeros(size, np.uint8)  # [token]
        self._output_counts = np.zeros(size, np.int32)  # [token]
        if self._penalizes:
            self._in_prompt[np.array(prompt_token_ids, np.int64)] = 1

    def changes(self, num_output_tokens: int) -> bool:
        """Whether `apply` would do anything for the next token."""
        return self._always or num_output_tokens < self._min_tokens

    def apply(self, row: NDArray[np.float32], num_output_tokens: int, mask: TokenMask) -> None:
        """Adjusts the logits of the next token in place.

        Raises:
            EngineError: the grammar has no next token.
        """
        if self._constraint is not None:
            complete = self._constraint.fill(mask.words)
            mask.apply(row)
            if complete:
                return
        if self._masked is not None:
            np.copyto(row, -np.inf, where=self._masked)
        row[self._bad_ids] = -np.inf
        row[self._completing_ids()] = -np.inf
        # Not `row[ids] += bias`, which would add only one of two entries for the same token.
        np.add.at(row, self._bias_ids, self._bias)
        if num_output_tokens < self._min_tokens:
            row[self._end_ids] = -np.inf
        if self._penalizes:
            kernels.penalize(
                row,
                self._in_prompt,
                self._output_counts,
                max(self._params.repetition_penalty, _LEAST_PENALTY),
                self._params.presence_penalty,
                self._params.frequency_penalty,
            )

    def _completing_ids(self) -> list[int]:
        """The last id of each longer bad word whose other ids are the end of the output."""
        words = self._bad_words.get(self._tail[-1]) if self._tail else None
        if words is None:
            return []
        tail = tuple(self._tail)
        return [word[-1] for word in words if tail[len(tail) - len(word) + 1 :] == word[:-1]]

    def observe(self, token_id: int) -> None:
        """Counts a token of the output.

        Raises:
            EngineError: the grammar does not allow it.
        """
        if self._constraint is not None and token_id not in self._ends:
            self._constraint.advance(token_id)
        self._tail.append(token_id)
        if self._penalizes:
            self._output_counts[token_id] += 1
