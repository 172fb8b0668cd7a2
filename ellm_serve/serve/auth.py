"""API keys: every path needs one, but for the few that are declared open.

Only digests of the keys are kept. All of them are compared, each in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

_MESSAGES = "/v1/messages"
_PRINCIPAL_CHARS = 16


class KeyRing:
    """The keys of this service; without any, everybody may come in."""

    def __init__(self, keys: Iterable[str], open_paths: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = frozenset(open_paths)

    def principal(self, path: str, headers: Mapping[str, str]) -> str | None:
        """Whose request it is: a name made from the key; None if it must be refused.

        "" where no key is needed. Names in `headers` are in lower case.
        """
        if not self._digests or path in self._open_paths:
            return ""
        found = [_bearer(headers.get("authorization", ""))]
        if is_messages(path):
            # Some clients send both, and only one of them may be ours.
            found.append(headers.get("x-api-key"))
        # Headers were decoded byte by byte.
        digests = [_digest(key.encode("latin-1")) for key in found if key is not None]
        known = [digest for digest in digests if self._knows(digest)]
        return known[0].hex()[:_PRINCIPAL_CHARS] if known else None

    def _knows(self, digest: bytes) -> bool:
        known = False
        for other in self._digests:
            known |= hmac.compare_digest(digest, other)
        return known


def is_messages(path: str) -> bool:
    """Whether a path belongs to Anthropic's interface, which has its own key header and errors."""
    return path == _MESSAGES or path.startswith(_MESSAGES + "/")


def _bearer(authorization: str) -> str | None:
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
