"""Typed, strict access to a JSON object on disk.

A checkpoint's JSON files come from many writers, so every field is checked where it is read, and
a refusal names the file, the key and the value found. An explicit `null` means the same as an
absent key, as in transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from ellm_serve.errors import ModelError


def is_int(value: object) -> TypeGuard[int]:
    """An integer proper: JSON's true and false are ints to Python."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class JsonFields:
    """One JSON object and the name under which error messages speak of it."""

    source: str
    values: Mapping[str, object]

    @classmethod
    def from_file(cls, path: Path) -> JsonFields:
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise ModelError(
                f"{path} does not exist; is {path.parent} a model directory?"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path} cannot be read as JSON: {error}") from None
        if not isinstance(values, dict):
            raise ModelError(f"{path} must hold a JSON object, found {type(values).__name__}")
        return cls(str(path), values)

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def refuse(self, name: str, expected: str) -> ModelError:
        found = json.dumps(self.values.get(name))
        return ModelError(f"{self.source}: {name} must be {expected}, found {found}")

    def positive_int(self, name: str, default: int | None = None) -> int:
        value = self._present(name, default)
        if not is_int(value) or value <= 0:
            raise self.refuse(name, "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._present(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.refuse(name, "a number")
        number = _as_float(value)
        if not math.isfinite(number):
            raise self.refuse(name, "a finite number")
        return number

    def positive_number(self, name: str, default: float | None = None) -> float:
        number = self.number(name, default)
        if number <= 0:
            raise self.refuse(name, "a positive number")
        return number

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def flag(self, name: str, default: bool) -> bool:
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._present(name, default)
        if not isinstance(value, str):
            raise self.refuse(name, "a string")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids or layer indices: an integer, a list of integers, or nothing."""
        value = self.values.get(name)
        if value is None:
            return ()
        listed: list[object] = value if isinstance(value, list) else [value]
        ids = tuple(each for each in listed if is_int(each) and each >= 0)
        if len(ids) != len(listed):
            raise self.refuse(name, "an integer >= 0 or a list of them")
        return ids

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.values.get(name)
        listed = [] if value is None else value
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise self.refuse(name, "a list of strings")
        return tuple(listed)

    def child(self, name: str) -> JsonFields | None:
        """The object under `name`; None when it is absent, null or empty."""
        value = self.values.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return JsonFields(f"{self.source}: {name}", value)

    def _present(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.source}: {name} is missing")
        return default


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
