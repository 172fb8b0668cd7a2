"""/v1/messages: Anthropic's requests, answers and refusals.

Unknown fields are allowed, as clients of this interface send many that only its inventor acts on.
The form of a body is checked here; what a value may be is checked where the request becomes one of
chat completions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ellm_serve.errors import InvalidBody
from ellm_serve.protocol.chat import ReasoningEffort
from ellm_serve.protocol.errors import error_body, error_status
from ellm_serve.protocol.limits import MAX_ID_CHARS, MAX_STOP_STRINGS

# --- requests ------------------------------------------------------------------------------------


class ContentBlock(BaseModel):
    """A part of a message; which of the fields it has depends on `type`.

    Of a redacted thought only its inventor can tell what it was, so it is left out.
    """

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None


Blocks = Annotated[list[ContentBlock], Field(fail_fast=True)]


class Turn(BaseModel):
    """One message. Agents put system messages between the others, to say what has changed."""

    model_config = ConfigDict(extra="allow")

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class MessagesTool(BaseModel):
    """A tool the model may call. One that has another type than "custom" runs on a server of the
    interface's inventor, and has no schema."""

    model_config = ConfigDict(extra="allow")

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessagesToolChoice(BaseModel):
    """Whether tools are to be called: if the model likes, any of them, one, or none."""

    model_config = ConfigDict(extra="allow")

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(BaseModel):
    """Whether the model is to think before it answers; with "adaptive" its template decides.

    `budget_tokens` must make sense, but nothing enforces it: thoughts are limited by the output.
    """

    model_config = ConfigDict(extra="allow")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(BaseModel):
    """The JSON schema that an answer is to follow."""

    model_config = ConfigDict(extra="allow")

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """How much effort an answer is worth, and its form."""

    model_config = ConfigDict(extra="allow")

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class MessagesMetadata(BaseModel):
    """About the request. `user_id` is opaque, but agents put their session's name into it."""

    model_config = ConfigDict(extra="allow")

    user_id: str | None = None


class CountTokensRequest(BaseModel):
    """A conversation of which only the length is asked for."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Turn], Field(fail_fast=True)]
    system: str | Blocks | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """A conversation to answer. The last fields are vLLM's additions and ours."""

    max_tokens: int
    metadata: MessagesMetadata | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    session_id: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    vllm_xargs: dict[str, Any] | None = None


MESSAGES: TypeAdapter[MessagesRequest] = TypeAdapter(MessagesRequest)
COUNT_TOKENS: TypeAdapter[CountTokensRequest] = TypeAdapter(CountTokensRequest)

# --- answers -------------------------------------------------------------------------------------

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


def _is_none(value: object) -> bool:
    return value is None


# Left out when there is none.
_Count = Annotated[int | None, Field(exclude_if=_is_none)]
_Text = Annotated[str | None, Field(exclude_if=_is_none)]


class TextBlock(BaseModel):
    """Text for the user."""

    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(BaseModel):
    """A thought. The signature has no meaning here, but clients expect one."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUseBlock(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(BaseModel):
    """Token counts; `input_tokens` are those of the prompt that were not read from the cache.

    Nothing is bought by the token here, so no tokens are told apart as written to the cache.
    """

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: _Count = None
    cache_read_input_tokens: _Count = None


class MessagesResponse(BaseModel):
    """The whole answer; what is null is left out."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    content: list[AnswerBlock]
    model: str
    stop_reason: StopReason
    stop_sequence: _Text = None
    usage: MessagesUsage


class ContextManagement(BaseModel):
    """How long the conversation was before anything was cut; nothing ever is."""

    original_input_tokens: int


class CountTokensResponse(BaseModel):
    """Tokens of the prompt."""

    input_tokens: int
    context_management: ContextManagement


# --- refusals ------------------------------------------------------------------------------------

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# What 401 says.
UNAUTHORIZED = {
    "type": "error",
    "error": {"type": _TYPES[401], "message": "The API key is missing or wrong."},
}


def messages_error_body(error: BaseException) -> dict[str, Any]:
    """Anthropic's envelope: `{"type": "error", "error": {"type", "message"}}`.

    A body that has the wrong form is refused in OpenAI's envelope, as by vLLM.
    """
    body = error_body(error)
    if isinstance(error, InvalidBody):
        return body
    status = error_status(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else _TYPES[400])
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}
