"""How much a chat template may compute: the budget of one rendering and the price of operations.

Time and text are counted while a template runs (see `sandbox`). An operation that could take long
or much memory within a single call is priced by the size of its result before it runs.
Violations are SecurityErrors; no template for language models comes near any of the limits.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence, Sized
from string import Formatter
from typing import Any

from jinja2.exceptions import SecurityError

from ellm_serve.text.control_text import StandIns

# All text a rendering may build, in multiples of its largest output: macros and `+` copy text.
WORK_PER_OUTPUT_CHAR = 64
MAX_LIST_ITEMS = 1_000_000
MAX_INT_BITS = 1 << 14
MAX_WIDTH = 1_000
MAX_INDENT = 64

# Filters and string methods whose result grows with a number or a string they are given.
_PADDING = frozenset(
    {"center", "ljust", "rjust", "zfill", "indent", "wordwrap", "batch", "slice", "round"}
)
# Filters that look through a whole container: [x, x] with x = [y, y] and so on has 2^n items.
_DEEP = frozenset(
    {"tojson", "string", "pprint", "join", "format", "sort", "unique", "min", "max", "groupby"}
)
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[^%a-zA-Z]*(?:\*|\d{4,})")
_NON_ASCII = re.compile(r"[^\x00-\x7f]")
_WIDE_FIELD = re.compile(r"\{|\d{4,}")


class RenderState:
    """The budget of one rendering, and the stand-ins in its strings."""

    def __init__(self, max_chars: int, time_limit_s: float, stand_ins: StandIns | None) -> None:
        self.stand_ins = stand_ins
        self._work_left = max_chars * WORK_PER_OUTPUT_CHAR
        # CPU time of this thread: on a busy machine a harmless template must not become an error.
        self._deadline_s = time.thread_time() + time_limit_s

    def tick(self) -> None:
        """Called with every loop turn and call of a template."""
        if time.thread_time() > self._deadline_s:
            raise SecurityError("the chat template runs too long")

    def spend(self, num_chars: int) -> None:
        """Accounts for text that is about to be built, or that was built by a cheap operation."""
        self._work_left -= num_chars
        if self._work_left < 0:
            raise SecurityError("the chat template builds too much text")
        self.tick()

    def weigh(self, value: object) -> None:
        """Spends what it takes to write or compare `value`."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, (list, tuple)):
            self.spend(len(value))
            for item in value:
                self.weigh(item)
        elif isinstance(value, dict):
            self.spend(len(value))
            for key, item in value.items():
                self.weigh(key)
                self.weigh(item)

    def plain(self, value: Any) -> Any:
        """`value` as the client spelled it, for a template that looks at it."""
        if self.stand_ins is None:
            return value
        if isinstance(value, str):
            return self.stand_ins.show(value)
        if isinstance(value, list):
            return [self.plain(item) for item in value]
        if isinstance(value, tuple):
            return tuple(self.plain(item) for item in value)
        if isinstance(value, dict):
            return {self.plain(key): self.plain(item) for key, item in value.items()}
        return value

    def escape_non_ascii(self, text: str) -> str:
        """JSON text with `\\u` escapes for all but the stand-ins, which are ASCII in disguise."""
        return _NON_ASCII.sub(lambda match: self._escaped(match.group()), text)

    def _escaped(self, char: str) -> str:
        return char if self.plain(char) != char else json.dumps(char)[1:-1]


def check_call(state: RenderState, name: str, subject: object, args: Sequence[object]) -> None:
    """Prices a filter or string method before it runs on `subject`."""
    if name in _DEEP:
        state.weigh(subject)
    if name in _PADDING:
        _check_padding(state, name, subject, args)
    elif name == "replace" and len(args) >= 2:
        old, new = str(args[0]), str(args[1])
        text = str(subject)
        state.spend(text.count(old) * max(len(new) - len(old), 0))
    elif name == "join":
        _check_join(state, subject, args)
    elif name == "format":
        state.weigh(list(args))
        if isinstance(subject, str):
            check_percent(subject)
    elif name == "sum" and any(isinstance(arg, (list, tuple)) for arg in args):
        raise SecurityError("chat templates may only sum numbers")


def _check_padding(state: RenderState, name: str, subject: object, args: Sequence[object]) -> None:
    text = subject if isinstance(subject, str) else ""
    num_places = 1 + (len(text) if name == "wordwrap" else text.count("\n"))
    for arg in args:
        width = len(arg) if isinstance(arg, str) else arg
        if isinstance(width, int):
            if abs(width) > MAX_WIDTH:
                raise SecurityError(f"chat templates may use {name} up to {MAX_WIDTH} only")
            state.spend(abs(width) * num_places)


def _check_join(state: RenderState, subject: object, args: Sequence[object]) -> None:
    """Either `items | join(glue)` or `glue.join(items)`."""
    operands = (subject, *args)
    num_items = max(
        (len(x) for x in operands if isinstance(x, Sized) and not isinstance(x, str)), default=0
    )
    for operand in operands:
        if isinstance(operand, str):
            state.spend(len(operand) * num_items)
        else:
            state.weigh(operand)


def check_percent(text: str) -> None:
    """Refuses `%`-formats that pad to a great width."""
    if _WIDE_PERCENT.search(text):
        raise SecurityError("chat templates may not format to such a width")


def check_format(text: str) -> None:
    """Refuses `str.format` fields with a great or a computed width."""
    for _, _, spec, _ in Formatter().parse(text):
        if spec and _WIDE_FIELD.search(spec):
            raise SecurityError("chat templates may not format to such a width")


def check_indent(indent: object, separators: object) -> None:
    """Keeps the layout of JSON text from growing out of proportion."""
    size = indent if isinstance(indent, int) else len(str(indent or ""))
    if size > MAX_INDENT or len(str(separators)) > MAX_INDENT:
        raise SecurityError(f"chat templates may indent JSON by up to {MAX_INDENT} only")


def check_binop(state: RenderState, operator: str, left: object, right: object) -> None:
    """Prices an arithmetic operator before it is applied."""
    if operator == "*":
        for value, count in ((left, right), (right, left)):
            if isinstance(count, int):
                _check_repeat(state, value, count)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * abs(right) > MAX_INT_BITS:
            raise SecurityError("chat templates may not compute with such large numbers")
    elif operator == "%" and isinstance(left, str):
        check_percent(left)
        state.weigh(right)


def _check_repeat(state: RenderState, value: object, count: int) -> None:
    if isinstance(value, str):
        state.spend(len(value) * max(count, 0))
    elif isinstance(value, (list, tuple)):
        if len(value) * count > MAX_LIST_ITEMS:
            raise SecurityError(f"chat templates may not make lists of over {MAX_LIST_ITEMS} items")
    elif isinstance(value, int) and value.bit_length() + count.bit_length() > MAX_INT_BITS:
        raise SecurityError("chat templates may not compute with such large numbers")
