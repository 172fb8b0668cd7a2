"""The Jinja environment of chat templates: sandboxed, and stopping by itself.

A thread that renders cannot be killed, so limits are compiled into the template: each loop turn,
call, filter and piece of output passes the `RenderState` of the rendering, which raises when time
or text is used up. Templates otherwise see what transformers offers them.
"""

from __future__ import annotations

import json
import operator
import types
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ellm_serve.text.render_limits import (
    MAX_LIST_ITEMS,
    RenderState,
    check_binop,
    check_call,
    check_format,
    check_indent,
    check_percent,
)

# Names that no template can write.
STATE_KEY = "\0state"
_MEASURE, _TICK, _PLAIN = "\0measure", "\0tick", "\0plain"

# Their results grow with arguments in ways that are not worth pricing.
_UNSAFE_ATTRIBUTES = frozenset({"translate", "expandtabs", "encode", "to_bytes"})

# What a template may ask about the content of a string; answered for the client's own spelling.
_QUESTIONS = frozenset({"startswith", "endswith", "find", "rfind", "index", "rindex", "count"})


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`: a mark for training tools, of no effect here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that builds the limits into each template it compiles."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        # Not optimized: constants would be computed while compiling, when no limit is in force.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[_GenerationBlock, loopcontrols],
        )
        # Without a purpose here, and costly with large arguments.
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        library = ImmutableSandboxedEnvironment()
        library.filters["tojson"] = _tojson
        self.filters = {name: _priced(name, library) for name in library.filters}
        self.filters |= {_MEASURE: _measure, _TICK: _tick, _PLAIN: _plain}

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        _build_in_limits(source)
        source.set_environment(self)
        return super()._generate(source, name, filename, defer_init)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNSAFE_ATTRIBUTES and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        state = _state(context)
        check_binop(state, operator, left, right)
        return _paid(state, super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            check_format(value.__self__)
        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        # Names with underscores, as in the base class: a template's call may use any keyword.
        state = _state(__context)
        state.tick()
        if isinstance(__obj, types.BuiltinMethodType) and isinstance(__obj.__self__, str):
            subject, name = __obj.__self__, __obj.__name__
            if name == "join":
                args = tuple(list(arg) for arg in args)
            check_call(state, name, subject, args)
            if name in _QUESTIONS and state.stand_ins is not None:
                # These take no keywords; those in `kwargs` are Jinja's own.
                question = operator.methodcaller(name, *map(state.plain, args))
                return question(state.plain(subject))
        return _paid(state, super().call(__context, __obj, *args, **kwargs))


def _state(context: Context) -> RenderState:
    state = context.parent[STATE_KEY]
    assert isinstance(state, RenderState)
    return state


def _paid(state: RenderState, result: Any) -> Any:
    if isinstance(result, str):
        state.spend(len(result))
    elif isinstance(result, (list, tuple)) and len(result) > MAX_LIST_ITEMS:
        raise SecurityError(f"chat templates may not make lists of over {MAX_LIST_ITEMS} items")
    return result


def _build_in_limits(template: nodes.Template) -> None:
    """Wraps the expressions and loops of a parsed template in our own filters."""
    for output in list(template.find_all(nodes.Output)):
        output.nodes = [_wrap(_MEASURE, child) for child in output.nodes]
    for concat in list(template.find_all(nodes.Concat)):
        concat.nodes = [_wrap(_MEASURE, child) for child in concat.nodes]
    for loop in list(template.find_all(nodes.For)):
        loop.iter = _wrap(_TICK, loop.iter)
        tick = _wrap(_TICK, nodes.Const(None, lineno=loop.lineno))
        loop.body = [nodes.ExprStmt(tick, lineno=loop.lineno), *loop.body]
        if loop.test is not None:
            # Turns that the condition skips never reach the body.
            loop.test = _wrap(_TICK, loop.test)
    for compare in list(template.find_all(nodes.Compare)):
        compare.expr = _wrap(_PLAIN, compare.expr)
        for operand in compare.ops:
            operand.expr = _wrap(_PLAIN, operand.expr)


def _wrap(name: str, node: nodes.Node) -> nodes.Filter:
    if isinstance(node, nodes.TemplateData):
        node = nodes.Const(node.data, lineno=node.lineno)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context
def _measure(context: Context, value: Any) -> Any:
    _state(context).weigh(value)
    return value


@pass_context
def _tick(context: Context, value: Any) -> Any:
    _state(context).tick()
    return value


@pass_context
def _plain(context: Context, value: Any) -> Any:
    state = _state(context)
    if isinstance(value, (list, tuple, dict)):
        state.weigh(value)
    return state.plain(value)


def _priced(name: str, library: Environment) -> Callable[..., Any]:
    """The filter `name` of `library`, with its price."""

    @pass_context
    def priced(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        state = _state(context)
        if name == "join" and not isinstance(value, str):
            value = list(value)
        check_call(state, name, value, [*args, *kwargs.values()])
        return _paid(state, library.call_filter(name, value, args, kwargs, context))

    return priced


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    check_percent(format)
    return datetime.now().strftime(format)


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Python writes it; Jinja's own filter would escape it for HTML."""
    check_indent(indent, separators)
    text = json.dumps(
        value, indent=indent, separators=separators, sort_keys=sort_keys, ensure_ascii=False
    )
    return _state(context).escape_non_ascii(text) if ensure_ascii else text
