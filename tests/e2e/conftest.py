"""One engine on the built-in model per test module; its threads are gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ellm_serve import LLM


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("builtin", sequence_length=2048) as model:
        yield model
