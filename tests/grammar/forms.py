"""What the tests of grammars share: a real tokenizer, and models that answer anything."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ellm_serve.engine.engine import Engine
from ellm_serve.engine.executor import ExecutorLimits
from ellm_serve.grammar.constraint import CompiledGrammar
from ellm_serve.request import FinishReason, GenerateRequest, SamplingParams
from ellm_serve.text.tokenizer import Tokenizer
from tests.engine.doubles import Consumer, HashExecutor, Prefix, limits

VOCAB = 4096
EOS = 4089
PROMPT = (1, 2, 3)


@cache
def tokenizer() -> Tokenizer:
    """The built-in model's: byte-level BPE with control tokens."""
    return Tokenizer.from_dir(Path(__file__).parents[2] / "ellm_serve/builtin")


def bounds(**changes: int) -> ExecutorLimits:
    """Room for answers of some length."""
    return replace(limits(vocab_size=VOCAB, sequence_length=512, prefill_block=64), **changes)


class AnyModel(HashExecutor):
    """Random logits, with a liking for the tokens that close something, so that answers end.

    habit: a text that is finished when it is begun, as closing tags are.
    """

    def __init__(self, bounds: ExecutorLimits, habit: str = "") -> None:
        super().__init__(bounds)
        self._habit = tuple(tokenizer().encode(habit))
        closing = [t for t in range(VOCAB) if tokenizer().token_bytes(t) in _CLOSING]
        self._liking = np.zeros(bounds.vocab_size, np.float32)
        self._liking[[*closing, EOS, *self._habit[:1]]] = 9.0

    def logits_after(self, chain: bytes, prefix: Prefix) -> NDArray[np.float32]:
        logits = super().logits_after(chain, prefix) + self._liking
        for count in range(1, len(self._habit)):
            if prefix[-count:] == self._habit[:count]:
                logits[self._habit[count]] += 50.0
        return logits


_CLOSING = {b'"', b"}", b"]", b'"}', b'",', b"},", b"END", b"\n"}


def submit(
    engine: Engine,
    grammar: CompiledGrammar | None,
    name: str,
    sampling: SamplingParams,
    **changes: object,
) -> Consumer:
    """Starts one sequence."""
    consumer = Consumer()
    request = GenerateRequest(name, PROMPT, sampling, **changes)  # type: ignore[arg-type]
    engine.submit(request, consumer, grammar=grammar)
    return consumer


def answers(
    engine: Engine, grammar: CompiledGrammar, count: int = 4, **changes: object
) -> list[tuple[str, FinishReason | None]]:
    """Texts of `count` sequences that run together, each with its own seed, and how they ended."""
    sampling = SamplingParams(**{"max_tokens": 200, **changes})  # type: ignore[arg-type]
    consumers = [
        submit(engine, grammar, f"r{seed}", replace(sampling, seed=seed)) for seed in range(count)
    ]
    return [(text(consumer.wait()), consumer.last.finish_reason) for consumer in consumers]


def text(consumer: Consumer) -> str:
    """What the client reads."""
    return tokenizer().decode(consumer.token_ids)
