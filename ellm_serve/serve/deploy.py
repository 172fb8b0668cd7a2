"""Starts the service on a Ray cluster, follows it, and stops it: what `ellm-serve serve` does.

Without a Ray address the cluster is our own: in this machine, on the loopback address, gone with
this process. Otherwise the cluster is joined, and only our application in it is touched.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from ellm_serve.closing import Closing
from ellm_serve.cluster.claims import remove_unclaimed
from ellm_serve.cluster.local_ray import ADDRESS_VARIABLE, start_local_ray
from ellm_serve.config import ServeConfig
from ellm_serve.errors import ConfigError, StartupError

# Ray and all that stands on it are imported late: its settings are in the environment by then.

_POLL_S = 0.1
_CALL_TIMEOUT_S = 5.0
# So many processes may die while they load until it is no accident.
_MAX_DEATHS = 3
# What Serve's proxy needs to pass on the last bytes of an answer.
_FLUSH_S = 0.3


@dataclass(frozen=True, slots=True)
class Listen:
    """Where HTTP is spoken. Port 0 takes a free one. With a certificate it is HTTPS."""

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: str | None = None
    key: str | None = None

    def resolve(self) -> Listen:
        """The same with a port that was free a moment ago.

        Serve would share a taken port with whoever has it, and each would get half the requests.

        Raises:
            ConfigError: it is taken, the address is not of this machine, or half of a pair of
                files is missing.
        """
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile belong together")
        for path in (self.certificate, self.key):
            if path is not None and not os.access(path, os.R_OK):
                raise ConfigError(f"cannot read {path}")
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
                probe.listen()
            except (OSError, OverflowError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise ConfigError(
                    f"cannot listen on {self.host} port {self.port}: {reason}"
                ) from None
            return Listen(self.host, probe.getsockname()[1], self.certificate, self.key)

    @property
    def url(self) -> str:
        """For people on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"{'http' if self.certificate is None else 'https'}://{host}:{self.port}"


class RunningService(Closing):
    """The deployed application. `close` ends it, whatever still runs, and the cluster if it is
    ours."""

    def __init__(self, handle: Any, listen: Listen, cleanup: ExitStack) -> None:
        """Use `start`."""
        self._handle = handle
        self._cleanup = cleanup
        self.listen = listen

    @classmethod
    def start(
        cls, config: ServeConfig, listen: Listen, sockets: int, log_path: str | None = None
    ) -> Self:
        """Returns when HTTP answers; the engine is still loading then.

        `sockets`: how many workers a cluster of our own has room for. `log_path`: see `Replica`.

        Raises:
            StartupError: Ray or Serve does not start, or has no room.
        """
        with ExitStack() as stack:
            ours = not os.environ.get(ADDRESS_VARIABLE)
            if ours:
                # What a killed replica left in shared memory.
                stack.callback(remove_unclaimed, keep_persistent=True)
            stack.enter_context(start_local_ray(sockets))
            handle, listen = _deploy(config, listen, log_path if ours else None, stack, ours)
            cleanup = stack.pop_all()
        return cls(handle, listen, cleanup)

    def _call(self, method: str, late: object = None) -> Any:
        """What a method of the replica returns; None if there is no replica, `late` if it does not
        answer in time."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            response = getattr(self._handle, method).remote()
            return response.result(timeout_s=_CALL_TIMEOUT_S)
        except TimeoutError:
            return late
        except (RayError, RayServeException):
            return None

    def wait_ready(self, on_phase: Callable[[str], None]) -> str:
        """Waits until the engine has passed a step; returns what serves, in a line.

        Raises:
            StartupError: it will not.
        """
        pids: set[int] = set()
        phase = ""
        while True:
            status = self._call("status")
            if status is not None:
                pids.add(status.pid)
                if status.failed is not None:
                    raise StartupError(status.failed)
                if status.ready:
                    return str(status.summary)
                if status.phase != phase:
                    phase = status.phase
                    on_phase(phase)
            if len(pids) >= _MAX_DEATHS:
                raise StartupError(
                    f"the engine's process died {_MAX_DEATHS - 1} times while {phase}; was it"
                    " killed for its memory (dmesg)? ellm-serve plan shows what it needs"
                )
            time.sleep(_POLL_S)

    def drain(self, timeout_s: float, hurry: Callable[[], bool]) -> int:
        """Refuses new requests and waits for running ones, until time is up or `hurry()`.

        What then still runs ends with an error for its reader. Returns how many that were.
        """
        deadline = time.monotonic() + timeout_s
        # Without a replica there is no request; one that is slow to answer may have some.
        while num_open := self._call("drain", late=1) or 0:
            if hurry() or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        self._call("stop")
        time.sleep(_FLUSH_S)
        return int(num_open)

    def close(self) -> None:
        """Twice is fine."""
        self._cleanup.close()


def _deploy(
    config: ServeConfig, listen: Listen, log_path: str | None, stack: ExitStack, ours: bool
) -> tuple[Any, Listen]:
    from ray import serve
    from ray.serve.exceptions import RayServeException

    from ellm_serve.serve.app import APPLICATION, bind

    logging.getLogger("ray").setLevel(logging.ERROR)
    # Its children have levels of their own.
    logging.getLogger("ray.serve").disabled = True
    try:
        application = bind(config, log_path)
        listen = _start_serve(listen, stack, ours)
        [handle] = serve.run_many(
            [serve.RunTarget(application, name=APPLICATION, route_prefix="/")],
            wait_for_applications_running=False,
        )
    except (RayServeException, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise StartupError(f"Ray Serve does not start: {reason}") from error
    if not ours:
        stack.callback(serve.delete, APPLICATION)
    # First of all, so that its threads do not wait for a controller that is gone.
    stack.callback(handle.shutdown)
    return handle, listen


def _start_serve(listen: Listen, stack: ExitStack, ours: bool) -> Listen:
    """Serve with our HTTP options; one that runs already keeps its own, which are returned."""
    from ray import serve
    from ray.serve.context import _get_global_client

    running = None
    if not ours:
        running = _get_global_client(raise_if_no_controller_running=False)
    if running is not None:
        options = running.http_config
        return Listen(options.host, options.port, options.ssl_certfile, options.ssl_keyfile)
    serve.start(
        http_options={
            "host": listen.host,
            "port": listen.port,
            "ssl_certfile": listen.certificate,
            "ssl_keyfile": listen.key,
        },
        logging_config={"enable_access_log": False},
    )
    if ours:
        stack.callback(serve.shutdown)
    return listen
