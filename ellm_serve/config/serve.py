"""The configuration of a service: an engine, and how it is offered over HTTP."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field

from ellm_serve.config.engine import EngineConfig
from ellm_serve.config.values import AutoCount, Names, Seconds, Size, read_yaml
from ellm_serve.errors import ConfigError

KEY_VARIABLES = ("ELLM_API_KEY", "VLLM_API_KEY")


class ServeConfig(EngineConfig):
    """What a service is started with: everything of the engine, and the fields below.

    Names and meanings are vLLM's where vLLM has the same thing.
    """

    workers: Literal["threads", "ray"] = Field(
        "ray",
        description="sockets are threads of the replica, or Ray workers that may die and be"
        " replaced",
    )
    served_model_name: Names = Field(
        (), description="names clients may call the model by; none: `model` as it was given"
    )
    api_keys: Names = Field(
        (),
        repr=False,
        description="keys of which clients must send one; also from api_key_file and from the"
        " environment (ELLM_API_KEY, VLLM_API_KEY); none: open to everybody",
    )
    api_key_file: str | None = Field(None, description="file with one key per line")
    metrics_open: bool = Field(True, description="/metrics needs no key")
    chat_template: str | None = Field(
        None, description="Jinja file used in place of the model's own chat template"
    )
    chat_template_content_format: Literal["auto", "string"] = Field(
        "auto", description="message parts are joined to a string before the template sees them"
    )
    default_chat_template_kwargs: Mapping[str, object] = Field(
        default_factory=dict, description="template variables that a request may override"
    )
    trust_request_chat_template: bool = Field(
        False, description="requests may bring a chat template of their own"
    )
    tool_call_parser: Literal["auto", "qwen3_coder", "hermes", "none"] = Field(
        "auto",
        description="how the model writes tool calls: auto: as its chat template teaches; none: it"
        " makes none, and requests for calls are refused",
    )
    enable_auto_tool_choice: bool = Field(
        True, description='models may choose to call tools (tool_choice "auto")'
    )
    exclude_tools_when_tool_choice_none: bool = Field(
        False, description='tools are left out of the prompt for tool_choice "none"'
    )
    reasoning_parser: Literal["auto", "qwen3", "none"] = Field(
        "auto",
        description="whether thoughts are told apart from answers: auto: if the chat template"
        " speaks of thinking",
    )
    reasoning_content_alias: bool = Field(
        False, description="chat answers carry thoughts under their older name as well"
    )
    generation_config: str = Field(
        "auto",
        min_length=1,
        description="where default sampling parameters come from: auto: the model's"
        " generation_config.json; vllm: neutral ones; or a directory",
    )
    override_generation_config: Mapping[str, object] = Field(
        default_factory=dict, description="default sampling parameters that win over those"
    )
    max_logprobs: Annotated[int, Field(ge=0, le=20)] = Field(
        20, description="most alternatives a request may ask for per token"
    )
    max_n: AutoCount = Field(
        None, description="most answers to one prompt in a request; auto: the batch size"
    )
    response_role: str = Field("assistant", min_length=1, description="role of chat answers")
    enable_prompt_tokens_details: bool = Field(
        True, description="usage says how many prompt tokens came from the session's cache"
    )
    enable_force_include_usage: bool = Field(
        False, description="every stream ends with a usage chunk, asked for or not"
    )
    enable_per_request_metrics: bool = Field(
        False, description="answers carry their own times under `metrics`"
    )
    enable_request_id_headers: bool = Field(True, description="answers carry X-Request-Id")
    sse_keep_alive_interval: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        5.0, description="seconds between comments in a stream that has nothing to say; 0: none"
    )
    max_body_bytes: Size = Field(32 << 20, description="largest request body, like 32MiB")
    request_timeout_s: Seconds | None = Field(
        None, description="seconds a request may take unless it says so itself; None: any"
    )
    drain_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        300.0, description="seconds that running requests may go on when the service is stopped"
    )
    access_log: Literal["text", "json", "off"] = Field(
        "text", description="one line per request, without prompts and keys"
    )
    dev_mode: bool = Field(False, description="offer /server_info")
    allowed_origins: Names = Field(
        (), description="origins browsers may call from (CORS); none: no cross-origin calls"
    )
    disable_docs: bool = Field(False, description="no /docs, /redoc and /openapi.json")
    root_path: str = Field("", description="prefix a proxy in front takes off the path")

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model; the first one is in every answer."""
        return self.served_model_name or (self.model,)

    @property
    def largest_n(self) -> int:
        """Most answers to one prompt in a request."""
        return self.max_n or self.batch_size

    def with_keys(self, environment: Mapping[str, str] = os.environ) -> Self:
        """The same, with the keys of file and environment among `api_keys`.

        Raises:
            ConfigError: the file cannot be read or holds no key.
        """
        keys = [*self.api_keys]
        if self.api_key_file is not None:
            keys += _keys_of(Path(self.api_key_file))
        keys += [environment[name] for name in KEY_VARIABLES if environment.get(name)]
        return self.model_copy(
            update={"api_keys": tuple(dict.fromkeys(keys)), "api_key_file": None}
        )

    @classmethod
    def _read(cls, path: Path) -> dict[str, object]:
        """The fields in a file of their own, or as `args` of a Serve application."""
        values = read_yaml(path)
        return _application_args(values, path) if "applications" in values else values


def _keys_of(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"api_key_file: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_key_file: {path} is not text") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"api_key_file: {path} holds no key")
    return keys


def _application_args(values: Mapping[str, object], path: Path) -> dict[str, object]:
    match values["applications"]:
        case [{"args": dict(arguments)}] if all(isinstance(key, str) for key in arguments):
            return arguments
    raise ConfigError(f"{path} must have one application with args")
