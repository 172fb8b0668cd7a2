"""The same text in different tokens, as a model may say it."""

from __future__ import annotations

import random
from functools import cache

from tests.serve.scripted import VOCAB_SIZE, tokenizer

MAX_BYTES = 12


@cache
def _ids_by_bytes() -> dict[bytes, int]:
    ids = range(VOCAB_SIZE)
    found = {tokenizer.token_bytes(i): i for i in ids if not tokenizer.is_special(i)}
    found.pop(b"", None)
    return found


def cut(text: str, seed: int) -> list[int]:
    """Seed 0: the tokenizer's own tokens; 1: single bytes; others: tokens taken at random.

    Tags may become tokens of their own, or be spelt out.
    """
    if seed == 0:
        return tokenizer.encode(text, allow_special=True)
    known, generator, data = _ids_by_bytes(), random.Random(seed), text.encode()
    token_ids, start = [], 0
    while start < len(data):
        sizes = [1] if seed == 1 else range(1, MAX_BYTES + 1)
        pieces = [data[start : start + size] for size in sizes if start + size <= len(data)]
        piece = generator.choice([piece for piece in pieces if piece in known])
        token_ids.append(known[piece])
        start += len(piece)
    return token_ids
