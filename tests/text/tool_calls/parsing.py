"""What the parser tests share: tools, ways to cut a text, and a parser run over the pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from hypothesis import strategies as st

from ellm_serve.text.output_parser import OutputParser
from ellm_serve.text.tool_calls import (
    DialectName,
    Output,
    OutputDelta,
    ToolCallArguments,
    collect,
    create_dialect,
)

# One parameter of every type, as a request would declare them.
PROPERTIES: dict[str, object] = {
    "b": {"type": "boolean"},
    "n": {"type": "integer"},
    "f": {"type": "number"},
    "s": {"type": "string"},
    "a": {"type": "array"},
    "o": {"type": "object"},
    "u": {"type": ["string", "null"]},
    "v": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "w": {},
    "e": {"enum": ["1", "2"]},
}
TOOLS: list[dict[str, object]] = [
    {
        "type": "function",
        "function": {"name": "act", "parameters": {"type": "object", "properties": PROPERTIES}},
    },
    {"type": "function", "function": {"name": "now"}},
]


def deltas_of(
    pieces: Iterable[str],
    dialect: DialectName | None,
    *,
    tools: Sequence[dict[str, object]] = TOOLS,
    reasoning: bool = False,
    starts_in_reasoning: bool | None = None,
) -> list[OutputDelta]:
    """The deltas of a text in pieces; ids are call-0, call-1, ..."""
    serial = itertools.count()
    parser = OutputParser(
        create_dialect(dialect, tools, lambda: f"call-{next(serial)}"),
        reasoning=reasoning,
        starts_in_reasoning=starts_in_reasoning,
    )
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return deltas + parser.finish()


def parse(text: str, dialect: DialectName | None, **options: bool | None) -> Output:
    """The answer in a text that is given at once."""
    return collect(
        deltas_of(
            [text],
            dialect,
            reasoning=bool(options.get("reasoning")),
            starts_in_reasoning=options.get("starts_in_reasoning"),
        )
    )


def calls(output: Output) -> list[tuple[str, str]]:
    """Names and arguments."""
    return [(call.name, call.arguments) for call in output.tool_calls]


def pieces_of(text: str, width: int) -> list[str]:
    return [text[start : start + width] for start in range(0, len(text), width)]


def all_cuts(text: str) -> Iterator[list[str]]:
    """Every split in two, and pieces of every width from 1 to 40."""
    yield from ([text[:cut], text[cut:]] for cut in range(len(text) + 1))
    yield from (pieces_of(text, width) for width in range(1, 41))


def cut_at(text: str, widths: Sequence[int]) -> list[str]:
    """Pieces of these widths, over and over."""
    pieces: list[str] = []
    position = 0
    for width in itertools.cycle(widths):
        if position >= len(text):
            return pieces
        pieces.append(text[position : position + width])
        position += width
    return pieces


def widths() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 30), min_size=1, max_size=8)


def num_arguments(deltas: Iterable[OutputDelta]) -> int:
    """How many characters of arguments are known."""
    return sum(len(d.fragment) for d in deltas if isinstance(d, ToolCallArguments))


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)

_MARKUP_WORDS = [
    *("<tool_call>", "</tool_call>", "<function=act>", "<function=zzz>", "</function>"),
    *("<parameter=s>", "<parameter=n>", "<parameter=u>", "<parameter=w>", "</parameter>"),
    *("<think>", "</think>", "<", "</", ">", "`", "\n", " ", "\n\n", "x", "12", "null", "é"),
    *('{"name": "act"', ', "arguments": ', '{"a": ', '"', "\\", "\\u00e9", "\\ud83d", "{", "}"),
    *("[", "]", ",", ":", '{"name": "act", "arguments": {"s": "', '"}}', "true", "1.5"),
    "<tool_call>\n<function=act>\n<parameter=",
]
# Tags and what may stand between them, in any order.
MARKUP = st.lists(st.sampled_from(_MARKUP_WORDS), max_size=25).map("".join)
