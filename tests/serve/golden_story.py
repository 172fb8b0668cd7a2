"""What a recorded stream tells, however it was cut: pieces of one thing are put together."""

from __future__ import annotations

import json
from typing import Any

# Where an event of the other interfaces keeps its piece of text.
_PIECES = ("text", "thinking", "partial_json", "signature")
# What the first chunk says of the prompt.
_PROMPT = ("prompt_token_ids", "prompt_text")


def story(body: str) -> list[object]:
    """The choices of a stream of chunks, then its other frames; or the events of one with names."""
    frames = [frame for frame in body.split("\n\n") if frame]
    if frames[0].startswith("event: "):
        return _events([json.loads(frame.partition("\ndata: ")[2]) for frame in frames])
    choices: dict[int, _Choice] = {}
    others: list[object] = []
    for data in (frame.removeprefix("data: ") for frame in frames):
        chunk = data if data == "[DONE]" else json.loads(data)
        if isinstance(chunk, str) or not chunk.get("choices"):
            others.append(chunk)
        else:
            (choice,) = chunk["choices"]
            choices.setdefault(choice["index"], _Choice()).add(chunk, choice)
    return [*(choices[index].told() for index in sorted(choices)), *others]


class _Choice:
    """One answer: what is said in it, the form of its chunks by what they add, and its end."""

    def __init__(self) -> None:
        self._said: dict[str, Any] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._forms: dict[str, object] = {}
        self._ids: list[int] = []
        self._logprobs: dict[str, list[object]] = {}
        self._prompt: dict[str, object] = {}
        self._last: dict[str, Any] = {}

    def add(self, chunk: dict[str, Any], choice: dict[str, Any]) -> None:
        delta = choice["delta"] if "delta" in choice else {"text": choice["text"]}
        for name, value in delta.items():
            if name == "tool_calls":
                self._add_call(*value)
            elif name == "role":
                self._said[name] = value
            elif value:
                self._said[name] = self._said.get(name, "") + value
        self._ids += choice.get("token_ids") or []
        for name, values in (choice.get("logprobs") or {}).items():
            self._logprobs.setdefault(name, []).extend(values)
        if delta:
            # The last chunk has more keys, and may bring a delta or none.
            chunk_form = tuple(key for key in chunk if key != "system_fingerprint")
            choice_form = tuple(key for key in choice if key != "stop_reason")
            self._forms.setdefault(_kind(delta), [tuple(delta), choice_form, chunk_form])
        for name in _PROMPT:
            self._prompt.setdefault(name, choice.get(name, chunk.get(name)))
        self._last = _rest(chunk, choice)

    def _add_call(self, call: dict[str, Any]) -> None:
        told = self._calls.setdefault(call["index"], {"arguments": ""})
        told["forms"] = {**told.get("forms", {}), _call_kind(call): [tuple(call)]}
        told |= {key: value for key, value in call.items() if key != "function"}
        told["arguments"] += call["function"].get("arguments", "")
        told["name"] = call["function"].get("name", told.get("name"))

    def told(self) -> dict[str, object]:
        return {
            "said": self._said,
            "calls": list(self._calls.values()),
            "token_ids": self._ids,
            "logprobs": self._logprobs,
            "forms": self._forms,
            "prompt": self._prompt,
            "last": self._last,
        }


def _kind(delta: dict[str, Any]) -> str:
    if "tool_calls" in delta:
        return _call_kind(delta["tool_calls"][0])
    return next(iter(delta))


def _call_kind(call: dict[str, Any]) -> str:
    return "arguments" if "arguments" in call["function"] else "call"


def _rest(chunk: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """A chunk without what is told apart from it."""
    told = ("delta", "text", "logprobs", "token_ids", *_PROMPT)
    rest = {key: value for key, value in choice.items() if key not in told}
    return {key: value for key, value in chunk.items() if key not in told} | {"choices": [rest]}


def _events(events: list[dict[str, Any]]) -> list[object]:
    """Named events; neighbours that carry on one text are put together."""
    told: list[dict[str, Any]] = []
    for event in events:
        event.pop("sequence_number", None)
        last = told[-1] if told else {}
        if not _carries_on(last, event):
            told.append(event)
        elif isinstance(event["delta"], str):
            last["delta"] += event["delta"]
        else:
            for key in _PIECES:
                if key in event["delta"]:
                    last["delta"][key] += event["delta"][key]
    return list(told)


def _carries_on(last: dict[str, Any], event: dict[str, Any]) -> bool:
    if "delta" not in event or event["type"] == "message_delta":
        return False
    same = all(last.get(key) == event.get(key) for key in ("type", "index", "item_id"))
    if not same or isinstance(event["delta"], str):
        return same
    return bool(last["delta"]["type"] == event["delta"]["type"])
