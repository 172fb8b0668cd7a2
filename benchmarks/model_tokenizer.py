"""A tokenizer of any size for models of random weights, so that they can be served and talked to.

It is the built-in model's, with its control tokens and chat template, and as many further tokens as
the vocabulary has room for: joined pairs of tokens it has already. Every id is text, as in a real
vocabulary, and a text of random ids costs as much to decode.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ellm_serve

_BUILTIN = Path(ellm_serve.__file__).parent / "builtin"
_BESIDE = ("tokenizer_config.json", "chat_template.jinja")


def write_tokenizer(out: Path, vocab_size: int) -> int:
    """Writes the files into a model's directory; returns the id that ends an answer."""
    spec: dict[str, Any] = json.loads((_BUILTIN / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, merges = spec["model"]["vocab"], spec["model"]["merges"]
    taken = {token["content"]: token["id"] for token in spec["added_tokens"]}
    first = max(*vocab.values(), *taken.values()) + 1
    words = [token for token in vocab if token.isalpha() and token not in taken]
    for index, pair in zip(range(first, vocab_size), _new_pairs(words, set(vocab)), strict=False):
        vocab["".join(pair)] = index
        merges.append(pair)
    (out / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    for name in _BESIDE:
        shutil.copyfile(_BUILTIN / name, out / name)
    return int(taken["<|im_end|>"])


def _new_pairs(words: Sequence[str], known: set[str]) -> Iterator[list[str]]:
    for left in words:
        for right in words:
            if left + right not in known:
                known.add(left + right)
                yield [left, right]
