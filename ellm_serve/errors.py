"""Every error this package raises on purpose, and what a user sees of it.

    EllmError
    ├── StartupError            one actionable line, exit code 1, no traceback
    │   ├── ConfigError         a flag or a configuration key is wrong
    │   ├── ModelError          the checkpoint is incomplete, inconsistent or unsupported
    │   └── MemoryPlanError     the plan does not fit this machine
    ├── RequestError            the client's fault; `status`, `code` and `param` go on the wire
    │   ├── InvalidRequest          400
    │   ├── ContextLengthExceeded   400
    │   └── Overloaded              429, with `retry_after_s`
    └── EngineError             our fault; 500 or 503
        ├── KVExhausted         no memory left for another chunk of the KV tensor
        └── WorkerDied          a pinned thread or worker process is gone

A programmer's error is an `assert` or a built-in exception, never one of these.
"""

from __future__ import annotations


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
    """A request that cannot be served as sent."""

    status = 400
    code = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(RequestError):
    """A field has a value that is not allowed."""


class ContextLengthExceeded(RequestError):
    """Prompt and requested output do not fit in one slot."""

    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, limit: int, param: str = "prompt") -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens, but the request needs"
            f" at least {num_tokens}.",
            param,
        )
        self.num_tokens = num_tokens
        self.limit = limit


class Overloaded(RequestError):
    """The queue is full; the client should come back later."""

    status = 429
    code = "server_overloaded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(EllmError):
    """The engine failed; not the client's fault."""

    status = 500
    code = "internal_error"


class KVExhausted(EngineError):
    """Memory for the next chunk of a slot could not be committed."""

    status = 503


class WorkerDied(EngineError):
    """A compute thread or worker process stopped answering."""

    status = 503
