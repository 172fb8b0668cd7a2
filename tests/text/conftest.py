"""The tiny tokenizer and its chat encoders."""

from __future__ import annotations

from pathlib import Path

import pytest

from ellm_serve.text import ChatEncoder, ChatTemplate, Tokenizer
from tests.text.tiny_tokenizer import write_tiny_tokenizer

TEMPLATES = Path(__file__).parent / "templates"


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(tokenizer_dir)


@pytest.fixture(scope="session", params=["reasoning", "xml_calls", "strict"])
def template_source(request: pytest.FixtureRequest) -> str:
    return (TEMPLATES / f"{request.param}.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def encoder(tokenizer: Tokenizer) -> ChatEncoder:
    source = (TEMPLATES / "reasoning.jinja").read_text(encoding="utf-8")
    return ChatEncoder(tokenizer, ChatTemplate(source))


@pytest.fixture(scope="session")
def xml_encoder(tokenizer: Tokenizer) -> ChatEncoder:
    source = (TEMPLATES / "xml_calls.jinja").read_text(encoding="utf-8")
    return ChatEncoder(tokenizer, ChatTemplate(source))
