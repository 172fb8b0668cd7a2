"""Every metric but those of HTTP: names, help, labels and buckets.

What vLLM has is as in vLLM, so that its dashboards work as they are; what it has no name for is
`ellm:`. Label values are closed sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
Rejection = Literal["max_num_queued_reqs", "max_num_queued_tokens"]
REJECTIONS: tuple[Rejection, ...] = ("max_num_queued_reqs", "max_num_queued_tokens")
Buckets = tuple[float, ...]
_FIRST_TOKEN: Buckets = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN: Buckets = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_PER_REQUEST: Buckets = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS: Buckets = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES: Buckets = (1, 2, 5, 10, 20)
_PREEMPTIONS: Buckets = (1, 2, 3, 4, 5, 10, 20)
# 1, 2, 5, 10 ... up to the sequence length, which only the service knows.
_UP_TO_LENGTH: Buckets = ()


@dataclass(frozen=True, slots=True)
class CounterSpec:
    """A counter; exposed with `_total` at the end. `values` are those of one more `label`."""

    name: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    per_engine: bool = True


@dataclass(frozen=True, slots=True)
class GaugeSpec:
    """A gauge. `values` are those of one more `label`."""

    name: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HistogramSpec:
    """A histogram."""

    name: str
    help: str
    buckets: Buckets


GAUGES = (
    GaugeSpec("vllm:num_requests_running", "Requests in prefill or decode."),
    GaugeSpec("vllm:num_requests_waiting", "Requests that wait for prefill."),
    GaugeSpec(
        "vllm:num_requests_waiting_by_reason",
        "Requests that wait for prefill, by what they wait for.",
        "reason",
        ("capacity", "deferred"),
    ),
    GaugeSpec(
        "vllm:engine_sleep_state",
        "1 for the state the engine is in.",
        "sleep_state",
        ("awake", "weights_offloaded", "discard_all"),
    ),
    GaugeSpec("vllm:kv_cache_usage_perc", "Part of the KV cache that running requests fill, 0-1."),
    GaugeSpec("ellm:slots", "Slots: sessions that can be kept."),
    GaugeSpec("ellm:sessions", "Slots that hold a session's keys and values."),
    GaugeSpec("ellm:session_kv_tokens", "Tokens whose keys and values are kept, in all slots."),
)

COUNTERS = (
    CounterSpec("vllm:prefix_cache_queries", "Prompt tokens looked up among kept sessions."),
    CounterSpec("vllm:prefix_cache_hits", "Prompt tokens whose keys and values were reused."),
    CounterSpec("vllm:external_prefix_cache_queries", "Tokens looked up in other instances."),
    CounterSpec("vllm:external_prefix_cache_hits", "Tokens reused from other instances."),
    CounterSpec("vllm:mm_cache_queries", "Multi-modal items looked up."),
    CounterSpec("vllm:mm_cache_hits", "Multi-modal items reused."),
    CounterSpec("vllm:num_preemptions", "Running requests that had to give way."),
    CounterSpec("vllm:prompt_tokens", "Prompt tokens of requests that ended, reused ones too."),
    CounterSpec(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by where their keys and values came from.",
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    CounterSpec("vllm:prompt_tokens_cached", "Prompt tokens that were not computed again."),
    CounterSpec(
        "vllm:prompt_tokens_cached_by_source",
        "Prompt tokens that were not computed again, by where they were kept.",
        "source",
        ("device", "host", "p2p", "disk", "external_unspecified"),
    ),
    CounterSpec("vllm:generation_tokens", "Tokens generated for requests that ended."),
    CounterSpec(
        "vllm:request_success", "Requests that ended, by reason.", "finished_reason", FINISH_REASONS
    ),
    CounterSpec(
        "vllm:admission_rejections",
        "Requests refused because the queue was full, by the limit they met.",
        "reason",
        REJECTIONS,
        per_engine=False,
    ),
    CounterSpec("ellm:session_evictions", "Sessions that gave their slot to another one."),
    CounterSpec("ellm:session_forks", "Prefixes copied from one slot to another."),
    CounterSpec("ellm:cancelled_in_prefill", "Requests whose client left during prefill."),
    CounterSpec("ellm:client_retries", "Requests that say they repeat an earlier one."),
)

HISTOGRAMS = (
    HistogramSpec(
        "vllm:time_to_first_token_seconds", "Arrival to first token, seconds.", _FIRST_TOKEN
    ),
    HistogramSpec(
        "vllm:inter_token_latency_seconds", "Between two tokens of a request, seconds.", _PER_TOKEN
    ),
    HistogramSpec(
        "vllm:request_time_per_output_token_seconds",
        "Decode time per token after the first one, seconds.",
        _PER_TOKEN,
    ),
    HistogramSpec(
        "vllm:e2e_request_latency_seconds", "Arrival to last token, seconds.", _PER_REQUEST
    ),
    HistogramSpec("vllm:request_queue_time_seconds", "Arrival to prefill, seconds.", _PER_REQUEST),
    HistogramSpec(
        "vllm:request_inference_time_seconds", "Prefill and decode, seconds.", _PER_REQUEST
    ),
    HistogramSpec(
        "vllm:request_prefill_time_seconds", "Prefill to first token, seconds.", _PER_REQUEST
    ),
    HistogramSpec(
        "vllm:request_decode_time_seconds", "First to last token, seconds.", _PER_REQUEST
    ),
    HistogramSpec("vllm:request_prompt_tokens", "Prompt tokens of a request.", _UP_TO_LENGTH),
    HistogramSpec("vllm:request_generation_tokens", "Tokens generated.", _UP_TO_LENGTH),
    HistogramSpec(
        "vllm:request_max_num_generation_tokens",
        "Tokens of the longest answer of a request.",
        _UP_TO_LENGTH,
    ),
    HistogramSpec("vllm:request_params_max_tokens", "max_tokens of a request.", _UP_TO_LENGTH),
    HistogramSpec(
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens that were computed, not reused.",
        _UP_TO_LENGTH,
    ),
    HistogramSpec("vllm:iteration_tokens_total", "Tokens computed in one step.", _STEP_TOKENS),
    HistogramSpec("vllm:request_params_n", "n of a request.", _CHOICES),
    HistogramSpec("vllm:request_num_preemptions", "Times a request gave way.", _PREEMPTIONS),
    HistogramSpec(
        "ellm:request_max_token_gap_seconds",
        "Longest wait between two tokens of a request, seconds.",
        _PER_TOKEN,
    ),
)
