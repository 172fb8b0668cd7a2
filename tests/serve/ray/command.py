"""A service in a process of its own, as people start it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.serve.client import Client, wait_until

ROOT = Path(__file__).parents[3]
SHM = Path("/dev/shm")
START_S = 180.0


def free_port() -> int:
    """Of the loopback address; free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def _interruptible() -> Iterator[None]:
    """Processes that are started now take SIGINT, even if a shell has put us in the background and
    thereby told us, and all who come after us, to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Service:
    """`python -m ellm_serve serve …`, or another command that serves on `port`."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.client = Client(f"http://127.0.0.1:{port}")
        self.segments_before = set(os.listdir(SHM))
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        variables = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        with _interruptible():
            self.process = psutil.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._errors,
                env=variables | {"PYTHONPATH": paths} | dict(environment or {}),
            )

    @classmethod
    def serve(cls, *flags: str, **environment: str) -> Service:
        """`ellm-serve serve` on a free port."""
        port = free_port()
        return cls(["-m", "ellm_serve", "serve", "--port", str(port), *flags], port, environment)

    @property
    def output(self) -> str:
        self._output.seek(0)
        return self._output.read().decode()

    @property
    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode()

    def ready(self) -> int:
        """Status of /ready; 0 while nobody listens."""
        try:
            return self.client.get("/ready", timeout_s=10).status
        except OSError:
            return 0

    def wait_ready(self) -> list[int]:
        """Until it is; the statuses on the way, each once."""
        seen: list[int] = []

        def is_ready() -> bool:
            assert self.process.poll() is None, self.errors
            status = self.ready()
            if status not in seen:
                seen.append(status)
            return status == 200

        wait_until(is_ready, "ready", START_S)
        return seen

    def children(self) -> list[psutil.Process]:
        found: list[psutil.Process] = self.process.children(recursive=True)
        return found

    def child(self, name: str) -> psutil.Process:
        """The one Ray process whose title has `name`."""
        [found] = [one for one in self.children() if name in "".join(_title(one))]
        return found

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 120.0) -> int:
        """Sends the signal and waits for the exit code."""
        self.process.send_signal(number)
        return int(self.process.wait(timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends what a failed test left; Ray's processes end with the one that started them."""
        if self.process.poll() is None:
            killer = threading.Timer(60, self.process.kill)
            killer.start()
            self.stop()
            killer.cancel()
        self._output.close()
        self._errors.close()


def _title(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []
