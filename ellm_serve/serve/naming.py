"""Names: of a request, of its sequences and its session, and of how the server is set up."""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Mapping

from ellm_serve.config import EngineConfig, ServeConfig
from ellm_serve.version import __version__

_serial = itertools.count()


def response_id(prefix: str, header: str | None, body: str | None) -> str:
    """The id of an answer: what the client named it in a header or in the body, or a new one."""
    return f"{prefix}-{header or body or secrets.token_hex(8)}"


def tool_call_id() -> str:
    """A new id for a call of a tool."""
    return f"chatcmpl-tool-{secrets.token_hex(8)}"


def engine_id(answer: str, index: int) -> str:
    """The engine's id of one sequence. Clients may use an id twice at once, the engine must not."""
    return f"{answer}-{index}-{next(_serial)}"


def session_key(
    body: str | None, header: str | None, extra: Mapping[str, object] | None
) -> str | None:
    """The conversation's name: a field of the body, a header, or a field among `vllm_xargs`."""
    extra_id = (extra or {}).get("session_id")
    for key in (body, header, extra_id):
        if isinstance(key, str) and key:
            return key
    return None


def is_loggable(key: str) -> bool:
    """Whether a name that a client made up can go into a line of a log as it is."""
    return key.isascii() and key.isprintable() and " " not in key


def fingerprint(config: ServeConfig) -> str:
    """Names this version and how its engine is set up; equal set-ups have equal fingerprints."""
    setup = config.model_dump_json(include=set(EngineConfig.model_fields))
    return f"ellm-{__version__}-{hashlib.sha256(setup.encode()).hexdigest()[:8]}"
