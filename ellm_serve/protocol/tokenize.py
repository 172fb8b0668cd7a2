"""/tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator

from ellm_serve.protocol.chat import ConversationFields
from ellm_serve.protocol.checks import check_raw_messages
from ellm_serve.protocol.common import TokenIds
from ellm_serve.protocol.fields import refuse_unsupported


class TokenizeCompletionRequest(BaseModel):
    """A raw prompt to turn into ids."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(ConversationFields):
    """A conversation to turn into the ids of its prompt."""

    model: str | None = None
    return_token_strs: bool | None = False

    @model_validator(mode="before")
    @classmethod
    def _check_raw(cls, data: object) -> object:
        if isinstance(data, Mapping):
            check_raw_messages(data)
        return data

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        refuse_unsupported(self.__dict__)
        return self

    def template_variables(self, server: Mapping[str, Any]) -> dict[str, Any]:
        """Variables for the chat template: the server's, then the request's own."""
        return {**server, **(self.chat_template_kwargs or {})}


TokenizeRequest = TokenizeCompletionRequest | TokenizeChatRequest


class TokenizeResponse(BaseModel):
    """`token_strs` are the vocabulary's own spellings, if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(BaseModel):
    """Ids to turn into text; those that the vocabulary does not have give none."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    tokens: TokenIds


class DetokenizeResponse(BaseModel):
    """The text."""

    prompt: str
