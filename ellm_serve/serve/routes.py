"""The paths of the service and what happens at each: read, check, hand over, answer.

Refusals are raised here and turned into answers by the shell around it (`http`). Bodies are parsed
by hand, because they must be bounded before and because FastAPI's own refusals have another form;
the OpenAPI document gets their schemas from `describe`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from ellm_serve.config import ServeConfig
from ellm_serve.metrics import CONTENT_TYPE
from ellm_serve.protocol.chat import ChatCompletionResponse
from ellm_serve.protocol.common import ModelList
from ellm_serve.protocol.completion import CompletionResponse
from ellm_serve.protocol.errors import error_body
from ellm_serve.protocol.messages import (
    COUNT_TOKENS,
    MESSAGES,
    CountTokensResponse,
    MessagesResponse,
)
from ellm_serve.protocol.responses import RESPONSES, ResponseObject
from ellm_serve.protocol.tokenize import DetokenizeResponse, TokenizeResponse
from ellm_serve.protocol.validation import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    TOKENIZE,
    check_content_type,
    parse_request,
)
from ellm_serve.serve import messages, responses
from ellm_serve.serve.context import AppState, RequestContext
from ellm_serve.serve.faults import log_fault
from ellm_serve.serve.health import failure, gauges, service_of, unreadiness
from ellm_serve.serve.keep_alive import EventResponse, Frames, until_disconnect
from ellm_serve.serve.limits import parse_body, read_body
from ellm_serve.serve.response_store import ResponseStore
from ellm_serve.serve.responses import Responses
from ellm_serve.serve.service import Service
from ellm_serve.serve.sse import to_json
from ellm_serve.version import __version__

logger = logging.getLogger(__name__)

CONTEXT = "ellm.context"
# Open to everybody, keys or not; /metrics is so if configured.
PROBES = ("/health", "/ready", "/ping")
METRICS = "/metrics"

Parsed = TypeVar("Parsed")


def openai_error(error: Exception) -> str:
    """The last event of a stream that was cut short, as OpenAI's clients know it."""
    return f"data: {to_json(error_body(error))}\n\n"


class Answer(Protocol):
    """A whole answer: a response model."""

    def model_dump_json(self) -> str: ...


