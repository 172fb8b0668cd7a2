"""The HTTP application: routes, and the shell around every request.

The shell is plain ASGI, because layers that pass bodies through queues of their own break
disconnects and delay streams. It lets nobody in without a key, makes the request's context, turns
whatever is raised into an answer in the envelope clients know, and writes log and metrics.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ellm_serve.config import ServeConfig
from ellm_serve.errors import EngineError, RequestError
from ellm_serve.protocol.errors import error_body, error_headers, error_status
from ellm_serve.protocol.messages import UNAUTHORIZED, messages_error_body
from ellm_serve.serve.access_log import CLIENT_GONE, AccessLog, printable_path
from ellm_serve.serve.auth import KeyRing, is_messages
from ellm_serve.serve.context import AppState, RequestContext
from ellm_serve.serve.faults import log_fault
from ellm_serve.serve.keep_alive import ClientGone
from ellm_serve.serve.openapi import describe
from ellm_serve.serve.routes import CONTEXT, METRICS, PROBES, Routes
from ellm_serve.version import __version__

__all__ = ["AppState", "create_app"]

logger = logging.getLogger(__name__)

# Asked for every few seconds by machines: counted and logged only when they fail.
_QUIET = frozenset((*PROBES, METRICS, "/load", "/version"))
_REQUEST_ID = b"x-request-id"


def create_app(state: AppState, config: ServeConfig) -> FastAPI:
    """The application. `state` may be filled later: probes are answered from the start."""
    docs = not config.disable_docs
    app = FastAPI(
        title="ellm-serve",
        version=__version__,
        openapi_url="/openapi.json" if docs else None,
        docs_url="/docs" if docs else None,
        redoc_url="/redoc" if docs else None,
        redirect_slashes=False,
    )
    Routes(state, config).add_to(app)
    describe(app)
    app.add_middleware(Shell, state=state, config=config)
    if config.allowed_origins:
        # Outside of the shell: a browser asks for permission without a key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


class Shell:
    """What every request passes through."""

    def __init__(self, app: ASGIApp, state: AppState, config: ServeConfig) -> None:
        self._app = app
        self._state = state
        self._config = config
        self._keys = KeyRing(
            config.api_keys, (*PROBES, *([METRICS] if config.metrics_open else []))
        )
        self._log = AccessLog(config.access_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                if self._config.root_path:
                    scope["root_path"] = self._config.root_path
                await self._handle(scope, receive, send)
            case "websocket":
                await send({"type": "websocket.close", "code": 1008})
            case _:
                await self._app(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext()
        exchange = _Exchange(receive, send, context, self._config.enable_request_id_headers)
        working = scope["method"] == "POST"
        self._state.num_open += working
        try:
            await self._run(scope, exchange, context)
        except (ClientGone, asyncio.CancelledError) as gone:
            exchange.status = CLIENT_GONE
            if isinstance(gone, asyncio.CancelledError):
                raise
        finally:
            self._state.num_open -= working
            self._note(scope, exchange, context)

    async def _run(self, scope: Scope, exchange: _Exchange, context: RequestContext) -> None:
        headers = _headers(scope)
        scope[CONTEXT] = context
        try:
            path = _path(scope)
            principal = self._keys.principal(path, headers)
            if principal is None:
                body = UNAUTHORIZED if is_messages(path) else {"error": "Unauthorized"}
                refusal = JSONResponse(body, 401)
                await refusal(scope, exchange.receive, exchange.send)
                return
            context.principal = principal
            context.read_headers(headers, self._config.request_timeout_s)
            if headers.get("x-stainless-retry-count", "0") != "0":
                self._state.metrics.retried()
            await self._app(scope, exchange.receive, exchange.send)
        except ClientGone:
            raise
        except Exception as error:
            # The last resort; nothing above this knows how to answer.
            await self._apologise(scope, exchange, context, error)

    async def _apologise(
        self, scope: Scope, exchange: _Exchange, context: RequestContext, error: Exception
    ) -> None:
        context.log["error"] = type(error).__name__
        if isinstance(error, EngineError):
            logger.error("%s: %s", context.answer_id, error)
        elif not isinstance(error, RequestError):
            log_fault(logger, f"{context.answer_id} failed", error)
        # A status that is out cannot be changed; the server then closes the connection.
        if not exchange.started:
            await error_response(error, _path(scope))(scope, exchange.receive, exchange.send)

    def _note(self, scope: Scope, exchange: _Exchange, context: RequestContext) -> None:
        """Access log and metrics of a request that is over."""
        status, handler = exchange.status or CLIENT_GONE, _handler(scope)
        if handler in _QUIET and status < 400:
            return
        path = printable_path(scope.get("raw_path") or scope["path"].encode())
        self._log.write(scope["method"], path, status, context)
        if handler not in _QUIET:
            seconds = time.monotonic() - context.received
            self._state.metrics.http(
                handler, scope["method"], status, seconds, exchange.received, exchange.sent
            )


class _Exchange:
    """One request's connection: adds the request id to the answer, and counts."""

    def __init__(self, receive: Receive, send: Send, context: RequestContext, name: bool) -> None:
        self.status = 0
        self.started = False
        self.received = 0
        self.sent = 0
        self._receive = receive
        self._send = send
        self._context = context
        self._name = name

    async def receive(self) -> Message:
        message = await self._receive()
        self.received += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.started = message["status"], True
            if self._name:
                headers = [pair for pair in message["headers"] if pair[0] != _REQUEST_ID]
                named = (_REQUEST_ID, self._context.answer_id.encode())
                message = {**message, "headers": [*headers, named]}
        else:
            self.sent += len(message.get("body", b""))
        await self._send(message)


def error_response(error: Exception, path: str) -> Response:
    """What a client is told about an error, in the words of the interface it uses."""
    body = messages_error_body(error) if is_messages(path) else error_body(error)
    return JSONResponse(body, error_status(error), error_headers(error))


def _headers(scope: Scope) -> Mapping[str, str]:
    """By lower-case name; the last one of a name counts."""
    return {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }


def _path(scope: Scope) -> str:
    """The path that the router matches: without the prefix of a proxy."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _handler(scope: Scope) -> str:
    """The template of the route that took the request; a closed set, unlike paths."""
    path: object = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "none"
