"""One compiler and one engine for all tests of grammars: each takes a while to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ellm_serve.engine.engine import Engine
from ellm_serve.grammar.compiler import GrammarCompiler
from tests.grammar.forms import EOS, VOCAB, AnyModel, bounds, tokenizer


@pytest.fixture(scope="session")
def compiler() -> Iterator[GrammarCompiler]:
    """For the built-in tokenizer."""
    with GrammarCompiler.for_model(tokenizer(), VOCAB) as compiler:
        yield compiler


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """On a model that says anything."""
    with Engine(AnyModel(bounds()), eos_token_ids=[EOS]) as engine:
        yield engine
