"""What every test with a client of somebody else's needs: no way out of this machine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

import pytest

# Switches of clients that otherwise fetch price lists, report what they do, or take a proxy.
SWITCHES = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "NO_PROXY": "*",
}
# What a developer's shell may say about other servers.
UNSET = (
    "OPENAI_API_KEY",
    "OPENAI_BASE_URL",
    "OPENAI_API_BASE",
    "OPENAI_ORG_ID",
    "OPENAI_PROJECT_ID",
    "HOSTED_VLLM_API_BASE",
    "HOSTED_VLLM_API_KEY",
)


class Fence:
    """Stands where sockets connect: lets loopback addresses through and keeps the others."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.refused: list[object] = []
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, self._around(getattr(socket.socket, name)))
        resolve = socket.getaddrinfo

        def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
            self._check(host)
            return resolve(host, *arguments, **options)

        patch.setattr(socket, "getaddrinfo", getaddrinfo)

    def _around(self, connect: Any) -> Any:
        def checked(sock: socket.socket, address: Any) -> Any:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                self._check(address[0])
            return connect(sock, address)

        return checked

    def _check(self, host: str | bytes | None) -> None:
        name = host.decode() if isinstance(host, bytes) else host
        if not _is_loopback(name):
            self.refused.append(name)
            raise OSError(f"a test wants to reach {name}")


def _is_loopback(host: str | None) -> bool:
    if host is None or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[Fence]:
    """Clients reach this machine only; trying anything else fails the module, even in a thread."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SWITCHES.items():
            patch.setenv(name, value)
        for name in UNSET:
            patch.delenv(name, raising=False)
        fence = Fence(patch)
        yield fence
        assert fence.refused == []
