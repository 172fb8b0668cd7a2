"""One line per request: who, what, how long, how many tokens. Never a prompt, never a key.

What handlers add comes from `RequestContext.log`; a key that is not in `FIELDS` is a mistake there
and is left out, so that no text of a user can slip in under a new name.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Literal

from ellm_serve.serve.context import RequestContext

logger = logging.getLogger("ellm_serve.access")

# In the order of a line.
FIELDS = (
    "stream",
    "n",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "queue_s",
    "prefill_s",
    "decode_s",
    "finish_reason",
    "error",
)
MAX_PATH_CHARS = 200
# What nginx calls a client that closed its connection.
CLIENT_GONE = 499


class AccessLog:
    """Writes the lines, as text or as JSON."""

    def __init__(self, form: Literal["text", "json", "off"]) -> None:
        self._form = form

    def write(self, method: str, path: str, status: int, context: RequestContext) -> None:
        """One request has ended."""
        if self._form == "off" or not logger.isEnabledFor(logging.INFO):
            return
        seconds = time.monotonic() - context.received
        fields = _fields(context)
        if self._form == "json":
            first = {
                "time": round(time.time(), 3),
                "method": method,
                "path": path,
                "status": status,
                "seconds": round(seconds, 4),
            }
            logger.info("%s", json.dumps(first | fields))
        else:
            rest = " ".join(f"{name}={value}" for name, value in fields.items())
            logger.info("%s %s %d %.3fs %s", method, path, status, seconds, rest)


def _fields(context: RequestContext) -> dict[str, object]:
    """Ids first, then what the handlers noted; nothing that is unknown or None."""
    fields: dict[str, object] = {
        "id": context.answer_id,
        "session": context.session_id,
        "principal": context.principal or None,
    }
    fields |= {name: _plain(context.log, name) for name in FIELDS}
    return {name: value for name, value in fields.items() if value is not None}


def _plain(log: Mapping[str, object], name: str) -> object:
    value = log.get(name)
    return round(value, 4) if isinstance(value, float) else value


def printable_path(raw_path: bytes) -> str:
    """A path as it was sent, without its query, and without anything that could forge a line."""
    text = raw_path.partition(b"?")[0][:MAX_PATH_CHARS].decode("latin-1")
    return "".join(char if "!" <= char <= "~" else "?" for char in text)
