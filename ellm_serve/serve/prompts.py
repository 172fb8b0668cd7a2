"""From what a request says to prompt tokens, within the bounds of one slot.

Too long a text is refused by its number of characters before it is tokenised or rendered. What
takes more than a moment runs in a thread, so that other streams go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ellm_serve.errors import InvalidRequest
from ellm_serve.protocol.limits import (
    RequestLimits,
    check_prompt_ids,
    check_prompt_length,
    check_prompt_text,
)
from ellm_serve.serve.conversation import Conversation
from ellm_serve.text.chat_encoder import ChatEncoder
from ellm_serve.text.chat_template import ChatTemplate
from ellm_serve.text.tokenizer import Tokenizer

# Tokenising so many characters takes about a millisecond.
_INLINE_CHARS = 4096

Item = str | Sequence[int]
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens, and its text where all of it is in them."""

    token_ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keep at most `max_tokens` tokens: the last ones, or the first ones if `right` is cut off."""

    max_tokens: int
    right: bool = False

    def cut(self, token_ids: Sequence[int]) -> Sequence[int]:
        """What is kept."""
        start = 0 if self.right else max(0, len(token_ids) - self.max_tokens)
        return token_ids[start : start + self.max_tokens]


async def offload(num_chars: int, work: Callable[[], _Result]) -> _Result:
    """Runs work on so many characters, in a thread if that is many."""
    if num_chars <= _INLINE_CHARS:
        return work()
    return await asyncio.to_thread(work)


class PromptReader:
    """Knows tokenizer, template and the length of a slot."""

    def __init__(
        self, tokenizer: Tokenizer, encoder: ChatEncoder | None, limits: RequestLimits
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._limits = limits

    async def prompts(
        self, items: Sequence[Item], truncation: Truncation | None = None
    ) -> list[Prompt]:
        """Prompts given as text or as token ids.

        Raises:
            InvalidRequest: one of them is empty or out of the vocabulary.
            ContextLengthExceeded: one of them does not fit.
        """
        texts = [item for item in items if isinstance(item, str)]
        if truncation is None:
            for text in texts:
                check_prompt_text(text, self._limits)
        num_chars = sum(map(len, texts))
        return await offload(num_chars, lambda: [self._prompt(item, truncation) for item in items])

    async def conversation(
        self, conversation: Conversation, truncation: Truncation | None = None
    ) -> Prompt:
        """The prompt of a conversation.

        Raises:
            InvalidRequest: the template cannot make sense of the messages.
            ContextLengthExceeded: it does not fit.
        """
        if truncation is None:
            check_prompt_text(conversation.text, self._limits)
        prompt = await self._render(conversation)
        return self._within(prompt.token_ids, prompt.text, truncation)

    async def render(self, conversation: Conversation) -> Prompt:
        """The same, whether it fits in a slot or not; but no text that never could."""
        check_prompt_text(conversation.text, self._limits)
        return await self._render(conversation)

    async def _render(self, conversation: Conversation) -> Prompt:
        encoder = self._encoder
        if encoder is None:
            raise InvalidRequest(
                "The model has no chat template, so it takes no messages; use /v1/completions.",
                "messages",
            )
        # Tools are long, and a template that comes with a request may do anything.
        heavy = conversation.template is not None or conversation.tools is not None
        num_chars = len(conversation.text) + heavy * _INLINE_CHARS
        return await offload(num_chars, lambda: _encode(conversation, encoder))

    async def tokens(self, text: str) -> list[int]:
        """The tokens of a text, whether they fit in a slot or not.

        Raises:
            InvalidRequest: it never could fit. Reading it would take the machine for minutes.
        """
        check_prompt_text(text, self._limits)
        return await offload(len(text), lambda: self._ids(text))

    def text(self, prompt: Prompt) -> str:
        """The text that a prompt's tokens stand for."""
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special=False)

    def _ids(self, text: str) -> list[int]:
        # A raw prompt is the client's own: control tokens spelt in it count.
        return self._tokenizer.encode(text, allow_special=True)

    def _prompt(self, item: Item, truncation: Truncation | None) -> Prompt:
        if isinstance(item, str):
            return self._within(self._ids(item), item, truncation)
        return self._within(item, None, truncation)

    def _within(
        self, token_ids: Sequence[int], text: str | None, truncation: Truncation | None
    ) -> Prompt:
        """The prompt, cut if it is to be, if it then fits."""
        kept = token_ids if truncation is None else truncation.cut(token_ids)
        if not kept:
            raise InvalidRequest(
                "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
                "prompt",
            )
        check_prompt_ids(kept, self._limits)
        # Of a text it is said that it is longer than the limit, but not by how much: as in vLLM.
        count = len(kept) if text is None else min(len(kept), self._limits.max_model_len + 1)
        check_prompt_length(count, self._limits, at_least=text is not None)
        return Prompt(tuple(kept), text if len(kept) == len(token_ids) else None)


def _encode(conversation: Conversation, encoder: ChatEncoder) -> Prompt:
    prompt = encoder.encode_chat(
        conversation.messages,
        tools=conversation.tools,
        variables=conversation.variables,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        template=None if conversation.template is None else ChatTemplate(conversation.template),
    )
    return Prompt(tuple(prompt.token_ids), prompt.text)


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell a word at the start of a text and after a blank.

    Raises:
        InvalidRequest: a word is empty.
    """
    found: list[tuple[int, ...]] = []
    for word in map(str.lstrip, words):
        if not word:
            raise InvalidRequest("bad_words must not contain an empty word", "bad_words")
        plain, spaced = tuple(tokenizer.encode(word)), tuple(tokenizer.encode(f" {word}"))
        found.append(plain)
        # A lone blank before the same tokens is covered by them.
        if spaced[-len(plain) :] != plain:
            found.append(spaced)
    return tuple(found)
