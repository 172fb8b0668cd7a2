"""Log-probabilities as the wire shows them: every token by itself, with its true bytes.

Several alternatives are often single bytes of longer characters. Decoded they would all be U+FFFD,
and as keys of one object they would hide each other; OpenAI's `bytes:\\xe4\\xb8` keeps them apart.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

from ellm_serve.protocol.common import PromptLogprob, PromptLogprobs
from ellm_serve.request import TokenLogprobs
from ellm_serve.text.tokenizer import Tokenizer

# JSON has no infinity; this is vLLM's stand-in.
FLOOR = -9999.0

Entry = TokenLogprobs | None
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenNames:
    """What a token is called. `as_ids`: by its number, which is never ambiguous."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def data(self, token_id: int) -> bytes:
        """The bytes of the token."""
        return self._tokenizer.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether readers may be spared it."""
        return self._tokenizer.is_special(token_id)

    def text(self, token_id: int) -> str:
        """The token for people; what is no whole character is U+FFFD."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self.data(token_id).decode("utf-8", "replace")

    def key(self, token_id: int) -> str:
        """The token as a key; tokens with different bytes have different keys."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self.data(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def ranked(entry: TokenLogprobs) -> Iterator[tuple[int, float, int]]:
    """(token id, log-probability, rank): the token itself first, then the most likely others."""
    yield entry.token_id, max(entry.logprob, FLOOR), entry.rank
    for rank, (token_id, logprob) in enumerate(entry.top, start=1):
        if token_id != entry.token_id:
            yield token_id, max(logprob, FLOOR), rank


class CompletionLogprobsWriter:
    """Writes the log-probabilities of one completion, piece by piece.

    `text_offset` is how much text there is before a token.
    """

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._decoder = _Utf8Decoder("replace")
        self._offset = 0
        self._lists = _new_lists()

    def add(
        self, token_ids: Sequence[int], entries: Sequence[Entry], hide_special: bool = False
    ) -> None:
        """The next tokens; a prompt's first one has no entry. Special ones may have no text."""
        offsets, values, names, tops = self._lists.values()
        for token_id, entry in zip(token_ids, entries, strict=True):
            offsets.append(self._offset)
            names.append(self._names.key(token_id))
            values.append(None if entry is None else max(entry.logprob, FLOOR))
            tops.append(None if entry is None else self._top(entry))
            if not (hide_special and self._names.is_special(token_id)):
                self._offset += len(self._decoder.decode(self._names.data(token_id)))

    def take(self) -> dict[str, list[object]]:
        """What was added since the last time."""
        taken, self._lists = self._lists, _new_lists()
        return taken

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        return {self._names.key(token): logprob for token, logprob, _ in ranked(entry)}


def _new_lists() -> dict[str, list[object]]:
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def chat_logprobs(
    names: TokenNames, entries: Sequence[TokenLogprobs], num_top: int
) -> dict[str, object]:
    """The log-probabilities of some tokens of a chat answer, with `num_top` alternatives each."""
    return {"content": [_chat_entry(names, entry, num_top) for entry in entries]}


def _chat_entry(names: TokenNames, entry: TokenLogprobs, num_top: int) -> dict[str, object]:
    candidates = [_named(names, token, logprob) for token, logprob, _ in ranked(entry)]
    return {**candidates[0], "top_logprobs": candidates[:num_top]}


def _named(names: TokenNames, token_id: int, logprob: float) -> dict[str, object]:
    return {
        "token": names.text(token_id),
        "logprob": logprob,
        "bytes": list(names.data(token_id)),
    }


def prompt_logprobs(names: TokenNames, entries: Sequence[Entry]) -> PromptLogprobs:
    """The log-probabilities of a prompt by token id; its first token has none."""
    return [None if entry is None else _prompt_entry(names, entry) for entry in entries]


def _prompt_entry(names: TokenNames, entry: TokenLogprobs) -> dict[int, PromptLogprob]:
    return {
        token: PromptLogprob(logprob=logprob, rank=rank, decoded_token=names.text(token))
        for token, logprob, rank in ranked(entry)
    }
