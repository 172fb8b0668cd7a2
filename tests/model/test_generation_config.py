"""Sampling defaults and the set of end ids."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ellm_serve.errors import ConfigError, ModelError
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.generation_config import GenerationDefaults, end_token_ids
from tests.tiny_models import write_model


def read(directory: Path, fields: dict[str, Any]) -> GenerationDefaults:
    (directory / "generation_config.json").write_text(json.dumps(fields))
    return GenerationDefaults.from_dir(directory)


def test_published_fields(tmp_path: Path) -> None:
    fields = {
        "bos_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "max_new_tokens": 512,
        "transformers_version": "4.51.0",
    }
    assert read(tmp_path, fields) == GenerationDefaults(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05,
        presence_penalty=0.5, frequency_penalty=-0.25, max_new_tokens=512,
        eos_token_ids=(151645, 151643),
    )  # fmt: skip


def test_no_file_and_no_fields_mean_no_defaults(tmp_path: Path) -> None:
    assert GenerationDefaults.from_dir(tmp_path) == GenerationDefaults()
    assert read(tmp_path, {"temperature": None}) == GenerationDefaults()


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    """Its temperature is then left over from elsewhere and must not switch sampling on."""
    assert read(tmp_path, {"do_sample": False, "temperature": 0.7}).temperature == 0.0
    assert read(tmp_path, {"temperature": 0.7}).temperature == 0.7


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 1.5},
        {"top_p": 0},
        {"repetition_penalty": 0},
        {"top_k": 2.5},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -3},
        {"top_k": 1e300},
        {"max_new_tokens": 0},
        {"do_sample": 1},
        {"eos_token_id": [1, "2"]},
    ],
)
def test_bad_values_name_the_key(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(fields))):
        read(tmp_path, fields)


def test_neutral_defaults_say_nothing() -> None:
    assert GenerationDefaults.neutral() == GenerationDefaults()


def test_an_override_replaces_what_it_names() -> None:
    """Null takes a default away; what is not named stays, end ids as well."""
    file = GenerationDefaults(temperature=0.7, top_k=20, eos_token_ids=(7,))
    changed = file.override({"top_k": None, "min_p": 0.1, "max_new_tokens": 64})
    assert changed == GenerationDefaults(
        temperature=0.7, min_p=0.1, max_new_tokens=64, eos_token_ids=(7,)
    )
    assert file.override({}) == file


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temprature": 1.0}, "unknown key 'temprature'; did you mean temperature"),
        ({"zzz": 1.0}, "unknown key 'zzz'; known are"),
        ({"eos_token_ids": [1]}, "unknown key 'eos_token_ids'"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_p": 2}, "top_p must be in"),
    ],
)
def test_bad_overrides_are_refused(values: dict[str, object], words: str) -> None:
    """They come from a flag: one line that names the key."""
    with pytest.raises(ConfigError, match=re.escape(words)):
        GenerationDefaults().override(values)


def test_end_ids_are_the_union_of_both_files(tmp_path: Path) -> None:
    """Qwen3 base files disagree; missing one id lets a chat run on past its end."""
    write_model(tmp_path, moe=False, eos_token_ids=[7, 9])
    generation = GenerationDefaults.from_dir(tmp_path)
    assert end_token_ids(ModelConfig.from_dir(tmp_path), generation) == (7, 9)
    assert end_token_ids(ModelConfig.from_dir(tmp_path), GenerationDefaults()) == (7,)


def test_an_end_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """It could never be sampled: every answer would run to the length limit."""
    write_model(tmp_path, moe=False, vocab=256, eos_token_ids=[7, 256])
    with pytest.raises(ModelError, match="256 is outside the vocabulary"):
        end_token_ids(ModelConfig.from_dir(tmp_path), GenerationDefaults.from_dir(tmp_path))
