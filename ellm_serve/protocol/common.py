"""Bodies and parts of bodies that several endpoints share.

Request models allow unknown fields (see `fields`). Response models list their keys in vLLM's order;
keys typed `None` belong to features this server does not have and stay null, as clients expect.
"""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ellm_serve.errors import InvalidRequest
from ellm_serve.protocol import checks
from ellm_serve.protocol.fields import refuse_unsupported
from ellm_serve.protocol.limits import MAX_BAD_WORDS, MAX_ID_CHARS, MAX_STOP_STRINGS
from ellm_serve.protocol.structured import (
    ResponseFormat,
    StructuredOutputs,
    check_raw_structured,
    check_structured,
    is_json_format,
    requested_grammar,
)
from ellm_serve.request import Grammar

Int64 = Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)]
TokenId = Annotated[int, Field(ge=0)]
# A list of millions of wrong items must not become millions of errors.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
AnyIds = Annotated[list[int], Field(fail_fast=True)]


def as_sent(model: BaseModel) -> dict[str, Any]:
    """The keys that a client has sent, unknown ones included; their values are not copied.

    Not `model_dump`: that refuses deeply nested values with an exception of its own.
    """
    return {
        name: as_sent(value) if isinstance(value, BaseModel) else value
        for name, value in model
        if name in model.model_fields_set
    }


# --- requests ------------------------------------------------------------------------------------


class StreamOptions(BaseModel):
    """What a stream says besides the text."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class StructuralTagFormat(BaseModel):
    """vLLM's way to ask for tagged output."""

    model_config = ConfigDict(extra="allow")

    type: Literal["structural_tag"]
    format: Any


class LegacyStructuralTagFormat(BaseModel):
    """An earlier form of it."""

    model_config = ConfigDict(extra="allow")

    type: Literal["structural_tag"]
    structures: list[Any]
    triggers: Annotated[list[str], Field(fail_fast=True)]


class SamplingFields(BaseModel):
    """The fields that completions and chat completions have in common.

    None means that the server's default holds.
    """

    model_config = ConfigDict(extra="allow")

    # Where the request and the server give no bound: this many tokens, or the rest of the slot.
    default_max_tokens: ClassVar[int | None] = None

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: int | None = 1
    seed: Int64 | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: AnyIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool = True
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: AnyIds | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | StructuralTagFormat | LegacyStructuralTagFormat | None = None
    priority: Int64 = 0
    request_id: Annotated[str, Field(max_length=MAX_ID_CHARS, pattern="^[!-~]*$")] | None = None
    session_id: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    cache_salt: str | None = None
    user: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    length_penalty: float = 1.0
    structured_outputs: StructuredOutputs | None = None
    # Refused, see `fields.REFUSED`.
    logprob_token_ids: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    stream_interval: Any = None
    watermarking: Any = None
    use_beam_search: bool = False
    return_weight_versions: bool = False

    @model_validator(mode="before")
    @classmethod
    def _check_raw(cls, data: object) -> object:
        """vLLM's checks of the body as sent; a RequestError passes through pydantic unwrapped."""
        if isinstance(data, Mapping):
            checks.check_common(data)
            check_raw_structured(data)
            cls.check_raw(data)
        return data

    @classmethod
    def check_raw(cls, data: Mapping[str, Any]) -> None:
        """Checks of one endpoint's own fields, before their types are known."""

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        if self.use_beam_search and self.stream:
            raise InvalidRequest("Streaming is not currently supported with beam search")
        refuse_unsupported(self.__dict__)
        check_structured(self.response_format, self.structured_outputs)
        return self

    @property
    def has_form(self) -> bool:
        """Whether the answer is to have a form: that of `grammar`."""
        return self.structured_outputs is not None or is_json_format(self.response_format)

    def grammar(self) -> Grammar:
        """The form of the answer, if it is to have one. For a large schema this takes a while.

        Raises:
            InvalidRequest: there is no schema, or it is nested too deeply.
        """
        return requested_grammar(self.response_format, self.structured_outputs)

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def num_choices(self) -> int:
        """How many answers each prompt gets."""
        return 1 if self.n is None else self.n

    def requested_max_tokens(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value if the request gives one."""
        return "max_tokens", self.max_tokens

    @abstractmethod
    def requested_logprobs(self) -> tuple[str, int | None]:
        """The field that asks for alternatives per output token, and its value; -1: all."""

    def requested_prompt_logprobs(self) -> int | None:
        """Alternatives per prompt token; -1: all."""
        return self.prompt_logprobs


# --- responses -----------------------------------------------------------------------------------


class Chunk(BaseModel):
    """One frame of a stream.

    Serialised with `exclude_unset`, so a frame has just the keys that were given, and `object`.
    """

    def model_post_init(self, context: object, /) -> None:
        self.__pydantic_fields_set__.add("object")

    def json_bytes(self) -> bytes:
        """The frame's JSON: compact, unescaped UTF-8."""
        return self.model_dump_json(exclude_unset=True).encode()


class PromptTokensDetails(BaseModel):
    """`cached_tokens` counts prompt tokens whose keys and values were there already."""

    cached_tokens: int | None = None
    created_cache_tokens: int | None = None
    multimodal_tokens: None = None


class CompletionTokensDetails(BaseModel):
    """`reasoning_tokens` counts those of the model's thoughts."""

    reasoning_tokens: int | None = None


class UsageInfo(BaseModel):
    """Token counts of one request."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class RequestMetrics(BaseModel):
    """Times of one request in milliseconds, on servers that are configured to tell them."""

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None
    speculative_decoding: None = None


class PromptLogprob(BaseModel):
    """One token at one position of a prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


# Per position of a prompt: token id -> its log-probability; the first position has none.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class ModelPermission(BaseModel):
    """What OpenAI once told about a model; fixed values."""

    id: str = Field(default_factory=lambda: f"modelperm-{secrets.token_hex(8)}")
    object: Literal["model_permission"] = "model_permission"
    created: int = Field(default_factory=lambda: int(time.time()))
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelCard(BaseModel):
    """One served name. `max_model_len` is in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(default_factory=lambda: int(time.time()))
    owned_by: str = "vllm"
    root: str | None = None
    parent: None = None
    max_model_len: int | None = None
    permission: list[ModelPermission] = Field(default_factory=lambda: [ModelPermission()])


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"] = "list"
    data: Sequence[ModelCard] = ()
