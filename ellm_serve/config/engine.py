"""The configuration of one engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ellm_serve.config.values import ALIASES, AutoCount, AutoSize, Seconds, canonical, read_yaml
from ellm_serve.errors import ConfigError

Config = TypeVar("Config", bound="EngineConfig")


class EngineConfig(BaseModel):
    """What one engine is started with. Use `from_values` or `from_yaml`: their errors are ours."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str = Field(
        min_length=1, description="directory, Hugging Face id (owner/name), or `builtin`"
    )
    revision: str | None = Field(
        None, description="branch, tag or commit on the hub; None: the default branch"
    )
    offline: bool = Field(False, description="use the download cache only")
    cache_dir: str | None = Field(
        None, description="where downloads are kept; None: Hugging Face's own cache"
    )
    sequence_length: AutoCount = Field(
        None,
        description="tokens of one session, prompt and output together; per slot, never divided by"
        " the batch size; auto: what the model was trained for, as far as memory allows",
    )
    batch_size: int = Field(
        4, ge=1, le=1024, description="slots: sessions kept, and sequences decoded together"
    )
    threads: AutoCount = Field(
        None, description="compute threads of all sockets together; auto: every allowed core"
    )
    sockets: AutoCount = Field(
        None,
        description="sockets the model is cut over, more than the machine has for trying it out;"
        " auto: one, or with Ray workers as many as the machine has",
    )
    expert_split: Literal["slice", "whole"] = Field(
        "slice", description="sockets hold a slice of every expert, or whole experts"
    )
    workers: Literal["threads", "ray"] = Field(
        "threads",
        description="sockets are threads of this process, or Ray workers that may die and be"
        " replaced",
    )
    housekeeping_cores: int = Field(
        0, ge=0, description="cores left free of compute threads, for HTTP and Ray"
    )
    keep_weights: bool = Field(
        False,
        description="packed weights of Ray workers stay in shared memory when the engine ends, so"
        " that the next start of the same model is fast",
    )
    prefill_block: int = Field(
        2048, ge=16, description="prompt tokens that pass through the layers together"
    )
    prefill_budget_s: float = Field(
        0.05, gt=0, description="how long decoding sequences wait for prefill between two tokens"
    )
    max_logit_rows: int = Field(
        32, ge=1, description="prompt positions whose logits exist at once (prompt_logprobs)"
    )
    kv_budget_bytes: AutoSize = Field(
        None,
        description="memory that all sessions together may fill, like 12GB; auto: what weights and"
        " activations leave",
    )
    max_queued_requests: int = Field(
        256, ge=1, description="requests that may wait before more are refused"
    )
    max_queued_tokens: int = Field(
        1 << 21, ge=1, description="prompt tokens that may wait before more are refused"
    )
    fork_threshold: int = Field(
        64, ge=0, description="shorter common prefixes are computed again rather than copied"
    )
    stall_timeout_s: Seconds = Field(
        120.0,
        description="seconds without progress, beyond three times what the step in flight should"
        " take, after which the engine counts as stuck",
    )

    @classmethod
    def from_values(cls, values: Mapping[str, object], source: str = "configuration") -> Self:
        """Checks names and values.

        Raises:
            ConfigError: one line that names the key, and the nearest one if it is unknown.
        """
        named = canonical(values, source, tuple(cls.model_fields))
        try:
            return cls.model_validate(named)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"][:1])
            reason = first["msg"].removeprefix("Value error, ")
            # What must not be shown as part of a configuration must not be shown here either.
            hidden = first["type"] == "missing" or not cls.model_fields[key].repr
            got = "" if hidden else f" (got {first['input']!r})"
            raise ConfigError(f"{source}: {key}: {reason[:1].lower()}{reason[1:]}{got}") from None

    @classmethod
    def from_options(cls, **options: object) -> Self:
        """`from_values` by keyword."""
        return cls.from_values(options, "options")

    @classmethod
    def from_yaml(cls, path: Path, overrides: Mapping[str, object] | None = None) -> Self:
        """A YAML mapping of the fields; `overrides` (from flags) win."""
        values = cls._read(path)
        overrides = overrides or {}
        kept = {
            key: value
            for key, value in values.items()
            if ALIASES.get(key.replace("-", "_"), key.replace("-", "_")) not in overrides
        }
        return cls.from_values(kept | dict(overrides), str(path))

    @classmethod
    def _read(cls, path: Path) -> dict[str, object]:
        return read_yaml(path)


def resolve(
    config: Config,
    *,
    sequence_length: int,
    threads: int,
    kv_budget_bytes: int,
    sockets: int = 1,
) -> Config:
    """A configuration without None: what was left open takes these values."""
    decided = {
        "sequence_length": sequence_length,
        "threads": threads,
        "kv_budget_bytes": kv_budget_bytes,
        "sockets": sockets,
    }
    given = config.model_dump(exclude_none=True)
    return type(config).model_validate(decided | given)
