"""/tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ellm_serve.errors import InvalidRequest, ModelNotFound
from ellm_serve.protocol.validation import DETOKENIZE, TOKENIZE
from tests.serve.scripted import Harness, harness, run, tokenizer


@pytest.fixture(scope="module")
def served() -> Iterator[Harness]:
    with harness() as scripted:
        yield scripted


def tokenize(served: Harness, **body: Any) -> Any:
    request = TOKENIZE.validate_python(body)
    return run(served.service.tokenize(request, served.context()))


def detokenize(served: Harness, tokens: list[int], **body: Any) -> str:
    request = DETOKENIZE.validate_python({"tokens": tokens} | body)
    return run(served.service.detokenize(request, served.context())).prompt


def test_text(served: Harness) -> None:
    """Ids, their number, and the vocabulary's own spelling if asked for."""
    answer = tokenize(served, prompt="Hi you")
    assert (answer.tokens, answer.count, answer.max_model_len) == ([39, 72, 666], 3, 2048)
    assert answer.token_strs is None
    assert tokenize(served, prompt="Hi you", return_token_strs=True).token_strs == [
        *("H", "i", "Ġyou")
    ]
    assert tokenize(served, prompt="").tokens == []


def test_any_length(served: Harness) -> None:
    """More than fits in a slot, and control tokens count as in a raw prompt."""
    text = "<|im_end|> hello" * 3000
    assert tokenize(served, prompt=text).tokens == tokenizer.encode(text, allow_special=True)


def test_a_text_that_never_fits(served: Harness) -> None:
    """Reading it would cost minutes, on this path as on any other."""
    for body in (
        {"prompt": "a b " * 500_000},
        {"messages": [{"role": "user", "content": "a b " * 500_000}]},
    ):
        with pytest.raises(InvalidRequest, match="contains 20000.. characters"):
            tokenize(served, **body)


def test_conversation(served: Harness) -> None:
    """The same ids that the chat endpoint would use."""
    messages = [{"role": "user", "content": "hi"}]
    tokens = tokenize(served, messages=messages).tokens
    assert tokens == [2002, 1878, 198, 71, 72, 2000, 198, 2002, 445, 453, 414, 198]
    assert tokenize(served, messages=messages, add_generation_prompt=False).tokens == tokens[:7]
    long = [{"role": "user", "content": "hi " * 5000}]
    assert tokenize(served, messages=long).count > 5000


def test_back(served: Harness) -> None:
    """The text of ids; those that are not in the vocabulary have none."""
    text = "Hi 世界 🙂<|im_end|>"
    assert detokenize(served, tokenizer.encode(text, allow_special=True)) == text
    assert detokenize(served, [39, 5000, 1 << 40, 72]) == "Hi"
    assert detokenize(served, [39] * 10_000) == "H" * 10_000


def test_refusals(served: Harness) -> None:
    """An unknown model, and a template of the request's own."""
    for call in (
        lambda: tokenize(served, prompt="x", model="nope"),
        lambda: detokenize(served, [1], model="nope"),
    ):
        with pytest.raises(ModelNotFound):
            call()
    with pytest.raises(InvalidRequest, match="untrusted"):
        tokenize(served, messages=[{"role": "user", "content": "x"}], chat_template="{{ 1 }}")
