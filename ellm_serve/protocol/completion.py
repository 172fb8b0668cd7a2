"""/v1/completions: request, response and the frames of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator

from ellm_serve.errors import InvalidRequest
from ellm_serve.protocol import checks
from ellm_serve.protocol.common import (
    Chunk,
    PromptLogprobs,
    RequestMetrics,
    SamplingFields,
    TokenIds,
    UsageInfo,
)


class CompletionRequest(SamplingFields):
    """`prompt` is one prompt or several, as text or as token ids. `max_tokens` null means 16."""

    default_max_tokens: ClassVar[int | None] = 16

    # In this order, which is that of the schema's errors.
    prompt: (
        TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True)]
        | str
        | Annotated[list[str], Field(fail_fast=True)]
        | None
    ) = None
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = 16
    suffix: str | None = None
    add_special_tokens: bool = True
    prompt_embeds: Any = None

    @classmethod
    def check_raw(cls, data: Mapping[str, Any]) -> None:
        checks.check_raw_completion(data)

    @model_validator(mode="after")
    def _check_suffix(self) -> Self:
        if self.suffix is not None:
            raise InvalidRequest(
                "suffix is only supported for models with FIM completion rendering", "suffix"
            )
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, whatever form they came in."""
        if self.prompt is None:
            return []
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def echo_only(self) -> bool:
        """True when just the prompt is wanted back: a token is computed and not shown."""
        return bool(self.echo) and self.max_tokens == 0

    def requested_max_tokens(self) -> tuple[str, int | None]:
        given = "max_tokens" in self.model_fields_set
        return "max_tokens", 1 if self.echo_only else self.max_tokens if given else None

    def requested_logprobs(self) -> tuple[str, int | None]:
        return "logprobs", self.logprobs

    def requested_prompt_logprobs(self) -> int | None:
        if self.prompt_logprobs is None and self.echo:
            return self.logprobs
        return self.prompt_logprobs


class CompletionLogprobs(BaseModel):
    """Per token: where it begins in the text, its log-probability, its text, the alternatives."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float | None] | None]


class CompletionChoice(BaseModel):
    """One answer. `stop_reason`: the stop string or token id that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    routed_experts: None = None


class CompletionResponse(BaseModel):
    """The whole answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: None = None
    system_fingerprint: str | None = None
    usage: UsageInfo
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: RequestMetrics | None = None


class CompletionChunkChoice(BaseModel):
    """A piece of one answer; every key is given in every frame."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionChunk(Chunk):
    """A frame: pieces of text, or the usage at the end with no choices."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: UsageInfo | None = None
    system_fingerprint: str | None = None
    metrics: RequestMetrics | None = None
