"""A scripted service behind HTTP, and what the named events of its streams say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ellm_serve.serve.context import AppState
from ellm_serve.serve.http import create_app
from tests.serve.client import Client
from tests.serve.conftest import serving
from tests.serve.scripted import IM_END, Harness, harness

# Renders tools, calls and results.
TEMPLATE = Path(__file__).parents[1] / "text/templates/xml_calls.jinja"
CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nSan José\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
ARGUMENTS = {"city": "San José", "days": 3}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


@dataclass
class Served:
    """The service from outside (`client`) and inside."""

    harness: Harness
    client: Client
    state: AppState

    def say(self, text: str, *ends: int) -> list[int]:
        """What the model says to the requests to come; by default it then ends its turn."""
        return self.harness.say(text, *(ends or (IM_END,)))

    @property
    def sessions(self) -> set[str | None]:
        """The names of those whose tokens are kept."""
        return {session.session_key for session in self.harness.engine.stats().sessions}

    def stream(self, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
        """The events of a whole stream."""
        reply = self.client.post(path, {**body, "stream": True}, headers=headers)
        assert reply.status == 200, reply.text
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        return events(reply.text)


@contextmanager
def served(**changes: Any) -> Iterator[Served]:
    """One that reads calls in XML; `changes` to its configuration."""
    settings = {"chat_template": str(TEMPLATE), "reasoning_parser": "qwen3"} | changes
    with harness(**settings) as scripted:
        state = AppState(scripted.metrics, service=scripted.service, phase="ready")
        with serving(create_app(state, scripted.config)) as url:
            yield Served(scripted, Client(url), state)


def events(text: str) -> list[dict[str, Any]]:
    """The data of each event; its name is the data's type, and comments are left out."""
    assert text.endswith("\n\n")
    found = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
