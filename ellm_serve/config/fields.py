"""What fields a configuration has, as plain values: for command lines and for documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, get_args, get_origin

from ellm_serve.config.engine import EngineConfig
from ellm_serve.config.values import ALIASES


class Kind(StrEnum):
    """How a value is written."""

    SWITCH = "switch"
    CHOICE = "choice"
    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    NAMES = "names"
    MAPPING = "mapping"


@dataclass(frozen=True, slots=True)
class Field:
    """One field. `aliases` are other names for it; `default` is None for "decided at start"."""

    name: str
    aliases: tuple[str, ...]
    kind: Kind
    choices: tuple[str, ...]
    default: object
    description: str


def fields_of(config: type[EngineConfig]) -> tuple[Field, ...]:
    """All fields, in their order."""
    found = []
    for name, info in config.model_fields.items():
        members = _members(info.annotation)
        choices = tuple(sorted(one for one in members if isinstance(one, str)))
        found.append(
            Field(
                name,
                tuple(alias for alias, target in ALIASES.items() if target == name),
                Kind.CHOICE if choices else _kind(members),
                choices,
                None if info.is_required() else info.get_default(call_default_factory=True),
                info.description or "",
            )
        )
    return tuple(found)


_KINDS = (
    (bool, Kind.SWITCH), (tuple, Kind.NAMES), (Mapping, Kind.MAPPING), (str, Kind.TEXT),
    (float, Kind.NUMBER), (int, Kind.INTEGER),
)  # fmt: skip


def _kind(members: set[Any]) -> Kind:
    return next(kind for member, kind in _KINDS if member in members)


def _members(annotation: Any) -> set[Any]:
    """Of a union its members, of a literal its values, of a generic type its origin."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return set(arguments)
    if origin is Annotated:
        return _members(arguments[0])
    if not arguments or isinstance(origin, type) and issubclass(origin, tuple | Mapping):
        return {origin or annotation}
    return set().union(*map(_members, arguments))
