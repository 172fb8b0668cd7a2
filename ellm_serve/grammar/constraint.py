"""What a compiled grammar says about one sequence: the tokens that may come next."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from ellm_serve.errors import EngineError
from ellm_serve.grammar.matching import failure, is_dead_end

# CPU time that a sequence may cost beside what each token adds; everyone else waits for it.
_BURST_S = 0.1
_PER_TOKEN_S = 0.002


class CompiledGrammar:
    """A grammar ready for any number of sequences, at the same time and one after another.

    They share what the library finds out about the grammar on the way. That includes having run
    out of its fuel, so a grammar that has `failed` serves no new sequence.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self.vocab_size = vocab_size
        self.failed = False

    def constraint(
        self,
        end_ids: Iterable[int],
        last_resort_ids: Iterable[int] = (),
        after_token_id: int | None = None,
    ) -> Constraint:
        """The state of one new sequence.

        Args:
            end_ids: tokens that end the sequence; possible where the answer is complete.
            last_resort_ids: the same, but possible only if nothing else is.
            after_token_id: the grammar holds from behind this token on (the end of a model's
                thoughts); before it everything is possible but an end.
        """
        matcher = self._matcher.deep_copy()
        return Constraint(self, matcher, _Bits(end_ids), _Bits(last_resort_ids), after_token_id)


class _Bits:
    """Some token ids as bits of a mask."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._places = [(token >> 5, np.uint32(1 << (token & 31))) for token in token_ids]

    def set(self, mask: NDArray[np.uint32]) -> None:
        """Allows the tokens."""
        for word, bit in self._places:
            mask[word] |= bit

    def clear(self, mask: NDArray[np.uint32]) -> None:
        """Forbids the tokens."""
        for word, bit in self._places:
            mask[word] &= ~bit


class Constraint:
    """Follows one sequence; used by the engine's loop thread alone.

    What an ambiguous grammar costs grows with the answer, without any bound in the library. So the
    time is counted, and who keeps asking for too much ends.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        matcher: LLMatcher,
        ends: _Bits,
        last_resorts: _Bits,
        after_token_id: int | None,
    ) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._ends = ends
        self._last_resorts = last_resorts
        self._after_token_id = after_token_id
        self._allowance_s = _BURST_S

    def fill(self, mask: NDArray[np.uint32]) -> bool:
        """Sets the bits of the tokens that may come next, 32 to a word, and clears all others.

        The mask has one bit more than the vocabulary has tokens. True: the answer is complete and
        nothing but an end is possible.

        Raises:
            EngineError: no token is possible, or to tell which are needs too much work.
        """
        if self._after_token_id is not None:
            mask.fill(0xFFFFFFFF)
            self._ends.clear(mask)
            self._last_resorts.clear(mask)
            return False
        start = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._spend(start)
        if self._matcher.is_error():
            raise self._failure()
        if not self._take_end(mask):
            return False
        complete = not mask.any()
        self._ends.set(mask)
        if complete:
            self._last_resorts.set(mask)
        return complete

    def advance(self, token_id: int) -> None:
        """Takes the token that was chosen.

        Raises:
            EngineError: the grammar does not allow it.
        """
        if self._after_token_id is not None:
            if token_id == self._after_token_id:
                self._after_token_id = None
            return
        self._allowance_s = min(self._allowance_s + _PER_TOKEN_S, _BURST_S)
        start = time.thread_time()
        allowed = self._matcher.consume_token(token_id)
        self._spend(start)
        if not allowed:
            raise self._failure()

    def _spend(self, start: float) -> None:
        self._allowance_s -= time.thread_time() - start
        if self._allowance_s < 0:
            raise EngineError("The grammar needs too much work for an answer of this length.")

    def _take_end(self, mask: NDArray[np.uint32]) -> bool:
        """Whether the answer may end here; the library's bit for that is cleared."""
        word, bit = self._grammar.vocab_size >> 5, np.uint32(1 << (self._grammar.vocab_size & 31))
        may_end = bool(mask[word] & bit)
        mask[word] &= ~bit
        return may_end

    def _failure(self) -> EngineError:
        if is_dead_end(self._matcher):
            return EngineError("The answer cannot follow its grammar: no token is left.")
        self._grammar.failed = True
        return EngineError(f"The answer cannot follow its grammar: {failure(self._matcher)}.")
