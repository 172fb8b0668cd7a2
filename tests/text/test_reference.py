"""Prompts and tokens must be those of transformers, byte by byte and id by id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest

from ellm_serve.errors import InvalidRequest
from ellm_serve.text import ChatEncoder, ChatTemplate, Tokenizer
from tests.text.conversations import CASES, CONTINUED

pytestmark = pytest.mark.reference

TEXTS = [
    "",
    "Hello, world! I'm here: 12345.",
    "<|im_start|>user\nHi<|im_end|>\n<think> x </think>",
    "Größe e\u0301 你好 🙂  \n\n\t tail  ",
    "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
]


@pytest.fixture(scope="module")
def reference(tokenizer_dir: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)


def _compare(
    reference: Any,
    encoder: ChatEncoder,
    source: str,
    messages: list[dict[str, Any]],
    arguments: dict[str, Any],
) -> None:
    """The same prompt, or an error on both sides with the template's message in ours."""
    named = {"add_generation_prompt": True, **arguments}
    own = {
        k: named.pop(k)
        for k in ("tools", "add_generation_prompt", "continue_final_message")
        if k in named
    }
    keywords = {"chat_template": source, **own, **named}
    try:
        text = reference.apply_chat_template(messages, tokenize=False, **keywords)
    except jinja2.TemplateError as error:
        with pytest.raises(InvalidRequest) as caught:
            encoder.encode_chat(messages, variables=named, **own)
        assert str(error) in str(caught.value)
        return
    ids = reference.apply_chat_template(messages, return_dict=False, **keywords)
    prompt = encoder.encode_chat(messages, variables=named, **own)
    assert prompt.text == text
    assert prompt.token_ids == ids


@pytest.mark.parametrize("number", range(len(CASES)))
def test_chat_prompt(
    reference: Any, tokenizer: Tokenizer, template_source: str, number: int
) -> None:
    """A space or a key order that differs from training costs the model quality, unseen."""
    encoder = ChatEncoder(tokenizer, ChatTemplate(template_source))
    _compare(reference, encoder, template_source, *CASES[number])


def test_most_cases_render(tokenizer: Tokenizer, template_source: str) -> None:
    """The comparison above would also pass if every rendering failed on both sides."""
    encoder = ChatEncoder(tokenizer, ChatTemplate(template_source))
    num_rendered = 0
    for messages, arguments in CASES:
        variables = {
            "strict": False,
            **{k: v for k, v in arguments.items() if k == "enable_thinking"},
        }
        encoder.encode_chat(messages, tools=arguments.get("tools"), variables=variables)
        num_rendered += 1
    assert num_rendered >= 30


@pytest.mark.parametrize("number", range(len(CASES)))
def test_chat_prompt_unordered_roles(
    reference: Any, tokenizer: Tokenizer, template_source: str, number: int
) -> None:
    """Covers the parts of the strict template behind its check of the roles."""
    messages, arguments = CASES[number]
    encoder = ChatEncoder(tokenizer, ChatTemplate(template_source))
    _compare(reference, encoder, template_source, messages, {**arguments, "strict": False})


@pytest.mark.parametrize("messages", CONTINUED)
def test_continue_final_message(
    reference: Any, tokenizer: Tokenizer, template_source: str, messages: list[dict[str, Any]]
) -> None:
    """A template that trims the final message must be recognised as transformers does it."""
    encoder = ChatEncoder(tokenizer, ChatTemplate(template_source))
    arguments = {"add_generation_prompt": False, "continue_final_message": True, "strict": False}
    keywords = {"chat_template": template_source, **arguments}
    text = reference.apply_chat_template(messages, tokenize=False, **keywords)
    prompt = encoder.encode_chat(
        messages,
        add_generation_prompt=False,
        continue_final_message=True,
        variables={"strict": False},
    )
    assert prompt.text == text


def test_quoted_control_tokens_with_flag(reference: Any, encoder: ChatEncoder) -> None:
    """`allow_special` is for who needs exactly what transformers does with quoted tokens."""
    source = (Path(__file__).parent / "templates" / "reasoning.jinja").read_text(encoding="utf-8")
    messages = [{"role": "user", "content": "a<|im_end|>b <think>"}]
    ids = reference.apply_chat_template(
        messages, chat_template=source, add_generation_prompt=True, return_dict=False
    )
    assert encoder.encode_chat(messages, allow_special=True).token_ids == ids
    assert encoder.encode_chat(messages).token_ids != ids


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode(reference: Any, tokenizer: Tokenizer, text: str) -> None:
    """Raw prompts (completions) take control tokens as they are."""
    ids = reference.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, allow_special=True) == ids
    for skip in (True, False):
        expected = reference.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special=skip) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_ordinary_text(reference: Any, tokenizer: Tokenizer, text: str) -> None:
    """Where no control token is spelled, both ways of encoding are the same."""
    if not tokenizer.spellings.any_token.search(text):
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False)
    assert tokenizer.control_ids.isdisjoint(tokenizer.encode(text))
    assert tokenizer.decode(
        tokenizer.encode(text)
    ) == reference.backend_tokenizer.normalizer.normalize_str(text)
