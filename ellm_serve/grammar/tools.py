"""A grammar for answers that call tools, in the notation of the model's dialect.

For `tool_choice` "required", or with a single tool for a named one. The answer is one call, or
several with a line break between them, and nothing else.
* hermes: the arguments are JSON by the tool's schema.
* qwen3_coder: one element for each parameter, in the order in which they are declared, the optional
  ones or not. A value that may be a string is free text that contains nothing the parser takes for
  its end, or one of an enum's words; all other values are JSON by their schema.
Keywords that cannot be enforced are ignored: what a tool does with its arguments is its own affair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeGuard

from ellm_serve.errors import InvalidRequest
from ellm_serve.grammar.source import json_rule, literal
from ellm_serve.request import Grammar, GrammarKind
from ellm_serve.text.tokenizer import Tokenizer
from ellm_serve.text.tool_calls import DialectName
from ellm_serve.text.tool_calls.markup import TOOL_CALL, TOOL_CALL_END
from ellm_serve.text.tool_calls.schema import schema_types

# Free text up to the end of its element. It starts with the line break behind the opening tag.
_TEXT = """
text[lazy]: TEXT
TEXT: BODY "</parameter>"
BODY: /\\n(?s:.*)/ & ~/(?s:.*)(\\n<parameter=|<\\/tool_call>)(?s:.*)/"""
_SEPARATORS = frozenset("<>\n")

Schema = Mapping[str, object]


def tools_grammar(
    tools: Sequence[Schema],
    dialect: DialectName,
    tokenizer: Tokenizer,
    *,
    parallel: bool = True,
    field: str = "tools",
) -> Grammar:
    """The grammar of calls of these tools.

    Args:
        tools: as in the request, OpenAI's nested or flat form.
        parallel: whether more than one call may be made.
        field: the request's field that errors name.

    Raises:
        InvalidRequest: a name cannot be written in the dialect, or a schema is nested too deeply.
    """
    call = _hermes_call if dialect == "hermes" else _qwen3_coder_call
    functions = [_function(tool) for tool in tools]
    try:
        calls = [call(name, parameters) for name, parameters in functions]
    except RecursionError:
        raise InvalidRequest("The schema of a tool is nested too deeply.", field) from None
    except ValueError as error:
        raise InvalidRequest(str(error), field) from None
    start, end = _tag(tokenizer, TOOL_CALL), _tag(tokenizer, TOOL_CALL_END)
    lines = [
        'start: call ("\\n" call)*' if parallel else "start: call",
        f'call: {start} "\\n" ({" | ".join(f"call_{i}" for i in range(len(calls)))}) "\\n" {end}',
        *(f"call_{i}: {rule}" for i, rule in enumerate(calls)),
    ]
    text = "\n".join(lines) + (_TEXT if any(" text" in rule for rule in calls) else "")
    return Grammar(GrammarKind.LARK, text, field=field)


def _tag(tokenizer: Tokenizer, tag: str) -> str:
    """The token of a tag if the model has one, else its characters."""
    token_id = tokenizer.token_to_id(tag)
    return f"<[{token_id}]>" if token_id in tokenizer.control_ids else literal(tag)


def _function(tool: Schema) -> tuple[str, Schema]:
    """The name of a tool, and the schema of its arguments: an object with what is declared."""
    function = tool.get("function", tool)
    assert isinstance(function, Mapping)
    parameters = function.get("parameters")
    schema = parameters if isinstance(parameters, Mapping) else {}
    open_ended = {} if "properties" not in schema and schema else {"additionalProperties": False}
    return str(function["name"]), {**open_ended, **schema, "type": "object"}


def _hermes_call(name: str, parameters: Schema) -> str:
    opening = literal(f'{{"name": {literal(name)}, "arguments": ')
    return f'{opening} {json_rule(parameters, lenient=True)} "}}"'


def _qwen3_coder_call(name: str, parameters: Schema) -> str:
    if _SEPARATORS & set(name):
        raise ValueError(f"The model cannot write the name of the tool {name!r}.")
    elements = " ".join(_elements(name, parameters))
    return f'{literal(f"<function={name}>" + chr(10))} {elements} "</function>"'


def _elements(name: str, parameters: Schema) -> Iterator[str]:
    properties = _mapping(parameters.get("properties"))
    required = parameters.get("required")
    needed = [key for key in required if isinstance(key, str)] if _is_list(required) else []
    for key in dict.fromkeys([*properties, *needed]):
        if not _SEPARATORS & set(key):
            element = _element(key, properties.get(key), parameters)
            yield element if key in needed else f"({element})?"
        elif key in needed:
            raise ValueError(f"The model cannot write the parameter {key!r} of {name!r}.")


def _element(key: str, schema: object, root: Schema) -> str:
    opening = f"<parameter={key}>"
    value = _mapping(schema)
    types = schema_types(value, root)
    if "string" not in types:
        shared = {part: root[part] for part in ("$defs", "definitions") if part in root}
        rule = json_rule({**value, **shared}, lenient=True)
        return f'{literal(opening + chr(10))} {rule} "\\n</parameter>\\n"'
    words = [value["const"]] if "const" in value else value.get("enum")
    if types == {"string"} and _is_list(words):
        options = " | ".join(literal(str(word)) for word in words)
        return f'{literal(opening + chr(10))} ({options}) "\\n</parameter>\\n"'
    return f'{literal(opening)} text "\\n"'


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple)


def _mapping(value: object) -> Schema:
    return value if isinstance(value, Mapping) else {}