class Routes:
    """Handlers of one application."""

    def __init__(self, state: AppState, config: ServeConfig) -> None:
        self._state = state
        self._config = config
        self._responses = Responses(ResponseStore())

    def add_to(self, app: FastAPI) -> None:
        """Adds every path. A HEAD request gets what GET would, without the body."""
        posts: dict[str, tuple[Callable[..., Any], type]] = {
            "/v1/completions": (self.completions, CompletionResponse),
            "/v1/chat/completions": (self.chat_completions, ChatCompletionResponse),
            "/v1/responses": (self.responses, ResponseObject),
            "/v1/messages": (self.messages, MessagesResponse),
            "/v1/messages/count_tokens": (self.count_tokens, CountTokensResponse),
            "/tokenize": (self.tokenize, TokenizeResponse),
            "/detokenize": (self.detokenize, DetokenizeResponse),
        }
        for path, (handler, model) in posts.items():
            app.post(path, response_model=None, responses={200: {"model": model}})(handler)
        app.get("/v1/models", response_model=None, responses={200: {"model": ModelList}})(
            self.models
        )
        earlier = "/v1/responses/{response_id}"
        app.get(earlier, response_model=None, responses={200: {"model": ResponseObject}})(
            self.earlier_response
        )
        app.post(f"{earlier}/cancel", response_model=None)(self.cancel_response)
        gets = {
            "/health": self.health,
            "/ready": self.ready,
            "/ping": self.health,
            "/version": self.version,
            "/load": self.load,
            METRICS: self.metrics,
        }
        if self._config.dev_mode:
            gets["/server_info"] = self.server_info
        for path, handler in gets.items():
            app.get(path, response_model=None)(handler)
            app.head(path, response_model=None, include_in_schema=False)(handler)
        app.post("/ping", response_model=None, include_in_schema=False)(self.health)

    # --- generation --------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """Continues a text, or each of a list of texts."""
        return await self._answer(request, partial(parse_request, COMPLETION), Service.complete)

    async def chat_completions(self, request: Request) -> Response:
        """Answers a conversation."""
        return await self._answer(request, partial(parse_request, CHAT), Service.chat)

    async def responses(self, request: Request) -> Response:
        """Answers items, or goes on from an earlier answer."""
        parse = partial(parse_request, RESPONSES)
        return await self._answer(request, parse, self._responses.create, responses.error_event)

    async def earlier_response(self, request: Request, response_id: str) -> Response:
        """An answer that was given and kept."""
        body = self._responses.earlier(response_id, request.scope[CONTEXT])
        return Response(body, media_type="application/json")

    async def cancel_response(self, request: Request, response_id: str) -> Response:
        """For answers that are made while nobody waits; there are none here."""
        self._responses.cancel(response_id, request.scope[CONTEXT])

    async def messages(self, request: Request) -> Response:
        """Answers a conversation in Anthropic's form."""
        parse = partial(parse_request, MESSAGES)
        return await self._answer(request, parse, messages.create_message, messages.error_event)

    async def count_tokens(self, request: Request) -> Response:
        """How long the prompt of such a conversation is."""
        parse = partial(parse_request, COUNT_TOKENS)
        return await self._answer(request, parse, messages.count_tokens)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        return await self._answer(request, partial(parse_request, TOKENIZE), Service.tokenize)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        return await self._answer(request, partial(parse_request, DETOKENIZE), Service.detokenize)

    async def _answer(
        self,
        request: Request,
        parse: Callable[[bytes], Parsed],
        handle: Callable[[Service, Parsed, RequestContext], Coroutine[Any, Any, Answer | Frames]],
        failure: Callable[[Exception], str] = openai_error,
    ) -> Response:
        """One request from body to answer. Whatever it started ends when the client leaves.

        failure: the last event of a stream that a mistake of ours has cut short.
        """
        service = service_of(self._state)
        context: RequestContext = request.scope[CONTEXT]
        check_content_type(request.headers.get("content-type"))
        announced = request.headers.get("content-length")
        body = await read_body(request.receive, announced, self._config.max_body_bytes)
        parsed = await parse_body(parse, body, service.engine.limits.sequence_length)
        del body
        result = await until_disconnect(request.receive, handle(service, parsed, context))
        if isinstance(result, Frames):
            context.log["stream"] = True
            return EventResponse(
                result,
                self._config.sse_keep_alive_interval,
                context.describe_progress,
                partial(_failed, failure),
            )
        return Response(result.model_dump_json(), media_type="application/json")

    # --- about the service -------------------------------------------------------------------

    async def models(self) -> Response:
        """The names this model is served under."""
        models = service_of(self._state).models()
        return Response(models.model_dump_json(), media_type="application/json")

    async def health(self) -> Response:
        """200 while the process may be left alone, 503 when it should be restarted."""
        reason = failure(self._state)
        if reason is None:
            return Response(status_code=200)
        return JSONResponse({"status": "failed", "reason": reason}, 503)

    async def ready(self) -> Response:
        """200 when requests are answered, else 503 with phase and progress."""
        missing = unreadiness(self._state)
        return JSONResponse(missing or {"phase": "ready"}, 503 if missing else 200)

    async def version(self) -> Response:
        """The server's version."""
        return JSONResponse({"version": __version__})

    async def load(self) -> Response:
        """How many requests are being worked on."""
        return JSONResponse({"server_load": self._state.num_open})

    async def metrics(self) -> Response:
        """All series for Prometheus."""
        page = self._state.metrics.render(gauges(self._state))
        return Response(page, headers={"Content-Type": CONTENT_TYPE})

    async def server_info(self) -> Response:
        """The configuration, without keys; in dev mode only."""
        settings = self._config.model_dump(mode="json", exclude={"api_keys", "api_key_file"})
        return JSONResponse({"config": settings, "version": __version__})


def _failed(failure: Callable[[Exception], str], error: Exception) -> bytes:
    """The last event of a stream, and a note in the log."""
    log_fault(logger, "a stream was cut short", error)
    return failure(error).encode()
