"""Tokenizer: a byte-level BPE `tokenizer.json`, as transformers would use it.

Text is encoded as ordinary text unless the caller asks for control tokens: a user who writes
"<|im_end|>" must not end a turn. Decoding goes by bytes, so that one token, many tokens and a
stream of tokens all give the same characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from ellm_serve.errors import ModelError
from ellm_serve.text.control_text import ControlSpellings, MarkedText
from ellm_serve.text.plain import without_surrogates

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte.

    Printable Latin-1 bytes stand for themselves; the rest follow, in order, from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """Strings to token ids and back. Ids without a token (padding of the model) have no bytes."""

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the named ones, as templates know them (`eos_token`, ...)."""
        self._backend = backend
        # Shares the model; without added tokens it takes every spelling as ordinary text.
        self._ordinary = tokenizers.Tokenizer(backend.model)
        self._ordinary.normalizer = backend.normalizer
        self._ordinary.pre_tokenizer = backend.pre_tokenizer
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._control_ids = {content: token_id for token_id, content in self._added.items()}
        self.special_tokens = dict(special_tokens)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.spellings = ControlSpellings({t.content: t.special for t in added.values()})
        self.vocab_size = max(backend.get_vocab(True).values(), default=-1) + 1

    @classmethod
    def from_dir(cls, path: Path) -> Tokenizer:
        """Reads `tokenizer.json` and, if they are there, the configuration files beside it."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{path} has no tokenizer.json; copy it from the model's repository")
        spec = _read_object(file)
        if "ByteLevel" not in _types_in(spec.get("decoder")):
            raise ModelError(f"{file} is not a byte-level BPE tokenizer, the only kind supported")
        config = _read_object(path / "tokenizer_config.json")
        legacy = _read_object(path / "special_tokens_map.json")
        # A file may come with padding or truncation switched on, which would change prompts.
        backend = tokenizers.Tokenizer.from_str(
            json.dumps({**spec, "truncation": None, "padding": None})
        )
        _add_configured(backend, config.get("added_tokens_decoder"), path)
        return cls(backend, {**_named_tokens(legacy), **_named_tokens(config)})

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end token that the tokenizer's configuration names."""
        return self.token_to_id(self.special_tokens.get("eos_token", ""))

    @property
    def control_ids(self) -> frozenset[int]:
        """Every added token, special or not (`<think>` is not a special one)."""
        return frozenset(self._added)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The token's name in the vocabulary; None if there is no such id."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def is_special(self, token_id: int) -> bool:
        """Whether the token is hidden from readers by default."""
        return token_id in self.special_ids

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids; control tokens only with `allow_special`, as transformers does it."""
        text = without_surrogates(text)
        if allow_special:
            return _ids(self._backend, text)
        return self._encode_ordinary(text)

    def encode_marked(self, marked: MarkedText) -> list[int]:
        """Token ids of a text whose control tokens count everywhere but in its literal spans.

        Ordinary text between two control tokens is encoded as one, across the borders of spans.
        """
        if not marked.literal_spans:
            return self.encode(marked.text, allow_special=True)
        ids: list[int] = []
        start = 0
        for low, high in self._control_places(marked):
            ids += self._encode_ordinary(marked.text[start:low])
            ids.append(self._control_ids[marked.text[low:high]])
            start = high
        return ids + self._encode_ordinary(marked.text[start:])

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of some tokens; bytes that are no UTF-8 become U+FFFD."""
        shown = (i for i in ids if not (skip_special and i in self.special_ids))
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for; none if there is no such token."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token = self.id_to_token(token_id) or ""
        try:
            return bytes(_BYTE_OF[char] for char in token)
        except KeyError:
            # Not written in the byte alphabet, so it is text.
            return token.encode()

    def _control_places(self, marked: MarkedText) -> Iterator[tuple[int, int]]:
        edges = [0, *(edge for span in marked.literal_spans for edge in span), len(marked.text)]
        for low, high in zip(edges[::2], edges[1::2], strict=True):
            for match in self.spellings.any_token.finditer(marked.text, low, high):
                yield match.span()

    def _encode_ordinary(self, text: str) -> list[int]:
        if not text:
            return []
        ids = _ids(self._ordinary, text)
        if self._added.keys().isdisjoint(ids):
            return ids
        # The vocabulary holds a control token as a word, too: cut behind its first character.
        cuts = [match.start() + 1 for match in self.spellings.any_token.finditer(text)]
        pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
        encodings = self._ordinary.encode_batch(pieces, add_special_tokens=False)
        return [token_id for encoding in encodings for token_id in encoding.ids]


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """As a batch of one, which unlike a single text lets other Python threads run meanwhile, and
    takes half the time because nobody asks for offsets: 0.94 s against 2.07 s for 2 MB."""
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _read_object(file: Path) -> dict[str, object]:
    """A JSON object; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} does not hold a JSON object; download it again")
    return value


def _types_in(decoder: object) -> set[str]:
    if not isinstance(decoder, Mapping):
        return set()
    parts = decoder.get("decoders", [])
    return {str(decoder.get("type"))}.union(*(_types_in(part) for part in parts))


def _content(token: object) -> str | None:
    """A token is written as a string, or as an object with its content."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _named_tokens(config: Mapping[str, object]) -> dict[str, str]:
    tokens = {name: _content(config.get(name)) for name in _NAMED_TOKENS}
    return {name: content for name, content in tokens.items() if content is not None}


def _add_configured(backend: tokenizers.Tokenizer, decoder: object, path: Path) -> None:
    """Adds the tokens that only tokenizer_config.json lists, as transformers does."""
    if not isinstance(decoder, Mapping):
        return
    for key, token in sorted(decoder.items(), key=lambda entry: int(entry[0])):
        content = _content(token)
        if content is None or backend.token_to_id(content) is not None:
            continue
        special = isinstance(token, Mapping) and bool(token.get("special"))
        backend.add_tokens([AddedToken(content, special=special, normalized=False)])
        if backend.token_to_id(content) != int(key):
            raise ModelError(f"{path}: tokenizer_config.json gives {content!r} an id out of order")
