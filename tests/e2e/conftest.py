"""One engine on the built-in model for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ellm_serve import LLM


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM("builtin", sequence_length=2048) as model:
        yield model
