"""Applications behind real HTTP: uvicorn in a thread of the test, on a free port of 127.0.0.1.

`scripted` puts the real engine, tokenizer and handlers over an executor that says what the test
wants; `builtin_server` puts them over the built-in model, once per test module.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import ellm_serve
from ellm_serve.config import ServeConfig
from ellm_serve.engine.engine import Engine
from ellm_serve.llm import LLM
from ellm_serve.metrics import Metrics
from ellm_serve.serve.context import AppState
from ellm_serve.serve.http import create_app
from ellm_serve.serve.service import Service
from tests.engine.doubles import Prefix, ScriptedExecutor, limits
from tests.serve.client import Client

BUILTIN = Path(ellm_serve.__file__).parent / "builtin"
VOCABULARY = 4096
# A token of the built-in vocabulary that is printable text and ends nothing.
WORD = 300

ServeApp = Callable[[Any], str]


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serves an ASGI application; yields its base URL and stops the server at the end."""
    config = uvicorn.Config(
        app, lifespan="off", access_log=False, log_config=None, timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(
            target=server.run, args=([listener],), name="test-http", daemon=True
        )
        thread.start()
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the server did not stop"


@pytest.fixture
def serve_app() -> Iterator[ServeApp]:
    """`serve_app(app)` → base URL; stopped when the test ends."""
    with ExitStack() as stack:
        yield lambda app: stack.enter_context(serving(app))


@dataclass(frozen=True)
class Server:
    """A service under test, inside and out."""

    client: Client
    state: AppState
    engine: Engine
    config: ServeConfig

    @property
    def url(self) -> str:
        return self.client.url


def one_word(prefix: Prefix) -> int:
    """A model with one word, which it says for ever."""
    return WORD


class Gate:
    """A `before` hook that holds steps of one kind until it is opened."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, kind: str, spans: object) -> None:
        if kind == self._kind:
            self.reached.set()
            assert self._open.wait(60), "nobody opened the gate"

    def open(self) -> None:
        self._open.set()


class Pace:
    """A `before` hook that makes steps take a while, so that an answer can be interrupted."""

    def __init__(self, **seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, kind: str, spans: object) -> None:
        time.sleep(self._seconds.get(kind, 0.0))


MakeServer = Callable[..., Server]


@pytest.fixture
def scripted(serve_app: ServeApp) -> Iterator[MakeServer]:
    """`scripted(script, bounds={}, executor={}, engine={}, **config)` → a server.

    The other arguments are those of `limits`, of the executor, of the engine, and of `ServeConfig`.
    """
    with ExitStack() as stack:

        def make(
            script: Callable[[Prefix], int | None] = one_word,
            bounds: dict[str, int] | None = None,
            executor: dict[str, Any] | None = None,
            engine: dict[str, Any] | None = None,
            **settings: Any,
        ) -> Server:
            sizes = {"sequence_length": 2048, "prefill_block": 256, "vocab_size": VOCABULARY}
            double = ScriptedExecutor(limits(**sizes | (bounds or {})), script, **(executor or {}))
            running = stack.enter_context(Engine(double, eos_token_ids=[4089], **(engine or {})))
            config = ServeConfig.from_options(model="builtin", **settings)
            state = AppState(Metrics(config.names[0]))
            state.service = Service.create(running, BUILTIN, config, state.metrics)
            url = serve_app(create_app(state, config))
            return Server(Client(url), state, running, config)

        yield make


@pytest.fixture(scope="module")
def builtin_server(compiled_kernels: None) -> Iterator[tuple[Server, LLM]]:
    """The built-in model behind HTTP, and the same engine to ask directly."""
    with LLM("builtin", sequence_length=2048, batch_size=8) as llm:
        config = ServeConfig.from_options(model="builtin")
        state = AppState(Metrics(config.names[0]))
        state.service = Service.create(llm.engine, BUILTIN, config, state.metrics)
        with serving(create_app(state, config)) as url:
            yield Server(Client(url), state, llm.engine, config), llm
