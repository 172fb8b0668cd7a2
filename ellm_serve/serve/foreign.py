"""What the two other interfaces to conversations, Messages and Responses, have in common."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from ellm_serve.serve.context import MAX_SESSION_ID_CHARS, RequestContext

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[!-~]+")
# What may go into a log; anything else could be a user's text.
_KIND = re.compile(r"[a-z0-9_]{1,64}")


def session_of(
    body: str | None,
    context: RequestContext,
    extra: Mapping[str, object] | None,
    derived: str | None,
) -> str | None:
    """The session that a body names.

    derived: the name in a field that was made for other ends; it counts when nothing else names a
    session (the body's own field, a header, `vllm_xargs`), and when it can be used as it is.
    """
    if body or context.session_id or (extra or {}).get("session_id") or derived is None:
        return body
    usable = len(derived) <= MAX_SESSION_ID_CHARS and _NAME.fullmatch(derived)
    return derived if usable else None


def log_skipped(what: str, kind: object) -> None:
    """Says that a part of a request is not there for the model, as this server does not have it."""
    name = kind if isinstance(kind, str) and _KIND.fullmatch(kind) else "unknown"
    logger.warning("%s of the type %s are not supported and left out", what, name)
