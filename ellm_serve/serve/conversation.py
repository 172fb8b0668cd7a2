"""From a chat request to what its template is rendered with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ellm_serve.config import ServeConfig
from ellm_serve.errors import InvalidRequest
from ellm_serve.protocol.chat import ChatCompletionRequest
from ellm_serve.protocol.tokenize import TokenizeChatRequest

Message = Mapping[str, object]

# One agent puts a hash that is new in every turn in front of its system prompt. Nothing behind it
# could ever be reused, and the model has no use for it.
_NOISE = "x-anthropic-billing-header"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and how they become a prompt. `template`: source of the request's own template."""

    messages: Sequence[Message]
    tools: Sequence[Message] | None = None
    variables: Mapping[str, object] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None

    @classmethod
    def of(
        cls, request: ChatCompletionRequest | TokenizeChatRequest, config: ServeConfig
    ) -> Conversation:
        """What a request asks for.

        Raises:
            InvalidRequest: it has a template and the server does not trust it, or it has media.
        """
        if not config.trust_request_chat_template:
            request.refuse_untrusted_template()
        request.refuse_media(config.names[0])
        variables = request.template_variables(config.default_chat_template_kwargs)
        template = request.chat_template or variables.pop("chat_template", None)
        if template is not None and not isinstance(template, str):
            raise InvalidRequest("chat_template must be a string.", "chat_template")
        return cls(
            messages=[_without_noise(message) for message in request.message_dicts()],
            tools=_tools(request, config),
            variables=variables,
            add_generation_prompt=request.opens_answer(),
            continue_final_message=request.continue_final_message,
            template=template,
        )

    @property
    def text(self) -> str:
        """What the messages say, to tell how long they are."""
        return "".join(map(text_of, self.messages))


def _tools(
    request: ChatCompletionRequest | TokenizeChatRequest, config: ServeConfig
) -> Sequence[Message] | None:
    choice = request.tool_choice if isinstance(request, ChatCompletionRequest) else None
    if choice == "none" and config.exclude_tools_when_tool_choice_none:
        return None
    return request.tool_dicts()


def _without_noise(message: Message) -> Message:
    content = message.get("content")
    if message.get("role") != "system" or not isinstance(content, list):
        return message
    return {**message, "content": [part for part in content if not _is_noise(part)]}


def _is_noise(part: object) -> bool:
    text = part.get("text") if isinstance(part, Mapping) else None
    return isinstance(text, str) and is_noise(text)


def is_noise(text: str) -> bool:
    """Whether a system text is a hash of its agent, new in every turn, behind which nothing could
    ever be reused."""
    return text.startswith(_NOISE)


def text_of(message: Message) -> str:
    """The text of a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str))
