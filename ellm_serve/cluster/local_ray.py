"""Joins a Ray cluster, or starts a small one in this machine that ends with this process.

A cluster of our own listens on the loopback address only, sends no usage statistics and has no
dashboard. `ray` is imported late: an engine of threads runs without it.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ellm_serve.closing import Closing
from ellm_serve.errors import StartupError

ADDRESS_VARIABLE = "RAY_ADDRESS"
SOCKET_RESOURCE = "cpu_socket"

# Ray reads these when it is imported or when it starts its processes.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Without it Ray takes the address of a network interface even when told 127.0.0.1.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray would kill workers when memory is nearly full, which ours is on purpose.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Serve: bytes of an answer pass from replica to proxy by gRPC. With 64 streams a token takes
    # 0.9 ms that way and 7 ms as Ray objects.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # Threads of Serve that call Ray after the end would start a cluster anew.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # Serve has log files; the terminal is ours.
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
# The least Ray accepts; nothing of ours goes through it.
_OBJECT_STORE_BYTES = 80 << 20
# The function in `ray._private.utils` by which `ray.init` takes SIGTERM over.
_TAKE_SIGTERM = "set_sigterm_handler"


class RaySession(Closing):
    """This process's connection; `close` ends what was started for it."""

    def __init__(self, ours: bool) -> None:
        self._ours = ours

    def close(self) -> None:
        """Disconnects from a cluster that was joined, ends one that was started; twice is fine."""
        if self._ours:
            import_ray().shutdown()
            self._ours = False


def import_ray() -> Any:
    """The package.

    Raises:
        StartupError: it is not installed.
    """
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError as error:
        raise StartupError(
            "socket workers need Ray; install ellm-serve[serve] or use --workers threads"
        ) from error
    return ray


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals wait until Ray has started: a start cut short leaves processes that never end.

    Ray would also put a handler of its own in place of whatever handles SIGTERM.
    """
    utilities = importlib.import_module("ray._private.utils")
    take_sigterm = getattr(utilities, _TAKE_SIGTERM, None)
    if threading.current_thread() is not threading.main_thread() or take_sigterm is None:
        yield
        return
    arrived: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: arrived.append(number)) or signal.SIG_DFL
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    setattr(utilities, _TAKE_SIGTERM, lambda _: None)
    try:
        yield
    finally:
        setattr(utilities, _TAKE_SIGTERM, take_sigterm)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if arrived:
        signal.raise_signal(arrived[0])


def start_local_ray(sockets: int, address: str | None = None) -> RaySession:
    """Uses the connection this process has, or joins `address`, or starts a cluster.

    The address is also taken from RAY_ADDRESS. Call it from the main thread: a cluster that was
    started ends with the thread that started it.

    Raises:
        StartupError: there is no Ray, or it does not start.
    """
    address = address or os.environ.get(ADDRESS_VARIABLE)
    if not address:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    ray = import_ray()
    if ray.is_initialized():
        return RaySession(ours=False)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    if address:
        options: dict[str, Any] = {"address": address}
    else:
        options = {
            "address": "local",
            "num_cpus": max(2, sockets),
            "resources": {SOCKET_RESOURCE: sockets} if sockets else None,
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
        }
    try:
        with _undisturbed():
            ray.init(**options, **quiet)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise StartupError(f"Ray does not start: {reason}") from error
    return RaySession(ours=True)
