"""/v1/responses: OpenAI's newer interface to conversations, as much of it as vLLM has.

Objects on the wire have their keys in vLLM's order. Items of the input are plain objects here: what
they may be, and which of them mean something to a model, is decided where they become messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from ellm_serve.protocol.chat import Objects, ReasoningEffort
from ellm_serve.protocol.common import Int64, as_sent
from ellm_serve.protocol.fields import named, unsupported
from ellm_serve.protocol.limits import MAX_ID_CHARS, MAX_STOP_STRINGS

# --- requests ------------------------------------------------------------------------------------

Id = Annotated[str, Field(max_length=MAX_ID_CHARS)]
# Field -> why it is refused when it asks for something.
REFUSED: Mapping[str, str] = {
    "background": "an answer is sent to whoever asks for it, while it is made",
    "top_logprobs": "log-probabilities are told by chat completions",
    "conversation": "conversations are continued with previous_response_id",
}
LOGPROBS = "message.output_text.logprobs"


class ReasoningConfig(BaseModel):
    """How much the model is to think; what else it may hold has no effect."""

    model_config = ConfigDict(extra="allow")

    effort: ReasoningEffort | None = None


class TextFormat(BaseModel):
    """The form of the answer: any text, any JSON object, or one that a schema describes."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(BaseModel):
    """What text is asked for."""

    model_config = ConfigDict(extra="allow")

    format: TextFormat | None = None


class ResponsesRequest(BaseModel):
    """Items to answer. Sampling parameters that OpenAI does not have are vLLM's."""

    model_config = ConfigDict(extra="allow")

    background: bool | None = False
    conversation: Any = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    input: str | Objects
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, Any] | None = None
    model: str | None = None
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    prompt: Any = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningConfig | None = None
    safety_identifier: str | None = None
    service_tier: str | None = "auto"
    store: bool | None = True
    stream: bool | None = False
    temperature: float | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    tools: Objects | None = None
    top_logprobs: int | None = 0
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    user: str | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool = False
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    priority: Int64 = 0
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    session_id: Id | None = None
    skip_special_tokens: bool = True
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    structured_outputs: Any = None
    top_k: int | None = None
    vllm_xargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        if self.prompt is not None:
            raise named("prompt template is not supported", "prompt")
        for name, reason in REFUSED.items():
            if getattr(self, name):
                raise unsupported(name, reason)
        if LOGPROBS in (self.include or ()):
            raise unsupported("include", f"{LOGPROBS} is not told here")
        return self

    def text_as_sent(self) -> dict[str, Any] | None:
        """`text` with the names it has on the wire."""
        if self.text is None:
            return None
        sent = as_sent(self.text)
        form = sent.get("format")
        if form is not None and "schema_" in form:
            sent["format"] = {"schema" if k == "schema_" else k: v for k, v in form.items()}
        return sent


RESPONSES: TypeAdapter[ResponsesRequest] = TypeAdapter(ResponsesRequest)

# --- answers -------------------------------------------------------------------------------------

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(BaseModel):
    """Text for the user."""

    annotations: tuple[()] = ()
    text: str
    type: Literal["output_text"] = "output_text"
    logprobs: tuple[()] | None = None


class OutputMessage(BaseModel):
    """What is said to the user."""

    id: str
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    type: Literal["message"] = "message"
    phase: None = None


class FunctionCallItem(BaseModel):
    """A call of a function; `arguments` is JSON text."""

    model_config = ConfigDict(serialize_by_alias=True)

    arguments: str
    call_id: str
    name: str
    type: Literal["function_call"] = "function_call"
    id: str
    async_: Annotated[None, Field(serialization_alias="async")] = None
    caller: None = None
    namespace: None = None
    status: ItemStatus


class ReasoningText(BaseModel):
    """A thought."""

    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class ReasoningItem(BaseModel):
    """What the model thought before it answered."""

    id: str
    summary: tuple[()] = ()
    type: Literal["reasoning"] = "reasoning"
    content: list[ReasoningText] | None = None
    encrypted_content: None = None
    status: ItemStatus


OutputItem = OutputMessage | FunctionCallItem | ReasoningItem


class FunctionToolEcho(BaseModel):
    """A function that the model was offered."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    type: Literal["function"] = "function"
    allowed_callers: None = None
    async_: Annotated[None, Field(serialization_alias="async")] = None
    defer_loading: None = None
    description: str | None = None
    output_schema: None = None


class InputTokensDetails(BaseModel):
    """Of the prompt's tokens: those read from the session's cache, and those new in it."""

    cached_tokens: int
    cache_write_tokens: int
    input_tokens_per_turn: tuple[()] = ()
    cached_tokens_per_turn: tuple[()] = ()


class OutputTokensDetails(BaseModel):
    """Of the answer's tokens: those of thoughts."""

    reasoning_tokens: int
    tool_output_tokens: int = 0
    output_tokens_per_turn: tuple[()] = ()
    tool_output_tokens_per_turn: tuple[()] = ()


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why an answer is not whole."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(BaseModel):
    """Why there is no answer."""

    code: str = "server_error"
    message: str


def _is_none(value: object) -> bool:
    return value is None


class ResponseObject(BaseModel):
    """An answer, and what was asked for. The last fields are left out if there is nothing in them.

    `temperature` and the like are those that were in force.
    """

    id: str
    created_at: int
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    metadata: dict[str, Any] | None = None
    model: str
    object: Literal["response"] = "response"
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    temperature: float
    tool_choice: str | dict[str, Any]
    tools: list[FunctionToolEcho]
    top_p: float
    background: Literal[False] = False
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    previous_response_id: str | None = None
    prompt: None = None
    reasoning: dict[str, Any] | None = None
    service_tier: str | None = "auto"
    status: Status = "in_progress"
    text: dict[str, Any] | None = None
    top_logprobs: int | None = None
    truncation: str | None = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    presence_penalty: float
    frequency_penalty: float
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    input_messages: None = None
    output_messages: None = None
    prompt_cache_key: Annotated[str | None, Field(exclude_if=_is_none)] = None
    safety_identifier: Annotated[str | None, Field(exclude_if=_is_none)] = None
    error: Annotated[ResponseError | None, Field(exclude_if=_is_none)] = None
