"""The Serve deployment: the HTTP application and the engine behind it, in one process.

The constructor returns at once and a thread loads the engine, so /health and /ready answer from the
first second. The same thread then watches the engine: when it fails or no longer moves, clients
get a moment to read why, and the process ends, which Serve answers with a new replica.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp

from ellm_serve.cluster.crew import Placement
from ellm_serve.cluster.launch import launch_engine
from ellm_serve.cluster.startup import plan_start
from ellm_serve.config import ServeConfig
from ellm_serve.engine.engine import Engine
from ellm_serve.engine.stats import StepReport
from ellm_serve.errors import EllmError, EngineError
from ellm_serve.metrics import Metrics
from ellm_serve.request import FinishReason, GenerateRequest, SamplingParams
from ellm_serve.serve.context import AppState
from ellm_serve.serve.http import create_app
from ellm_serve.serve.log_pipe import PipeHandler
from ellm_serve.serve.loopback import stay_on_loopback
from ellm_serve.serve.service import Service

logger = logging.getLogger(__name__)

_WATCH_PERIOD_S = 1.0
# For answers in flight to say what has happened.
_LAST_WORDS_S = 1.0
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Status:
    """How a replica is doing. `summary`: what it serves and with what, once it is ready."""

    pid: int
    phase: str
    ready: bool
    failed: str | None
    num_open: int
    summary: str


class Replica:
    """Wrapped by `serve.ingress`; public methods are called through Serve's handle."""

    def __init__(self, config: ServeConfig, log_path: str | None = None) -> None:
        """`log_path`: the pipe of a reader on this host; None logs to standard error."""
        self._engine: Engine | None = None
        self._closing = threading.Event()
        _configure_logging(log_path)
        stay_on_loopback()
        self._config = config
        self._state = AppState(Metrics(config.names[0], config.sequence_length or 1 << 20))
        self._summary = ""
        threading.Thread(target=self._live, name="ellm-replica", daemon=True).start()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve takes the application from here, after the constructor."""
        # Serve's proxy writes X-Request-Id itself, and clients join two of them to a wrong one.
        config = self._config.model_copy(update={"enable_request_id_headers": False})
        return create_app(self._state, config)

    # --- loading and watching, in a thread ------------------------------------------------------

    def _live(self) -> None:
        try:
            self._load()
        except EllmError as error:
            self._fail(str(error))
        except Exception:
            # A bug; without this the replica would load for ever.
            logger.exception("the engine does not start")
            self._fail("the engine does not start; see the replica's log")
        else:
            self._watch()

    def _fail(self, reason: str) -> None:
        self._state.failed = reason
        self._close()

    def _load(self) -> None:
        self._enter("preparing")
        start = plan_start(self._config)
        assert isinstance(start.config, ServeConfig)
        self._enter("loading", weights_bytes=start.plan.weights_bytes)
        placement = Placement.inherit() if start.config.workers == "ray" else None
        engine = launch_engine(start, placement=placement, on_step=self._count_step)
        self._engine = engine
        if self._closing.is_set():
            engine.close()
            return
        # The configuration as it was given knows `auto`; the service needs the numbers.
        service = Service.create(engine, start.model_dir, start.config, self._state.metrics)
        self._enter("warming up")
        service.start()
        warm_up(engine)
        self._summary = start.summary
        self._state.service = service
        self._enter("ready")

    def _enter(self, phase: str, **progress: object) -> None:
        logger.info("engine: %s", phase)
        self._state.phase, self._state.progress = phase, progress

    def _count_step(self, report: StepReport) -> None:
        # The warm-up is nobody's request.
        if self._state.service is not None:
            self._state.metrics.step(report.num_prefill_tokens, report.num_decode_tokens)

    def _watch(self) -> None:
        assert self._engine is not None
        while not self._closing.wait(_WATCH_PERIOD_S):
            reason = self._engine.health()
            if reason is not None and not self._closing.is_set():
                logger.error("the replica ends: %s", reason)
                self._state.failed = reason
                time.sleep(_LAST_WORDS_S)
                # Not sys.exit: this is a thread, and the engine's may hang.
                os._exit(1)

    # --- called by Serve ------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raises if this replica will never answer again; Serve then replaces it."""
        if self._state.failed is not None:
            raise EngineError(self._state.failed)

    def __del__(self) -> None:
        """Serve calls this when the running requests have ended, or may run no longer."""
        self._close()

    # --- called through the handle --------------------------------------------------------------

    def status(self) -> Status:
        """Of this moment."""
        state = self._state
        ready = state.service is not None and state.failed is None
        return Status(os.getpid(), state.phase, ready, state.failed, state.num_open, self._summary)

    def drain(self) -> int:
        """Refuses new requests from now on; returns how many still run."""
        self._state.draining = True
        return self._state.num_open

    async def stop(self) -> None:
        """Ends what still runs, with an error for its readers, and gives the memory back."""
        self._state.draining = True
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._closing.set()
        if self._engine is not None:
            self._engine.close()
        if self._state.service is not None:
            self._state.service.close()


def warm_up(engine: Engine) -> None:
    """Passes a prompt and a token through every layer.

    Raises:
        EngineError: that failed.
    """
    prompt = tuple(range(_WARM_UP_TOKENS))
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    request = GenerateRequest("warm-up", prompt, sampling, principal="warm-up")
    for delta in engine.submit(request):
        if delta.finish_reason is FinishReason.ERROR:
            raise EngineError(f"the first step failed: {delta.error}")


def _configure_logging(log_path: str | None) -> None:
    """Our own lines only: Ray and Serve have their own files."""
    ours = logging.getLogger("ellm_serve")
    ours.setLevel(logging.INFO)
    ours.propagate = False
    to_driver = logging.StreamHandler(sys.stderr)
    ours.handlers = [to_driver if log_path is None else PipeHandler(Path(log_path))]
