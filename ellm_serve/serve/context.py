"""What is known about the service and about one HTTP request outside of its body.

`AppState` is the one mutable object that whoever loads the engine shares with the HTTP shell.
`RequestContext` is made for each request before anything is parsed; handlers read it, and leave
there what the access log and the keep-alive comments shall say.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ellm_serve.errors import InvalidRequest
from ellm_serve.metrics import Metrics

if TYPE_CHECKING:
    from ellm_serve.serve.service import Service

# Visible ASCII: what may go into a log line and an answer's header as it is.
_ID = re.compile(r"[!-~]+")
MAX_REQUEST_ID_CHARS = 128
MAX_SESSION_ID_CHARS = 256
MAX_TIMEOUT_S = 1e9
MAX_PRIORITY = 1 << 31

# Headers that name a conversation, after X-Session-Id: agents first, then gateways, then chat UIs.
# Any `x-<vendor>-session-id` counts as an agent's.
_AGENT_SESSIONS = ("x-claude-code-session-id", "x-session-affinity", "session-id")
_OTHER_SESSIONS = (
    "x-correlation-id",
    "x-smg-routing-key",
    "x-dynamo-session-id",
    "x-openwebui-chat-id",
)
_VENDOR_SESSION = re.compile(r"x-[a-z0-9-]+-session-id")
_PARENT_SESSION = "-parent-session-id"


@dataclass(slots=True)
class AppState:
    """Where the service is in its life.

    service: None until the engine is warm.
    phase, progress: what /ready shows until then.
    draining: new requests are refused, running ones go on.
    failed: why the service will never answer again.
    num_open: requests to generate that have not been answered in full.
    """

    metrics: Metrics
    service: Service | None = None
    phase: str = "starting"
    progress: dict[str, object] = field(default_factory=dict)
    draining: bool = False
    failed: str | None = None
    num_open: int = 0


@dataclass(slots=True)
class RequestContext:
    """One HTTP request.

    request_id: what the client calls it, None if it does not say.
    answer_id: the same, or an id of ours: X-Request-Id of the answer and of the access log.
    principal: whose request it is; "" while the service has no keys.
    session_id: the conversation, as far as headers name one.
    deadline: `time.monotonic()` after which nobody wants the answer.
    received: `time.monotonic()` when its headers were there.
    token_times: each chunk is to be preceded by a comment with the engine's time.
    log: what handlers add to the access log: numbers, ids and reasons, never text of users.
    progress: says in a few words how far the request is; None if there is nothing to say.
    """

    request_id: str | None = None
    answer_id: str = field(default_factory=lambda: secrets.token_hex(16))
    principal: str = ""
    session_id: str | None = None
    priority: int | None = None
    deadline: float | None = None
    received: float = field(default_factory=time.monotonic)
    token_times: bool = False
    log: dict[str, object] = field(default_factory=dict)
    progress: Callable[[], str | None] | None = None

    def read_headers(self, headers: Mapping[str, str], timeout_s: float | None = None) -> None:
        """Takes over what headers say; names in `headers` are in lower case.

        `timeout_s` is for a request that names none itself.

        Raises:
            InvalidRequest: a header has a value that is not allowed.
        """
        request_id = headers.get("x-request-id")
        if request_id:
            _check_id("X-Request-Id", request_id, MAX_REQUEST_ID_CHARS)
            self.request_id = self.answer_id = request_id
        self.session_id = _session(headers)
        self.priority = _priority(headers.get("x-vllm-priority"))
        timeout_s = _timeout(headers.get("x-request-timeout"), timeout_s)
        self.deadline = None if timeout_s is None else self.received + timeout_s
        self.token_times = headers.get("x-ellm-token-times") == "1"

    def describe_progress(self) -> str | None:
        """For a keep-alive comment."""
        return None if self.progress is None else self.progress()


def _check_id(name: str, value: str, max_chars: int) -> None:
    if len(value) > max_chars or not _ID.fullmatch(value):
        raise InvalidRequest(f"{name} must be 1 to {max_chars} visible ASCII characters.", name)


def _session(headers: Mapping[str, str]) -> str | None:
    """The first header that names a session. Only ours is refused when it is unusable: the others
    were made for other ends."""
    named = headers.get("x-session-id")
    if named:
        _check_id("X-Session-Id", named, MAX_SESSION_ID_CHARS)
        return named
    vendors = (
        name
        for name in headers
        if _VENDOR_SESSION.fullmatch(name) and not name.endswith(_PARENT_SESSION)
    )
    for name in (*_AGENT_SESSIONS, *vendors, *_OTHER_SESSIONS):
        value = headers.get(name)
        if value and len(value) <= MAX_SESSION_ID_CHARS and _ID.fullmatch(value):
            return value
    return None


def _priority(value: str | None) -> int | None:
    if value is None:
        return None
    if re.fullmatch(r"[+-]?\d{1,10}", value) is None or abs(int(value)) > MAX_PRIORITY:
        raise InvalidRequest("X-Vllm-Priority must be a whole number.", "X-Vllm-Priority")
    return int(value)


def _timeout(value: str | None, default: float | None) -> float | None:
    if value is None:
        return default
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    # Written so that NaN fails too.
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            "X-Request-Timeout must be a positive number of seconds.", "X-Request-Timeout"
        )
    return seconds
