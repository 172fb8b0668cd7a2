"""IncrementalDetokenizer: one token id in, printable text out.

Never half a character, never a lost byte: what may still become a character waits, what cannot
become one is U+FFFD at once. All the text together is `bytes.decode("utf-8", "replace")` of all
bytes. The work per token depends on the token alone, not on what came before.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from ellm_serve.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The text of one sequence, as its tokens arrive."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        if token_id in self._skipped:
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        # Python waits for a third byte here, although surrogates are no characters of UTF-8.
        return text + self.flush() if _starts_surrogate(self.pending) else text

    def push_all(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        return "".join(map(self.push, token_ids))

    @property
    def pending(self) -> bytes:
        """The first bytes of a character that is not complete: at most three."""
        return self._decoder.getstate()[0]

    def flush(self) -> str:
        """The text of what still waits; at the end of the sequence."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _starts_surrogate(data: bytes) -> bool:
    return len(data) == 2 and data[0] == 0xED and data[1] >= 0xA0
