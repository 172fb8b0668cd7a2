"""Renders a model's Jinja chat template exactly as transformers does, within limits.

Whatever goes wrong inside of a template is the request's fault as far as the server can tell
(roles out of order, say), so it becomes an `InvalidRequest` with the template's own message.
A template that does not even compile is a `ModelError` when it comes with the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from jinja2 import Template, TemplateError

from ellm_serve.errors import InvalidRequest, ModelError
from ellm_serve.text.control_text import StandIns
from ellm_serve.text.messages import Message
from ellm_serve.text.plain import Json, without_surrogates
from ellm_serve.text.render_limits import RenderState
from ellm_serve.text.sandbox import STATE_KEY, TemplateEnvironment

MAX_SOURCE_CHARS = 1 << 20
DEFAULT_MAX_CHARS = 8 * 262_144
DEFAULT_TIME_LIMIT_S = 2.0

# Set by the server; a request's template arguments may not replace them.
RESERVED_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)

# What Python raises when a template takes a value for what it is not. A bug of ours would raise
# these as well, but little of ours runs inside of a template.
_TEMPLATE_FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)

_ENVIRONMENT = TemplateEnvironment()


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template is rendered with: normalized messages, tools, the client's variables."""

    messages: list[Message]
    tools: list[Json] | None = None
    variables: dict[str, Json] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt cannot both be true",
                "continue_final_message",
            )
        if self.continue_final_message and "tool_calls" in self.messages[-1]:
            raise InvalidRequest(
                "continue_final_message needs a final message without tool_calls",
                "continue_final_message",
            )
        for name in sorted(RESERVED_NAMES & self.variables.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs may not set {name!r}", f"chat_template_kwargs.{name}"
            )


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """How much a rendering may produce, and how long it may compute."""

    max_chars: int = DEFAULT_MAX_CHARS
    time_limit_s: float = DEFAULT_TIME_LIMIT_S


class ChatTemplate:
    """The template of a model (or of a request), and its variant for conversations with tools.

    `source` is the text of both.
    """

    def __init__(self, source: str, tool_source: str | None = None) -> None:
        self.source = source if tool_source is None else f"{source}\n{tool_source}"
        self._default = _compile(source)
        self._with_tools = self._default if tool_source is None else _compile(tool_source)

    @classmethod
    def from_dir(cls, path: Path) -> ChatTemplate | None:
        """The template that belongs to a model directory; None if it has none."""
        sources = _sources(path)
        default = sources.get("default")
        if default is None:
            return None
        try:
            return cls(default, sources.get("tool_use"))
        except InvalidRequest as error:
            raise ModelError(f"{path}: {error}") from error

    def render(
        self,
        conversation: Conversation,
        special_tokens: Mapping[str, str] | None = None,
        stand_ins: StandIns | None = None,
        limits: RenderLimits | None = None,
    ) -> str:
        """The prompt text; stand-ins in the conversation are in the text as well.

        To continue the final message needs `stand_ins`, whose end mark shows where to cut.
        """
        limits = limits or RenderLimits()
        template = self._with_tools if conversation.tools else self._default
        state = RenderState(limits.max_chars, limits.time_limit_s, stand_ins)
        mark = None
        if conversation.continue_final_message:
            assert stand_ins is not None
            mark = stand_ins.end_mark
            conversation = _with_mark(conversation, mark)
        variables: dict[str, object] = {
            **(special_tokens or {}),
            **conversation.variables,
            "messages": conversation.messages,
            "tools": conversation.tools,
            "documents": None,
            "add_generation_prompt": conversation.add_generation_prompt,
            STATE_KEY: state,
        }
        text = without_surrogates(_run(template, variables, limits.max_chars))
        return text if mark is None else _cut_at(text, mark)


def _compile(source: str) -> Template:
    if len(source) > MAX_SOURCE_CHARS:
        raise InvalidRequest(f"The chat template is over {MAX_SOURCE_CHARS} characters long.")
    try:
        return _ENVIRONMENT.from_string(source)
    except _TEMPLATE_FAULTS as error:
        raise InvalidRequest(f"The chat template is not valid: {error}", "chat_template") from error


def _run(template: Template, variables: dict[str, object], max_chars: int) -> str:
    pieces: list[str] = []
    num_chars = 0
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > max_chars:
                raise InvalidRequest(
                    f"The rendered prompt is longer than {max_chars} characters.", "messages"
                )
    except _TEMPLATE_FAULTS as error:
        raise InvalidRequest(f"Chat template error: {_reason(error)}", "messages") from error
    return "".join(pieces)


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error) or type(error).__name__


def _with_mark(conversation: Conversation, mark: str) -> Conversation:
    """The conversation with `mark` and a blank behind the final content.

    The blank tells whether the template trims the content: then it is gone.
    """
    *earlier, final = conversation.messages
    marked = {**final, "content": f"{final['content']}{mark} "}
    return replace(conversation, messages=[*earlier, marked])


def _cut_at(text: str, mark: str) -> str:
    start = text.rfind(mark)
    if start < 0:
        raise InvalidRequest(
            "The chat template leaves out the final message, so it cannot be continued.",
            "continue_final_message",
        )
    kept = text[:start].replace(f"{mark} ", "").replace(mark, "")
    return kept if text.startswith(" ", start + 1) else kept.rstrip()


def _sources(path: Path) -> dict[str, str]:
    """The template texts of a model directory by name."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    config_file = path / "tokenizer_config.json"
    if not config_file.is_file():
        return {}
    try:
        template = json.loads(config_file.read_text(encoding="utf-8")).get("chat_template")
        if template is None:
            return {}
        if isinstance(template, str):
            return {"default": template}
        return {str(entry["name"]): str(entry["template"]) for entry in template}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{config_file}: chat_template cannot be read ({error})") from error
