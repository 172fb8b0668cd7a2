"""/v1/chat/completions: request, response and the frames of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ellm_serve.errors import InvalidRequest
from ellm_serve.protocol import checks
from ellm_serve.protocol.common import (
    Chunk,
    PromptLogprobs,
    RequestMetrics,
    SamplingFields,
    UsageInfo,
    as_sent,
)

Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class MessageParam(BaseModel):
    """One message of a conversation; `text.messages` checks what a role may hold."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[list[str | dict[str, Any]], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None


class FunctionDefinition(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolParam(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(extra="allow")

    name: str


class NamedToolChoice(BaseModel):
    """Asks for a call of one function."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice
Messages = Annotated[list[MessageParam], Field(fail_fast=True)]
Tools = Annotated[list[ToolParam], Field(fail_fast=True)]

_MEDIA = frozenset(
    f"{prefix}{kind}{suffix}"
    for kind in ("image", "audio", "video")
    for prefix, suffix in (("", "_url"), ("input_", ""), ("", "_embeds"), ("", "_pil"))
)


class ConversationFields(BaseModel):
    """What turns messages into a prompt; shared with /tokenize."""

    model_config = ConfigDict(extra="allow")

    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None

    def message_dicts(self) -> list[dict[str, Any]]:
        """The messages as sent, keys that were not sent left out."""
        return [as_sent(message) for message in self.messages]

    def tool_dicts(self) -> list[dict[str, Any]] | None:
        """The tools as sent, or None; `type` is always there, as templates expect."""
        if self.tools is None:
            return None
        return [{"type": tool.type} | as_sent(tool) for tool in self.tools]

    def opens_answer(self) -> bool:
        """Whether the prompt ends with the start of an answer and not within the last message."""
        return self.add_generation_prompt and not self.continue_final_message

    def refuse_untrusted_template(self) -> None:
        """For servers that run no template but their own.

        Raises:
            InvalidRequest: the request brings a template.
        """
        kwargs = self.chat_template_kwargs or {}
        if self.chat_template is not None or kwargs.get("chat_template") is not None:
            raise InvalidRequest(
                "Chat template is passed with request, but --trust-request-chat-template is not"
                " set. Refused request with untrusted chat template."
            )

    def refuse_media(self, model: str) -> None:
        """For models that read text only; `model` is the served name.

        Raises:
            InvalidRequest: a message holds an image, a sound or a video.
        """
        for message in self.messages:
            if isinstance(message.content, list | tuple) and any(
                isinstance(part, dict) and part.get("type") in _MEDIA for part in message.content
            ):
                raise InvalidRequest(f"{model} is not a multimodal model")


class ChatCompletionRequest(ConversationFields, SamplingFields):
    """A conversation to answer. Without a bound the answer may take the rest of the slot."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool = True
    echo: bool = False
    documents: Objects | None = None
    return_prompt_text: bool | None = None

    @classmethod
    def check_raw(cls, data: Mapping[str, Any]) -> None:
        checks.check_raw_chat(data)

    @property
    def chosen_tools(self) -> ToolChoice:
        """What tools may be called for; without a choice it is the model's."""
        if self.tools is None:
            return "none"
        return self.tool_choice or "auto"

    @property
    def named_tool(self) -> str | None:
        """The one function that is to be called, if the request names one."""
        choice = self.chosen_tools
        return choice.function.name if isinstance(choice, NamedToolChoice) else None

    def template_variables(self, server: Mapping[str, Any]) -> dict[str, Any]:
        """Variables for the chat template: the server's, then the request's own."""
        variables = {**server, **(self.chat_template_kwargs or {})}
        if self.documents is not None:
            variables["documents"] = self.documents
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            variables.setdefault("enable_thinking", self.reasoning_effort != "none")
        return variables

    def requested_max_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def requested_logprobs(self) -> tuple[str, int | None]:
        return "top_logprobs", (self.top_logprobs or 0) if self.logprobs else None


class ChatTopLogprob(BaseModel):
    """An alternative at one position; `bytes` are the token's own, even of half a character."""

    token: str
    logprob: float = -9999.0
    bytes: list[int] | None = None


class ChatLogprob(ChatTopLogprob):
    """One token of the answer and the alternatives to it."""

    top_logprobs: list[ChatTopLogprob] = []


class ChatLogprobs(BaseModel):
    """Log-probabilities of a piece or of the whole answer."""

    content: list[ChatLogprob] | None = None


class FunctionCall(BaseModel):
    """What is called; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


def _is_none(value: object) -> bool:
    return value is None


class ChatMessage(BaseModel):
    """The answer. Without calls there is no key for them.

    `reasoning_content` is an older name of `reasoning`, for servers that are set up to give both.
    """

    role: str
    content: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] | None = Field(None, exclude_if=_is_none)
    reasoning: str | None = None
    reasoning_content: str | None = Field(None, exclude_if=_is_none)


class ChatChoice(BaseModel):
    """One answer. `stop_reason`: the stop string or token id that ended it."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: None = None


class ChatCompletionResponse(BaseModel):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None = None
    system_fingerprint: str | None = None
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: RequestMetrics | None = None


class FunctionCallDelta(BaseModel):
    """A function's name, or more of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(BaseModel):
    """A call begins (with an id, a type and a name), or goes on."""

    id: str | None = None
    type: Literal["function"] | None = None
    index: int
    function: FunctionCallDelta


class ChatDelta(BaseModel):
    """What a frame adds to a message."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChunkChoice(BaseModel):
    """A piece of one answer. `stop_reason` is given with the last piece only."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(Chunk):
    """A frame: a role, pieces of text, or the usage at the end with no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    metrics: RequestMetrics | None = None
