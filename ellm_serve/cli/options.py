"""Flags that several verbs share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ellm_serve.cli.config_flags import add_config_flags, given_options
from ellm_serve.config import EngineConfig

if TYPE_CHECKING:
    from ellm_serve.llm import LLM
    from ellm_serve.request import SamplingParams

_SAMPLING = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed",
)  # fmt: skip


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Which model (the built-in one unless given), and how large an engine."""
    add_config_flags(parser, EngineConfig)
    parser.set_defaults(model="builtin")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, as fields of `EngineConfig`; several sockets are Ray workers."""
    given = given_options(args, EngineConfig)
    if "workers" not in given and given.get("sockets", 1) != 1:
        given["workers"] = "ray"
    return given


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen; what is not given comes from the model's generation_config.json."""
    parser.add_argument("--max-tokens", type=int, help="most tokens to generate")
    parser.add_argument("--temperature", type=float, help="0 takes the most likely token")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--repetition-penalty", type=float)
    parser.add_argument("--presence-penalty", type=float)
    parser.add_argument("--frequency-penalty", type=float)
    parser.add_argument("--seed", type=int)


def sampling(args: argparse.Namespace, llm: LLM) -> SamplingParams:
    """The sampling flags over the model's defaults."""
    given = {name: value for name in _SAMPLING if (value := vars(args)[name]) is not None}
    return llm.sampling(**({"max_tokens": llm.defaults.max_new_tokens} | given))
