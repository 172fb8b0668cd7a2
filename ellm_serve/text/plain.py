"""Plain JSON values: the only objects a chat template gets to see.

Values are copied into exact built-in types, so nothing with methods of its own reaches the sandbox,
and lone surrogates (which no tokenizer can take) become U+FFFD on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from ellm_serve.errors import InvalidRequest

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"

# Far below Python's recursion limit, far above what messages and tool schemas need.
MAX_DEPTH = 100


def without_surrogates(text: str) -> str:
    """Joins surrogate pairs and replaces lone ones, as they cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def plain_json(value: object, param: str, depth: int = 0) -> Json:
    """A deep copy of `value`; anything that is not JSON is refused, naming `param`."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{param} is nested deeper than {MAX_DEPTH} levels", param)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        # A subclass (an enum member, say) must not bring its own methods along.
        return without_surrogates(value if type(value) is str else str.__str__(value))
    if isinstance(value, Mapping):
        return {
            without_surrogates(str(key)): plain_json(item, param, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain_json(item, param, depth + 1) for item in value]
    raise InvalidRequest(f"{param} contains a {type(value).__name__}, which is not JSON", param)


def map_strings(
    value: Json, change: Callable[[str], str], change_key: Callable[[str], str] | None = None
) -> Json:
    """The same value with `change` applied to every string in it, and to keys unless told apart."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_strings(item, change, change_key) for item in value]
    if isinstance(value, dict):
        of_key = change_key or change
        return {of_key(key): map_strings(item, change, change_key) for key, item in value.items()}
    return value


def strings_in(value: Json) -> Iterator[str]:
    """Every string of a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings_in(item)
