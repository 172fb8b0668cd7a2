"""Requests by route, as the common FastAPI instrumentator counts them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

_METHODS = ("GET", "HEAD", "POST", "OPTIONS")

_HTTP = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5),
    *(5, 7.5, 10, 30, 60),
)
_HTTP_COARSE = (0.1, 0.5, 1)


class HttpMetrics:
    """Requests by route; the series appear with the first request."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by = ("handler",)
        self._requests = Counter(
            "http_requests",
            "Requests by method, status and handler.",
            ("method", "status", "handler"),
            registry=registry,
        )
        self._received = Summary(
            "http_request_size_bytes", "Bytes of request bodies.", by, registry=registry
        )
        self._sent = Summary(
            "http_response_size_bytes", "Bytes of response bodies.", by, registry=registry
        )
        self._fine = Histogram(
            "http_request_duration_highr_seconds",
            "Seconds to the end of an answer, finely.",
            registry=registry,
            buckets=_HTTP,
        )
        self._coarse = Histogram(
            "http_request_duration_seconds",
            "Seconds to the end of an answer, by handler.",
            ("method", "handler"),
            registry=registry,
            buckets=_HTTP_COARSE,
        )

    def add(
        self, handler: str, method: str, status: int, seconds: float, received: int, sent: int
    ) -> None:
        """One answer."""
        method = method if method in _METHODS else "other"
        self._requests.labels(method=method, status=f"{status // 100}xx", handler=handler).inc()
        self._received.labels(handler=handler).observe(received)
        self._sent.labels(handler=handler).observe(sent)
        self._fine.observe(seconds)
        self._coarse.labels(method=method, handler=handler).observe(seconds)
