"""`ellm-serve serve`: the HTTP service on Ray, in the foreground until a signal ends it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import TextIO

from ellm_serve.cli.config_flags import add_config_flags, given_options
from ellm_serve.cli.verb import Subparsers
from ellm_serve.config import ServeConfig

_TERMINATED = 143  # as shells report SIGTERM
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def add_parser(subparsers: Subparsers) -> None:
    """Declares the verb."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serves a model over HTTP with vLLM's API. Without RAY_ADDRESS it starts a Ray"
        " cluster of its own on the loopback address; with it, it joins that cluster and deploys"
        " there. Ctrl-C or SIGTERM: new requests are refused, running ones may finish within"
        " --drain-timeout; a second one ends at once.",
        allow_abbrev=False,
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file of settings, or of a Serve"
        " application; flags win over it",
    )  # fmt: skip
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    http.add_argument(
        "--port", type=int, default=8000, help="port; 0 takes a free one (%(default)s)"
    )
    http.add_argument("--ssl-certfile", metavar="FILE", help="PEM certificate chain: speaks HTTPS")
    http.add_argument("--ssl-keyfile", metavar="FILE", help="PEM private key of the certificate")
    add_config_flags(parser, ServeConfig)


def run(args: argparse.Namespace) -> int:
    """Serves until a signal; 0 after a drain."""
    config = _config(args)
    from ellm_serve.serve.deploy import Listen, RunningService
    from ellm_serve.serve.log_pipe import PipeReader

    listen = Listen(args.host, args.port, args.ssl_certfile, args.ssl_keyfile)
    with _terminable(), _own_stdout() as stdout, PipeReader(sys.stderr) as log:
        joins = bool(os.environ.get("RAY_ADDRESS"))
        sockets = 0
        if not joins:
            listen = listen.resolve()
            sockets = _check(config)
        with RunningService.start(config, listen, sockets, str(log.path)) as service:
            # In a cluster of our own the replica's log says more.
            summary = service.wait_ready(_say if joins else lambda _: None)
            with _Stop() as stop:
                lines = _ready_lines(config, service.listen.url, summary)
                print(lines, file=stdout, flush=True)
                stop.wait()
                grace = f"{config.drain_timeout_s:g} s"
                _say(f"stopping: running requests may take {grace} (another signal: at once)")
                ended = service.drain(config.drain_timeout_s, stop.again)
                if ended:
                    _say(f"{ended} running requests were ended")
    return 0


def _config(args: argparse.Namespace) -> ServeConfig:
    given = given_options(args, ServeConfig)
    if args.model_tag is not None:
        given.setdefault("model", args.model_tag)
    if args.config is not None:
        return ServeConfig.from_yaml(args.config, given).with_keys()
    return ServeConfig.from_values({"model": "builtin"} | given, "options").with_keys()


def _check(config: ServeConfig) -> int:
    """Refuses what cannot work before Ray starts, and downloads where progress can be seen.

    Returns how many socket workers there will be.
    """
    from ellm_serve.cluster.startup import plan_start

    start = plan_start(config)
    return len(start.places) if config.workers == "ray" else 0


def _ready_lines(config: ServeConfig, url: str, summary: str) -> str:
    body = {
        "model": config.names[0],
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 32,
    }
    key = ' -H "Authorization: Bearer $ELLM_API_KEY"' if config.api_keys else ""
    return (
        f"ready: {url}/v1 serves {config.names[0]} ({summary})\n"
        f"try: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json'"
        f" -d {shlex.quote(json.dumps(body))}"
    )


def _say(text: str) -> None:
    print(f"ellm-serve: {text}", file=sys.stderr, flush=True)


class _Stop:
    """Counts signals instead of dying of them."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._count = 0

    def __enter__(self) -> _Stop:
        for number in _SIGNALS:
            signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        """Signals are ignored from here on: what is left to do takes a moment."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
        self._asked.set()

    def wait(self) -> None:
        """Until the first signal."""
        # An untimed wait in the main thread would not run the handler.
        while not self._asked.wait(0.5):
            pass

    def again(self) -> bool:
        """Whether there was a second one."""
        return self._count > 1


@contextmanager
def _own_stdout() -> Iterator[TextIO]:
    """Standard output for what we say; what Ray's threads print about themselves is dropped."""
    stdout = sys.stdout
    with open(os.devnull, "w", encoding="utf-8") as nothing, redirect_stdout(nothing):
        yield stdout


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds the stack as Ctrl-C does, so that a start that is interrupted cleans up."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        sys.exit(_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
