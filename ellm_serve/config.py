"""The engine's configuration: frozen, strict, complete.

An unknown key, a wrong type and a value out of range are refused in one line; nothing is ignored.
None means "decide at start"; `resolve` puts the decisions into a new configuration and nobody
writes to one later. vLLM's names for the same things are accepted (`ALIASES`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ellm_serve.errors import ConfigError

# vLLM's name → ours.
ALIASES = {
    "max_model_len": "sequence_length",
    "max_num_seqs": "batch_size",
    "max_num_batched_tokens": "prefill_block",
    "kv_cache_memory_bytes": "kv_budget_bytes",
}
AUTO = "auto"
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of `12GB` (powers of ten), `12GiB` (powers of two) or `4096`.

    Raises:
        ValueError: it is none of these.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size like 12GB, 12GiB or a number of bytes")
    number, unit, binary = match.groups()
    shift = _UNITS[unit.upper()]
    return int(float(number) * (1 << shift if binary else 1000 ** (shift // 10)))


def _size(value: object) -> object:
    return parse_size(value) if isinstance(value, str) and value != AUTO else value


def _auto(value: object) -> object:
    return None if value == AUTO else value


AutoCount = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_auto)]
AutoSize = Annotated[
    Annotated[int, Field(ge=1)] | None, BeforeValidator(_auto), BeforeValidator(_size)
]


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

    @classmethod
    def from_values(cls, values: Mapping[str, object], source: str = "configuration") -> Self:
        """Checks names and values.

        Raises:
            ConfigError: one line that names the key, and the nearest one if it is unknown.
        """
        named = _canonical(values, source, tuple(cls.model_fields))
        try:
            return cls.model_validate(named)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"][:1])
            reason = first["msg"].removeprefix("Value error, ")
            got = "" if first["type"] == "missing" else f" (got {first['input']!r})"
            raise ConfigError(f"{source}: {key}: {reason[:1].lower()}{reason[1:]}{got}") from None

    @classmethod
    def from_options(cls, **options: object) -> Self:
        """`from_values` by keyword."""
        return cls.from_values(options, "options")

    @classmethod
    def from_yaml(cls, path: Path, overrides: Mapping[str, object] | None = None) -> Self:
        """A YAML mapping of the fields; `overrides` (from flags) win."""
        values = read_yaml(path)
        for key in overrides or {}:
            values.pop(key, None)
            for alias, name in ALIASES.items():
                if name == key:
                    values.pop(alias, None)
        return cls.from_values(values | dict(overrides or {}), str(path))


def resolve(
    config: EngineConfig,
    *,
    sequence_length: int,
    threads: int,
    kv_budget_bytes: int,
    sockets: int = 1,
) -> EngineConfig:
    """A configuration without None: what was left open takes these values."""
    decided = {
        "sequence_length": sequence_length,
        "threads": threads,
        "kv_budget_bytes": kv_budget_bytes,
        "sockets": sockets,
    }
    given = config.model_dump(exclude_none=True)
    return type(config).model_validate(decided | given)


def read_yaml(path: Path) -> dict[str, object]:
    """The mapping in a file.

    Raises:
        ConfigError: there is none.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not YAML: {reason}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path} must be a mapping of names to values")
    return values


def _canonical(
    values: Mapping[str, object], source: str, known: tuple[str, ...]
) -> dict[str, object]:
    """The same values under our names; dashes count as underscores."""
    named: dict[str, object] = {}
    origin: dict[str, str] = {}
    for key, value in values.items():
        plain = key.replace("-", "_")
        name = ALIASES.get(plain, plain)
        if name not in known:
            near = difflib.get_close_matches(plain, (*known, *ALIASES), 1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"{source}: unknown key {key!r}{hint}")
        if name in named:
            raise ConfigError(f"{source}: {origin[name]!r} and {key!r} mean the same; give one")
        named[name] = value
        origin[name] = key
    return named
