"""Every error this package raises on purpose, and what a user sees of it.

    EllmError
    ├── StartupError            one actionable line, exit code 1, no traceback
    │   ├── ConfigError         a flag or a configuration key is wrong
    │   ├── ModelError          the checkpoint is incomplete, inconsistent or unsupported
    │   └── MemoryPlanError     the plan does not fit this machine
    ├── RequestError            refused; `status`, `kind`, `code` and `param` go on the wire
    │   ├── InvalidRequest          400, the meaning of a field
    │   ├── ContextLengthExceeded   400
    │   ├── SynchronousResponse     400
    │   ├── InvalidBody             400, the form of the body
    │   │   └── UnsupportedMediaType    400, as vLLM answers
    │   ├── ModelNotFound           404
    │   ├── ResponseNotFound        404
    │   ├── BodyTooLarge            413
    │   ├── Overloaded              429, with `retry_after_s`
    │   ├── Unavailable             503, with `retry_after_s`: starting or draining
    │   └── DeadlineExceeded        504
    └── EngineError             our fault; 500 or 503
        ├── KVExhausted         no memory left for another chunk of the KV tensor
        └── WorkerDied          a pinned thread or worker process is gone

A programmer's error is an `assert` or a built-in exception, never one of these. The message of a
RequestError goes to the client: it never holds a path, an address or the name of a Python class.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Literal

# No answer repeats more than this much of what the client sent.
MAX_ECHO_CHARS = 200


# What of a queue can be full.
QueueBound = Literal["requests", "tokens"]


class EllmError(Exception):
    """Root of the tree."""


class StartupError(EllmError):
    """The engine cannot start; the message is one line that says what to change."""


class ConfigError(StartupError):
    """A flag or a configuration value is unknown or out of range."""


class ModelError(StartupError):
    """The model directory cannot be served as it is."""


class MemoryPlanError(StartupError):
    """Weights, KV tensor and activations do not fit in the memory that is available."""


class RequestError(EllmError):
    """A request that is not served. `kind` is the envelope's `type`, in vLLM's words."""

    status = 400
    kind = "BadRequestError"
    # What the envelope's `code` says; None: the status, as in vLLM.
    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class _Absent:
    """Told apart from None, which a parameter may well have been."""


_ABSENT = _Absent()


class InvalidRequest(RequestError):
    """A field has a value that is not allowed.

    With `value` the message gets vLLM's suffix ` (parameter=X, value=Y)`.
    """

    def __init__(self, message: str, param: str | None = None, value: object = _ABSENT) -> None:
        if value is not _ABSENT:
            message = f"{message} (parameter={param}, value={shortened(value)})"
        super().__init__(message, param)


class ContextLengthExceeded(RequestError):
    """The prompt does not fit in one slot.

    `at_least`: counting stopped at `num_tokens`, the prompt may be longer.
    """

    def __init__(self, num_tokens: int, limit: int, *, at_least: bool = False) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains"
            f" {'at least ' if at_least else ''}{num_tokens} input tokens, which exceeds this limit"
            " even without any output tokens. Please reduce the length of the input prompt."
            f" (parameter=input_tokens, value={num_tokens})",
            "input_tokens",
        )
        self.num_tokens = num_tokens
        self.limit = limit


class SynchronousResponse(RequestError):
    """The client wants to cancel an answer that somebody waits for."""

    kind = "invalid_request_error"

    def __init__(self) -> None:
        super().__init__("Cannot cancel a synchronous response.", "response_id")


class InvalidBody(RequestError):
    """The body is no JSON, or a field has the wrong type or is missing."""

    kind = "Bad Request"


class UnsupportedMediaType(InvalidBody):
    """The body is not announced as JSON. vLLM answers 400 and not 415, and clients know that."""

    def __init__(self) -> None:
        super().__init__(
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        )


class ModelNotFound(RequestError):
    """The request names a model that is not served here."""

    status = 404
    kind = "NotFoundError"

    def __init__(self, model: str, served: Sequence[str]) -> None:
        super().__init__(
            f"The model `{shortened(model)}` does not exist. Valid aliases: {', '.join(served)}.",
            "model",
        )


class ResponseNotFound(RequestError):
    """An earlier answer that the request speaks of is not here, or no longer, or not its own."""

    status = 404
    kind = "invalid_request_error"

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id '{shortened(response_id)}' not found.", "response_id")


class BodyTooLarge(RequestError):
    """The body has more bytes than this server reads."""

    status = 413
    kind = "Request Entity Too Large"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is larger than the {limit} bytes that are allowed.")


class Overloaded(RequestError):
    """The queue is full; the client should come back later."""

    status = 429
    kind = "Too Many Requests"
    code = "server_overloaded"

    def __init__(self, message: str, retry_after_s: float, bound: QueueBound = "requests") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.bound: QueueBound = bound


class Unavailable(RequestError):
    """The service is starting, draining or restarting; it takes no new requests."""

    status = 503
    kind = "ServiceUnavailableError"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(RequestError):
    """The answer was not complete at the deadline that the client or the server has set.

    504 and not 408: the request had arrived in full, and the work behind it took too long.
    """

    status = 504
    kind = "Gateway Timeout"


class EngineError(EllmError):
    """The engine failed; not the client's fault. The message is for the log, not for clients."""

    status = 500
    kind = "InternalServerError"
    public = "The engine failed while it worked on this request."


class KVExhausted(EngineError):
    """Memory for the next chunk of a slot could not be committed."""

    status = 503
    kind = "ServiceUnavailableError"
    public = "The server has no memory left for this request. Please try again later."


class WorkerDied(EngineError):
    """A compute thread or worker process stopped answering."""

    status = 503
    kind = "ServiceUnavailableError"
    public = "The engine is restarting. Please try again later."


_REPR = reprlib.Repr()
_REPR.maxlevel = 3
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = 20
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = MAX_ECHO_CHARS


def shortened(value: object) -> str:
    """A client's value as text for a message, not much more than MAX_ECHO_CHARS characters of it.

    Millions of items cost no more than a few, and any depth is fine.
    """
    text = value if isinstance(value, str) else _REPR.repr(value)
    return text if len(text) <= MAX_ECHO_CHARS else text[:MAX_ECHO_CHARS] + "..."
