"""Takes plain numbers from any thread and shows them as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from ellm_serve.metrics.http import HttpMetrics
from ellm_serve.metrics.table import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    Buckets,
    CounterSpec,
    GaugeSpec,
    HistogramSpec,
    Rejection,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST
# A request that ended like this was served: only then its sizes and times count.
_SERVED = ("stop", "length")
# Sessions' keys and values in slots, described in the words of a paged cache.
_CACHE_LABELS = (
    "engine",
    "block_size",
    "num_gpu_blocks",
    "cache_dtype",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "kv_cache_size_tokens",
    "kv_cache_max_concurrency",
)


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the engine is doing now; counts with `total_` only grow.

    `kv_usage` is the part of all slots that running requests fill, 0 to 1.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_slots: int = 0
    sequence_length: int = 0
    num_sessions: int = 0
    num_session_tokens: int = 0
    total_evictions: int = 0
    total_forks: int = 0
    total_cancelled_in_prefill: int = 0


class Metrics:
    """Records; may be called from any thread. Each instance has a registry of its own."""

    def __init__(
        self, model_name: str, max_model_len: int = 1 << 20, engine: str = "0", process: bool = True
    ) -> None:
        """`process` adds the process's own memory, CPU and garbage collection."""
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": engine}
        self._gauges = {key: metric for spec in GAUGES for key, metric in self._gauge(spec)}
        self._counters = {key: metric for spec in COUNTERS for key, metric in self._counter(spec)}
        self._histograms = {
            spec.name: self._histogram(spec, _series(max_model_len)) for spec in HISTOGRAMS
        }
        self._gauges["vllm:engine_sleep_state", "awake"].set(1)
        self._totals: dict[str, int] = {}
        self._cache = Gauge(
            "vllm:cache_config_info",
            "The KV cache in the words of a paged one.",
            _CACHE_LABELS,
            registry=self._registry,
        )
        # Declared so that dashboards find it; has series once tool calls are parsed.
        Counter(
            "vllm:tool_call_parser_invocations",
            "Answers looked through for tool calls.",
            ("model_name", "mode", "outcome", "request_type"),
            registry=self._registry,
        )
        self._http = HttpMetrics(self._registry)
        if process:
            ProcessCollector(registry=self._registry)
            PlatformCollector(registry=self._registry)
            GCCollector(registry=self._registry)

    # --- the table ---------------------------------------------------------------------------

    def _gauge(self, spec: GaugeSpec) -> Iterator[tuple[tuple[str, str], Gauge]]:
        names = (*self._labels, *filter(None, [spec.label]))
        family = Gauge(spec.name, spec.help, names, registry=self._registry)
        for value in spec.values or ("",):
            yield (spec.name, value), family.labels(**self._labels | _label(spec.label, value))

    def _counter(self, spec: CounterSpec) -> Iterator[tuple[tuple[str, str], Counter]]:
        labels = dict(self._labels)
        if not spec.per_engine:
            del labels["engine"]
        names = (*labels, *filter(None, [spec.label]))
        family = Counter(spec.name, spec.help, names, registry=self._registry)
        for value in spec.values or ("",):
            yield (spec.name, value), family.labels(**labels | _label(spec.label, value))

    def _histogram(self, spec: HistogramSpec, lengths: Buckets) -> Histogram:
        family = Histogram(
            spec.name,
            spec.help,
            tuple(self._labels),
            registry=self._registry,
            buckets=spec.buckets or lengths,
        )
        return family.labels(**self._labels)

    # --- events ------------------------------------------------------------------------------

    def first_token(self, seconds: float) -> None:
        """A request has its first token, so long after it arrived."""
        self._histograms["vllm:time_to_first_token_seconds"].observe(seconds)

    def inter_token(self, seconds: float) -> None:
        """A request has one more token, so long after the one before."""
        self._histograms["vllm:inter_token_latency_seconds"].observe(seconds)

    def step(self, num_prefill: int, num_decode: int) -> None:
        """The engine has computed so many tokens of prompts and of answers."""
        self._histograms["vllm:iteration_tokens_total"].observe(num_prefill + num_decode)

    def rejected(self, reason: Rejection) -> None:
        """A request met a limit of the queue."""
        self._add("vllm:admission_rejections", 1, reason)

    def retried(self) -> None:
        """A client says that it asks again."""
        self._add("ellm:client_retries", 1)

    def finished(
        self,
        reason: str,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_output_tokens: int,
        max_tokens: int,
        n: int,
        queue_s: float,
        prefill_s: float,
        decode_s: float,
        e2e_s: float,
        max_gap_s: float = 0.0,
    ) -> None:
        """One sequence has ended. `reason` is one of `FINISH_REASONS`."""
        self._add("vllm:request_success", 1, reason)
        self._count_tokens(num_prompt_tokens, num_cached_tokens, num_output_tokens)
        if reason not in _SERVED:
            return
        per_token = decode_s / (num_output_tokens - 1) if num_output_tokens > 1 else 0.0
        for name, value in (
            ("vllm:request_prompt_tokens", num_prompt_tokens),
            ("vllm:request_generation_tokens", num_output_tokens),
            ("vllm:request_max_num_generation_tokens", num_output_tokens),
            ("vllm:request_params_max_tokens", max_tokens),
            ("vllm:request_params_n", n),
            ("vllm:request_num_preemptions", 0),
            ("vllm:request_prefill_kv_computed_tokens", num_prompt_tokens - num_cached_tokens),
            ("vllm:request_queue_time_seconds", queue_s),
            ("vllm:request_prefill_time_seconds", prefill_s),
            ("vllm:request_decode_time_seconds", decode_s),
            ("vllm:request_inference_time_seconds", prefill_s + decode_s),
            ("vllm:request_time_per_output_token_seconds", per_token),
            ("vllm:e2e_request_latency_seconds", e2e_s),
            ("ellm:request_max_token_gap_seconds", max_gap_s),
        ):
            self._histograms[name].observe(value)

    def http(
        self, handler: str, method: str, status: int, seconds: float, received: int, sent: int
    ) -> None:
        """One HTTP request was answered. `handler` is a route's template, or "none"."""
        self._http.add(handler, method, status, seconds, received, sent)

    def _count_tokens(self, num_prompt: int, num_cached: int, num_output: int) -> None:
        self._add("vllm:prefix_cache_queries", num_prompt)
        self._add("vllm:prefix_cache_hits", num_cached)
        self._add("vllm:prompt_tokens", num_prompt)
        self._add("vllm:prompt_tokens_by_source", num_prompt - num_cached, "local_compute")
        self._add("vllm:prompt_tokens_by_source", num_cached, "local_cache_hit")
        self._add("vllm:prompt_tokens_cached", num_cached)
        self._add("vllm:prompt_tokens_cached_by_source", num_cached, "device")
        self._add("vllm:generation_tokens", num_output)

    def _add(self, name: str, amount: int, value: str = "") -> None:
        self._counters[name, value].inc(amount)

    # --- the page ----------------------------------------------------------------------------

    def render(self, gauges: Gauges) -> bytes:
        """All series in Prometheus's text format."""
        self._set("vllm:num_requests_running", gauges.num_running)
        self._set("vllm:num_requests_waiting", gauges.num_waiting)
        self._set("vllm:num_requests_waiting_by_reason", gauges.num_waiting, "capacity")
        self._set("vllm:kv_cache_usage_perc", gauges.kv_usage)
        self._set("ellm:slots", gauges.num_slots)
        self._set("ellm:sessions", gauges.num_sessions)
        self._set("ellm:session_kv_tokens", gauges.num_session_tokens)
        self._grow("ellm:session_evictions", gauges.total_evictions)
        self._grow("ellm:session_forks", gauges.total_forks)
        self._grow("ellm:cancelled_in_prefill", gauges.total_cancelled_in_prefill)
        if gauges.num_slots:
            self._describe_cache(gauges.num_slots, gauges.sequence_length)
        return generate_latest(self._registry)

    def _set(self, name: str, number: float, value: str = "") -> None:
        self._gauges[name, value].set(number)

    def _grow(self, name: str, total: int) -> None:
        """Brings a counter to a total that somebody else keeps."""
        self._add(name, max(0, total - self._totals.get(name, 0)))
        self._totals[name] = max(total, self._totals.get(name, 0))

    def _describe_cache(self, num_slots: int, sequence_length: int) -> None:
        num_tokens = num_slots * sequence_length
        self._cache.labels(
            engine=self._labels["engine"],
            block_size="1",
            num_gpu_blocks=str(num_tokens),
            cache_dtype="auto",
            enable_prefix_caching="True",
            gpu_memory_utilization="None",
            kv_cache_size_tokens=str(num_tokens),
            kv_cache_max_concurrency=f"{num_slots:.1f}",
        ).set(1)


def _label(name: str, value: str) -> dict[str, str]:
    return {name: value} if name else {}


def _series(largest: int) -> Buckets:
    """1, 2, 5, 10, 20, 50 ... up to `largest`."""
    found: list[float] = []
    for exponent in count():
        for mantissa in (1, 2, 5):
            if mantissa * 10**exponent > largest:
                return tuple(found)
            found.append(mantissa * 10**exponent)
    raise AssertionError("unreachable")
