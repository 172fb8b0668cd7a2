"""Every kind of grammar as text in the one language that the library compiles (its Lark)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import takewhile

from llguidance import LLMatcher, grammar_from

from ellm_serve.errors import MAX_ECHO_CHARS
from ellm_serve.request import Grammar, GrammarKind

# Levels of objects and lists in a schema. Libraries of clients stop at fewer.
MAX_NESTING = 64
# Between two tokens of JSON. Without bounds a model can write blank lines until its limit.
WHITESPACE = r"[ \t]{1,128}|\r?\n[ \t]{0,128}"
# The text is never tokenized to find a forced token: that took milliseconds for a long constant.
# Comes last, and the last one counts, whatever the client's grammar says.
_OPTIONS = '\n%llguidance {"no_forcing": true}'
# A line of the grammar, as messages quote it.
_EXCERPT = re.compile(r" +[0-9]+ \| ")
_MAX_ERROR_CHARS = 1000


class GrammarError(Exception):
    """The grammar cannot be used; the message is for the client."""


def lark_source(grammar: Grammar) -> str:
    """The grammar in Lark.

    Raises:
        GrammarError: it is no valid JSON, too deep, or not what its kind asks for.
    """
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            text = json_rule({"type": "object"}, grammar.whitespace)
        case GrammarKind.JSON_SCHEMA:
            text = json_rule(_schema(grammar.text), grammar.whitespace, lenient=grammar.lenient)
        case GrammarKind.REGEX:
            return _regex(grammar.text) + _OPTIONS
        case GrammarKind.CHOICE:
            choices = " | ".join(map(literal, _choices(grammar.text)))
            return f"start: CHOICE\nCHOICE: {choices}{_OPTIONS}"
        case GrammarKind.LARK:
            return grammar.text + _OPTIONS
        case GrammarKind.GRAMMAR:
            return _any_grammar(grammar.text) + _OPTIONS
    return f"start: {text}{_OPTIONS}"


def literal(text: str) -> str:
    """A string in the grammar's notation."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(
    schema: Mapping[str, object], whitespace: str | None = None, *, lenient: bool = False
) -> str:
    """The rule for a value of the schema. `whitespace` "" means none at all.

    lenient: keywords that cannot be enforced are ignored instead of refused.
    """
    options: dict[str, object] = {"whitespace_pattern": WHITESPACE}
    if whitespace is not None:
        options = (
            {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
        )
    if lenient:
        options["lenient"] = True
    own = schema.get("x-guidance")
    if isinstance(own, Mapping):
        options |= own
    return "%json " + json.dumps({**schema, "x-guidance": options})


def plain_error(text: str, kind: GrammarKind) -> str:
    """The library's message without what only our notation has put into it, and not too long."""
    if text.startswith("panic"):
        # A bound inside of the library that it does not check in time.
        return "the grammar is too large"
    lines = text.replace("<non-verbose/>", "").splitlines()
    lines = [line for line in lines if not line.endswith(_OPTIONS.strip())]
    if kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT):
        # Where in our one line of Lark it is, and that line itself, would tell nothing.
        lines = list(takewhile(lambda line: not _EXCERPT.match(line), lines))
        lines[:1] = [line.rpartition("JSON schema: ")[2] for line in lines[:1]]
    short = "\n".join(line[:MAX_ECHO_CHARS] for line in lines)
    return short[:_MAX_ERROR_CHARS].rstrip()


def _regex(text: str) -> str:
    """A rule for the regular expression, which matches the whole answer."""
    grammars = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
    return str(grammars[0]["lark_grammar"])


def _schema(text: str) -> dict[str, object]:
    schema = _loads(text)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema must be an object")
    if _depth(schema) > MAX_NESTING:
        raise GrammarError(f"the JSON schema is nested more than {MAX_NESTING} levels deep")
    return schema


def _choices(text: str) -> list[str]:
    choices = _loads(text)
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("choice must be a list of strings")
    if not choices:
        raise GrammarError("choice must not be empty")
    return choices


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise GrammarError(f"the JSON is nested more than {MAX_NESTING} levels deep") from None
    except ValueError as error:
        raise GrammarError(f"not valid JSON: {error}") from None


def _depth(value: object) -> int:
    """Levels of objects and lists, without recursion."""
    level, depth = [value], 0
    while level := [item for node in level for item in _items(node)]:
        depth += 1
    return depth


def _items(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _any_grammar(text: str) -> str:
    """Lark as it is, and the grammars of llama.cpp (GBNF) translated."""
    try:
        return grammar_from("grammar", text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from None
