"""The tiny tokenizer and its chat encoders."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ellm_serve.text import ChatEncoder, ChatTemplate, Tokenizer
from tests.text.tiny_tokenizer import write_tiny_tokenizer

# Examples are not timed: a busy machine is no failure.
settings.register_profile("text", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("text")

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
