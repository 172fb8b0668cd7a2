"""Reads what a stream has sent, and holds every chunk against the protocol's own models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ellm_serve.protocol.chat import ChatChunk
from ellm_serve.protocol.common import Chunk
from ellm_serve.protocol.completion import CompletionChunk

DONE = "data: [DONE]"
_MODELS: dict[str, type[Chunk]] = {
    "chat.completion.chunk": ChatChunk,
    "text_completion": CompletionChunk,
}


@dataclass
class Told:
    """A stream that has ended."""

    blocks: list[str]

    @property
    def done(self) -> bool:
        return self.blocks[-1:] == [DONE]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        frames = [block for block in self.blocks if not block.startswith(":") and block != DONE]
        return [json.loads(frame.removeprefix("data: ")) for frame in frames]

    @property
    def choices(self) -> list[dict[str, Any]]:
        """Those of all chunks, in order; each chunk has at most one."""
        return [choice for chunk in self.chunks for choice in chunk.get("choices", ())]

    def text(self, index: int = 0) -> str:
        """All of one answer."""
        mine = [choice for choice in self.choices if choice["index"] == index]
        return "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content", "")
            for choice in mine
        )

    def ends(self) -> list[tuple[int, str, object]]:
        """(index, finish_reason, stop_reason) of every answer, in the order of ending."""
        return [
            (choice["index"], choice["finish_reason"], choice["stop_reason"])
            for choice in self.choices
            if choice["finish_reason"] is not None
        ]


async def read(stream: Any) -> Told:
    """Reads a stream to its end, and checks the form of everything in it."""
    return told([item async for item in stream])


def told(items: Sequence[bytes]) -> Told:
    """The same from what has been read; every item must be whole blocks."""
    assert all(item.endswith(b"\n\n") for item in items)
    found = Told(b"".join(items).decode().split("\n\n")[:-1])
    for block in found.blocks:
        if block == DONE or block.startswith((":", 'data: {"error"')):
            continue
        check_chunk(block.removeprefix("data: "))
    return found


def check_chunk(frame: str) -> None:
    """The text is what the protocol's model would have written."""
    model = _MODELS[json.loads(frame)["object"]].model_validate_json(frame)
    assert model.json_bytes().decode() == frame
