"""ChatEncoder: messages in, prompt tokens out; template and tokenizer brought together.

Text that a client only quotes never becomes a control token. How far a role is trusted:
* user, tool results, tool definitions, template variables: no control token at all;
* system and assistant: no *special* one; `<think>` or `<tool_call>` are what the model itself
  wrote, or how a system prompt teaches a format, and must reach the model as such.
A conversation that spells no control token is encoded exactly as by transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ellm_serve.errors import InvalidRequest, ModelError
from ellm_serve.text.chat_template import ChatTemplate, Conversation, RenderLimits
from ellm_serve.text.control_text import MarkedText, StandIns
from ellm_serve.text.messages import normalize_messages
from ellm_serve.text.plain import Json, plain_json, strings_in
from ellm_serve.text.tokenizer import Tokenizer

# Roles whose control tokens count, unless they are special.
_TRUSTED_ROLES = frozenset({"system", "assistant"})


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt as text and as tokens; `warnings` tell what was odd about the messages.

    `marked` serves to encode a part of the text again: `Tokenizer.encode_marked(marked.tail(n))`.
    """

    token_ids: list[int]
    marked: MarkedText
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The rendered prompt."""
        return self.marked.text


class ChatEncoder:
    """Encodes conversations for one model."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, limits: RenderLimits | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._limits = limits or RenderLimits()

    @classmethod
    def from_dir(cls, path: Path, limits: RenderLimits | None = None) -> ChatEncoder:
        """Tokenizer and template of a model directory."""
        template = ChatTemplate.from_dir(path)
        if template is None:
            raise ModelError(f"{path} has no chat template; add a chat_template.jinja file")
        return cls(Tokenizer.from_dir(path), template, limits)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        allow_special: bool = False,
        template: ChatTemplate | None = None,
    ) -> ChatPrompt:
        """The prompt of a conversation.

        `variables` are the request's chat_template_kwargs. With `allow_special` control tokens
        count in all text, as in transformers. `template` replaces the model's own.
        """
        normalized = normalize_messages(messages)
        conversation = Conversation(
            normalized.messages,
            _tools(tools),
            _variables(variables),
            add_generation_prompt,
            continue_final_message,
        )
        rendering = _Rendering(self, template or self.template, conversation, self._limits)
        marked = rendering.plain() if allow_special else rendering.marked()
        return ChatPrompt(self.tokenizer.encode_marked(marked), marked, normalized.warnings)


class _Rendering:
    """One conversation on its way through the template, with and without stand-ins."""

    def __init__(
        self,
        encoder: ChatEncoder,
        template: ChatTemplate,
        conversation: Conversation,
        limits: RenderLimits,
    ) -> None:
        self._conversation = conversation
        self._spellings = encoder.tokenizer.spellings
        self._stand_ins = StandIns(self._spellings, _strings(conversation))
        self._render: Callable[[Conversation], str] = lambda given: template.render(
            given, encoder.tokenizer.special_tokens, self._stand_ins, limits
        )

    def plain(self) -> MarkedText:
        """Rendered as it is: whatever spells a control token is one."""
        return MarkedText(self._render(self._conversation))

    def marked(self) -> MarkedText:
        """Rendered with the quoted control tokens marked as ordinary text."""
        text = self._render(self._conversation)
        rendered = self._without_joints(text, self._with_hidden(text))
        return self._stand_ins.to_marked(rendered)

    def _with_hidden(self, text: str) -> str:
        """`text`, rendered again with stand-ins for all the control tokens that clients quote.

        A template that treats such text in a special way may render something else then. It is
        asked again with only the special tokens hidden, and refused if that does not help.
        """
        for strict in (True, False):
            hidden = self._hidden(strict)
            if hidden == self._conversation:
                return text
            rendered = self._render(hidden)
            if self._stand_ins.show(rendered) == text:
                return rendered
        raise InvalidRequest(
            "The messages contain special tokens of the model in a place where its chat template"
            " does not keep them apart from its own.",
            "messages",
        )

    def _without_joints(self, text: str, rendered: str) -> str:
        """`rendered`, or a rendering with fewer control tokens if client text completes some.

        "<|im_" at the end of one string and "end|>" in the next make a token only in the prompt.
        """
        stand_ins = self._stand_ins
        strict = self._hidden(strict=True)
        apart = _map(strict, lambda value, _: stand_ins.hide_fragments(value))
        if apart == strict:
            return rendered
        try:
            candidate = self._render(apart)
        except InvalidRequest:
            # The template needs one of these strings as it is.
            return rendered
        if stand_ins.show(candidate) != text:
            return rendered
        fewer = stand_ins.num_control_tokens(candidate) < stand_ins.num_control_tokens(rendered)
        return candidate if fewer else rendered

    def _hidden(self, strict: bool) -> Conversation:
        """The conversation with stand-ins for the control tokens that may not count."""
        spellings = self._spellings

        def hide(value: Json, trusted: bool) -> Json:
            special_only = trusted or not strict
            tokens = spellings.special_token if special_only else spellings.any_token
            return self._stand_ins.hide(value, tokens)

        return _map(self._conversation, hide)


def _map(conversation: Conversation, change: Callable[[Json, bool], Json]) -> Conversation:
    """Applies `change(value, trusted)` to all that a client sent."""
    messages = [
        {key: change(value, message["role"] in _TRUSTED_ROLES) for key, value in message.items()}
        for message in conversation.messages
    ]
    tools = conversation.tools and [change(tool, False) for tool in conversation.tools]
    variables = {key: change(value, False) for key, value in conversation.variables.items()}
    return replace(conversation, messages=messages, tools=tools, variables=variables)


def _strings(conversation: Conversation) -> list[str]:
    parts: list[Json] = [*conversation.messages, *(conversation.tools or ())]
    return [text for part in [*parts, conversation.variables] for text in strings_in(part)]


def _tools(tools: Sequence[Mapping[str, object]] | None) -> list[Json] | None:
    """The tools for the template; an empty list is the same as none."""
    return [plain_json(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())] or None


def _variables(variables: Mapping[str, object] | None) -> dict[str, Json]:
    name = "chat_template_kwargs"
    return {key: plain_json(value, f"{name}.{key}") for key, value in (variables or {}).items()}
