"""How single values are written: sizes, `auto`, lists, names, and the file they come from."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BeforeValidator, Field

from ellm_serve.errors import ConfigError

# vLLM's name → ours.
ALIASES = {
    "max_model_len": "sequence_length",
    "max_num_seqs": "batch_size",
    "max_num_batched_tokens": "prefill_block",
    "kv_cache_memory_bytes": "kv_budget_bytes",
    "kv_budget": "kv_budget_bytes",
    "download_dir": "cache_dir",
    "api_key": "api_keys",
    "disable_fastapi_docs": "disable_docs",
    "drain_timeout": "drain_timeout_s",
    "request_timeout": "request_timeout_s",
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


def _tuple(value: object) -> object:
    """One value or a list of them."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


Count = Annotated[int, Field(ge=1)]
Size = Annotated[Count, BeforeValidator(_size)]
AutoCount = Annotated[Count | None, BeforeValidator(_auto)]
AutoSize = Annotated[Count | None, BeforeValidator(_auto), BeforeValidator(_size)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_tuple)]


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


def canonical(values: Mapping[str, object], source: str, known: Sequence[str]) -> dict[str, object]:
    """The same values under our names; dashes count as underscores.

    Raises:
        ConfigError: a key is unknown, or two mean the same.
    """
    aliases = [alias for alias, name in ALIASES.items() if name in known]
    named: dict[str, object] = {}
    origin: dict[str, str] = {}
    for key, value in values.items():
        plain = key.replace("-", "_")
        name = ALIASES.get(plain, plain)
        if name not in known:
            near = nearest(plain, (*known, *aliases))
            hint = f"; did you mean {near}?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"{source}: unknown key {key!r}{hint}")
        if name in named:
            raise ConfigError(f"{source}: {origin[name]!r} and {key!r} mean the same; give one")
        named[name] = value
        origin[name] = key
    return named


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The known word that was probably meant."""
    return next(iter(difflib.get_close_matches(word, known, 1, cutoff=0.5)), None)
