"""A flag for every field of a configuration, under our name and vLLM's.

The command line only finds out what was given; the configuration itself decides whether it is
right, so that a flag and a line in a file are refused in the same words.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from ellm_serve.config import EngineConfig, ServeConfig
from ellm_serve.config.fields import Field, Kind, fields_of
from ellm_serve.config.values import nearest


def add_config_flags(parser: argparse.ArgumentParser, config: type[EngineConfig]) -> None:
    """Adds them in the order of the fields. What is not given is None in the parsed arguments."""
    group = parser.add_argument_group("configuration")
    for field in fields_of(config):
        flags = ["--" + name.replace("_", "-") for name in (field.name, *field.aliases)]
        group.add_argument(
            *flags, dest=field.name, default=None, help=_help(field), **_reading(field)
        )


def given_options(args: argparse.Namespace, config: type[EngineConfig]) -> dict[str, Any]:
    """The flags that were given, as fields of the configuration."""
    names = [field.name for field in fields_of(config)]
    return {name: value for name in names if (value := vars(args)[name]) is not None}


def nearest_flag(flag: str) -> str | None:
    """The configuration's flag that was probably meant."""
    name = flag.partition("=")[0].lstrip("-").replace("-", "_")
    names = [name for field in fields_of(ServeConfig) for name in (field.name, *field.aliases)]
    near = nearest(name, names)
    return "--" + near.replace("_", "-") if near else None


def _help(field: Field) -> str:
    text = field.description.replace("%", "%%")
    shown = field.default not in (None, "", (), {}, False)
    return f"{text} (default: {field.default})" if shown else text


def _reading(field: Field) -> dict[str, Any]:
    """How argparse reads a value of this kind."""
    match field.kind:
        case Kind.SWITCH:
            return {"action": argparse.BooleanOptionalAction}
        case Kind.CHOICE:
            return {"choices": field.choices}
        case Kind.TEXT:
            return {"metavar": "TEXT"}
        case Kind.INTEGER:
            return {"metavar": "N", "type": _tried(int)}
        case Kind.NUMBER:
            return {"metavar": "X", "type": _tried(float)}
        case Kind.NAMES:
            return {"metavar": "NAME", "nargs": "+", "action": "extend"}
        case Kind.MAPPING:
            return {"metavar": "JSON", "type": _tried(json.loads)}


def _tried(read: Callable[[str], object]) -> Callable[[str], object]:
    """`read`, or the text as it is: `auto`, a size, or something the configuration refuses."""

    def parse(text: str) -> object:
        try:
            return read(text)
        except ValueError:
            return text

    return parse
