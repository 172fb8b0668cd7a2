"""AnswerText: the tokens of one answer in, the text its reader may see out.

Puts the detokenizer and the stop strings together, token by token, so that the result does not
depend on how many tokens arrive at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ellm_serve.text.detokenizer import IncrementalDetokenizer
from ellm_serve.text.stop import StopStrings
from ellm_serve.text.tokenizer import Tokenizer


class AnswerText:
    """The text of one sequence, as its tokens arrive, up to its first stop string.

    include_stop: the stop string is shown. skip_special: special tokens are not.
    min_tokens: a stop string that is complete within so many tokens does not count.

    Raises:
        InvalidRequest: too many stop strings, an empty one, or one that is too long.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special=skip_special)
        self._stop = StopStrings(stop, include_in_output=include_stop)
        self._min_tokens = min_tokens
        self.num_tokens = 0

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did.

        `num_tokens` then counts the tokens up to the one that completed it; later ones are not
        part of the answer.
        """
        return self._stop.matched

    def push(self, token_ids: Iterable[int]) -> str:
        """What the reader may see after these tokens; nothing once a stop string has matched."""
        text = ""
        for token_id in token_ids:
            if self.matched is not None:
                break
            self.num_tokens += 1
            piece = self._detokenizer.push(token_id)
            text += self._stop.push(piece, armed=self.num_tokens > self._min_tokens)
        return text

    def finish(self) -> str:
        """What was held back; at the end of the sequence."""
        if self.matched is not None:
            return ""
        rest = self._detokenizer.flush()
        return self._stop.push(rest, armed=self.num_tokens > self._min_tokens) + self._stop.flush()
