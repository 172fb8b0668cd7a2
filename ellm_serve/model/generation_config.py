"""Sampling defaults that a model ships in `generation_config.json`.

A field is None when the file does not give it; the server's own default then holds. Only fields
that a server can apply are read; the rest of the file speaks to training frameworks.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ellm_serve.errors import ConfigError, ModelError
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.fields import JsonFields


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Values for the sampling parameters a request leaves out."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_dir(cls, path: Path) -> GenerationDefaults:
        """Reads the file; a model without one has no defaults."""
        file = path / "generation_config.json"
        if not file.exists():
            return cls()
        fields = JsonFields.from_file(file)
        # An absent do_sample does not mean greedy: many files give only a temperature.
        greedy = not fields.flag("do_sample", True)
        read = replace(_sampling_values(fields), eos_token_ids=fields.ids("eos_token_id"))
        return replace(read, temperature=0.0) if greedy else read

    @classmethod
    def neutral(cls) -> GenerationDefaults:
        """No defaults: every field a request leaves out has its neutral value.

        End ids are no matter of taste: the engine takes them from the model all the same.
        """
        return cls()

    def override(self, values: Mapping[str, object]) -> GenerationDefaults:
        """These defaults with some replaced; null takes one away.

        Raises:
            ConfigError: a name is unknown or a value is out of range.
        """
        known = sorted(asdict(self).keys() - {"eos_token_ids"})
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise ConfigError(f"override_generation_config: unknown key {name!r}; {hint}")
        try:
            given = _sampling_values(JsonFields("override_generation_config", values))
        except ModelError as error:
            raise ConfigError(str(error)) from None
        return replace(self, **{name: getattr(given, name) for name in values})


def _sampling_values(fields: JsonFields) -> GenerationDefaults:
    return GenerationDefaults(
        temperature=_in_range(fields, "temperature", 0.0, 100.0),
        top_k=_top_k(fields),
        top_p=_in_range(fields, "top_p", 0.0, 1.0, open_low=True),
        min_p=_in_range(fields, "min_p", 0.0, 1.0),
        repetition_penalty=_in_range(fields, "repetition_penalty", 0.0, 100.0, open_low=True),
        presence_penalty=_in_range(fields, "presence_penalty", -2.0, 2.0),
        frequency_penalty=_in_range(fields, "frequency_penalty", -2.0, 2.0),
        max_new_tokens=(
            fields.positive_int("max_new_tokens") if fields.has("max_new_tokens") else None
        ),
    )


def end_token_ids(config: ModelConfig, generation: GenerationDefaults) -> tuple[int, ...]:
    """Every id that ends a sequence: those of both files, in order, each once."""
    ends = tuple(dict.fromkeys(config.eos_token_ids + generation.eos_token_ids))
    for token_id in ends:
        if token_id >= config.vocab_size:
            raise ModelError(
                f"generation_config.json: eos_token_id {token_id} is outside the vocabulary of"
                f" {config.vocab_size}"
            )
    return ends


def _in_range(
    fields: JsonFields, name: str, low: float, high: float, open_low: bool = False
) -> float | None:
    value = fields.optional_number(name)
    if value is None or low < value <= high or (value == low and not open_low):
        return value
    raise fields.refuse(name, f"in {'(' if open_low else '['}{low:g}, {high:g}]")


def _top_k(fields: JsonFields) -> int | None:
    value = _in_range(fields, "top_k", -1, 1 << 31)
    if value is not None and value != int(value):
        raise fields.refuse("top_k", "a whole number")
    return None if value is None else int(value)
