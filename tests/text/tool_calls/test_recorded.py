"""Answers that vLLM 0.32 gave for forced texts, parsed again.

recorded.json: the text as its tokens arrive, and the message or the deltas that vLLM made of it
(without ids). A stream and a whole answer are parsed by the same code here, so both are compared
with either kind of recording.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ellm_serve.text.tool_calls import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from tests.text.tool_calls.parsing import deltas_of

RECORDED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "recorded.json").read_text(encoding="utf-8")
)

_SPACE = "white space before a call is dropped, so that stream and whole answer agree"
_SERVER = "which fields of the answer a request wants is decided by the server, not by the parser"

# (recording, field): what we give, and why it is not what was recorded.
DIFFERENCES: dict[tuple[str, str], tuple[object, str]] = {
    ("tool_auto_stream", "content"): ("Let me check.", _SPACE),
    ("hermes_stream", "content"): (None, _SPACE),
    ("tool_none", "content"): ("Let me check.", _SPACE),
    ("tool_none", "tool_calls"): (
        [
            {
                "name": "get_weather",
                "arguments": '{"city": "San Francisco", "days": 3, "metric": true,'
                ' "opts": {"a": [1, 2]}}',
            }
        ],
        _SERVER,
    ),
    ("reason_noinclude", "reasoning"): ("\nI think so.\n", _SERVER),
}


def parsed(recording: dict[str, Any], pieces: list[str]) -> list[OutputDelta]:
    return deltas_of(
        pieces,
        recording["dialect"],
        tools=recording["tools"],
        reasoning=recording["reasoning"],
        starts_in_reasoning=recording["starts_in_reasoning"],
    )


def message(deltas: list[OutputDelta]) -> dict[str, object]:
    output = collect(deltas)
    calls = [{"name": call.name, "arguments": call.arguments} for call in output.tool_calls]
    return {"content": output.content, "reasoning": output.reasoning, "tool_calls": calls}


def recorded_message(recording: dict[str, Any]) -> dict[str, object]:
    """The recorded message, or what the recorded deltas add up to."""
    if not recording["stream"]:
        whole: dict[str, object] = recording["message"]
        return whole
    texts = {"content": "", "reasoning": ""}
    calls: list[dict[str, str]] = []
    for delta in recording["deltas"]:
        for field in texts:
            texts[field] += delta.get(field, "")
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                calls.append({"name": function["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += function.get("arguments", "")
    return {
        "content": texts["content"] or None,
        "reasoning": texts["reasoning"] or None,
        "tool_calls": calls,
    }


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("recording", RECORDED, ids=lambda recording: recording["name"])
def test_same_answer(recording: dict[str, Any], streamed: bool) -> None:
    pieces = recording["pieces"]
    ours = message(parsed(recording, pieces if streamed else ["".join(pieces)]))
    for field, theirs in recorded_message(recording).items():
        expected, _ = DIFFERENCES.get((recording["name"], field), (theirs, ""))
        assert ours[field] == expected, field


def test_differences_are_real() -> None:
    recorded = {recording["name"]: recorded_message(recording) for recording in RECORDED}
    for (name, field), (ours, _) in DIFFERENCES.items():
        assert recorded[name][field] != ours


def as_recorded(delta: OutputDelta) -> dict[str, object] | None:
    match delta:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning": text}
        case ToolCallStart(index, _, name):
            return {"tool_calls": [{"index": index, "function": {"name": name}}]}
        case ToolCallArguments(index, fragment):
            return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}
        case ToolCallEnd():
            return None


@pytest.mark.parametrize("name", ["tool_auto_stream", "tool_two_stream", "reason_stream"])
def test_same_deltas(name: str) -> None:
    """Not only the sum: each delta. White space in content goes out with what follows it."""
    (recording,) = (recording for recording in RECORDED if recording["name"] == name)
    ours = [as_recorded(delta) for delta in parsed(recording, recording["pieces"])]
    theirs = [{"content": "."} if d == {"content": ".\n"} else d for d in recording["deltas"]]
    assert [delta for delta in ours if delta is not None] == theirs
