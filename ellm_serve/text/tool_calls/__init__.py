"""Tool calls in the text of an answer: one incremental parser for each way models write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from ellm_serve.text.tool_calls.deltas import (
    ContentDelta,
    Output,
    OutputDelta,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from ellm_serve.text.tool_calls.dialect import Dialect, NoTools
from ellm_serve.text.tool_calls.hermes import HermesDialect
from ellm_serve.text.tool_calls.markup import TOOL_CALL
from ellm_serve.text.tool_calls.qwen3_coder import FUNCTION, Qwen3CoderDialect
from ellm_serve.text.tool_calls.schema import ToolSchemas

__all__ = [
    "ContentDelta",
    "Dialect",
    "DialectName",
    "HermesDialect",
    "NoTools",
    "Output",
    "OutputDelta",
    "Qwen3CoderDialect",
    "ReasoningDelta",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolSchemas",
    "choose_dialect",
    "collect",
    "create_dialect",
]

DialectName: TypeAlias = Literal["qwen3_coder", "hermes"]


def choose_dialect(template_text: str) -> DialectName | None:
    """The dialect that a chat template teaches its model; None if it knows no tool calls."""
    if FUNCTION in template_text:
        return "qwen3_coder"
    return "hermes" if TOOL_CALL in template_text else None


def create_dialect(
    name: DialectName | None,
    tools: Sequence[Mapping[str, object]],
    make_id: Callable[[], str],
) -> Dialect:
    """The parser of one answer; without tools, or without a dialect, all text is content.

    tools: as in the request, OpenAI's nested or flat form. make_id: gives a new id for every call.
    """
    if name is None or not tools:
        return NoTools()
    if name == "hermes":
        return HermesDialect(make_id)
    return Qwen3CoderDialect(ToolSchemas(tools), make_id)
