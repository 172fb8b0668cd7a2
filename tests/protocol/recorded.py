"""The recorded answers of a real vLLM server, shared with the tests of the service."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parent.parent / "serve/golden/answers.jsonl"

# What that server was started with.
SERVED = ("qwen3-coder", "alias2")
MAX_MODEL_LEN = 2048
VOCAB_SIZE = 2048

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@dataclass(frozen=True)
class Recorded:
    """One request and its answer; `request` is the body as sent."""

    name: str
    path: str
    request: bytes
    content_type: str
    status: int
    body: str

    @property
    def frames(self) -> list[str]:
        """The JSON texts of a stream's frames."""
        lines = [line.removeprefix("data: ") for line in self.body.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return lines


def _expanded(value: Any) -> Any:
    """Long lists and texts are stored as what they repeat."""
    if isinstance(value, dict):
        if "$repeat" in value:
            return [value["$repeat"]] * value["times"]
        if "$repeat_text" in value:
            return value["$repeat_text"] * value["times"]
        return {key: _expanded(item) for key, item in value.items()}
    return [_expanded(item) for item in value] if isinstance(value, list) else value


def _read(line: str) -> Recorded:
    record = json.loads(line)
    sent, headers = record["request"], record["request_headers"]
    return Recorded(
        record["name"],
        record["path"],
        (sent if isinstance(sent, str) else json.dumps(_expanded(sent))).encode(),
        (headers or {}).get("content-type", "application/json"),
        record["status"],
        record["body"],
    )


RECORDED = {
    record.name: record
    for record in map(_read, _FILE.read_text(encoding="utf-8").splitlines())
    if record.path in PATHS and record.status != 405
}
