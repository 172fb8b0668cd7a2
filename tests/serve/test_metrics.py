"""/metrics: vLLM's names, types, labels and buckets, from the start, in a closed set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from urllib.request import urlopen

import pytest

from ellm_serve.config import ServeConfig
from ellm_serve.metrics import CONTENT_TYPE, Gauges, Metrics
from ellm_serve.serve.context import AppState
from ellm_serve.serve.http import create_app
from tests.serve.client import Client, samples, wait_until
from tests.serve.conftest import MakeServer, Pace, ServeApp, Server

COMPLETIONS = "/v1/completions"
OF_MODEL = {"model_name", "engine"}

# As vLLM documents and exposes them: type, labels, and the values of the label that is not one of
# `OF_MODEL`.
SERIES: dict[str, tuple[str, set[str], set[str]]] = {
    "num_requests_running": ("gauge", OF_MODEL, set()),
    "num_requests_waiting": ("gauge", OF_MODEL, set()),
    "num_requests_waiting_by_reason": ("gauge", OF_MODEL | {"reason"}, {"capacity", "deferred"}),
    "kv_cache_usage_perc": ("gauge", OF_MODEL, set()),
    "engine_sleep_state": (
        "gauge",
        OF_MODEL | {"sleep_state"},
        {"awake", "weights_offloaded", "discard_all"},
    ),
    "prefix_cache_queries_total": ("counter", OF_MODEL, set()),
    "prefix_cache_hits_total": ("counter", OF_MODEL, set()),
    "external_prefix_cache_queries_total": ("counter", OF_MODEL, set()),
    "external_prefix_cache_hits_total": ("counter", OF_MODEL, set()),
    "mm_cache_queries_total": ("counter", OF_MODEL, set()),
    "mm_cache_hits_total": ("counter", OF_MODEL, set()),
    "num_preemptions_total": ("counter", OF_MODEL, set()),
    "prompt_tokens_total": ("counter", OF_MODEL, set()),
    "prompt_tokens_by_source_total": (
        "counter",
        OF_MODEL | {"source"},
        {"local_compute", "local_cache_hit", "external_kv_transfer"},
    ),
    "prompt_tokens_cached_total": ("counter", OF_MODEL, set()),
    "prompt_tokens_cached_by_source_total": (
        "counter",
        OF_MODEL | {"source"},
        {"device", "host", "p2p", "disk", "external_unspecified"},
    ),
    "generation_tokens_total": ("counter", OF_MODEL, set()),
    "request_success_total": (
        "counter",
        OF_MODEL | {"finished_reason"},
        {"stop", "length", "abort", "error", "repetition"},
    ),
    "admission_rejections_total": (
        "counter",
        {"model_name", "reason"},
        {"max_num_queued_reqs", "max_num_queued_tokens"},
    ),
}

_SECONDS_FIRST = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
_SECONDS_TOKEN = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
_SECONDS_REQUEST = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
_TOKENS = "1 2 5 10 20 50 100 200 500 1000 2000"
HISTOGRAMS = {
    "time_to_first_token_seconds": _SECONDS_FIRST,
    "inter_token_latency_seconds": _SECONDS_TOKEN,
    "request_time_per_output_token_seconds": _SECONDS_TOKEN,
    "e2e_request_latency_seconds": _SECONDS_REQUEST,
    "request_queue_time_seconds": _SECONDS_REQUEST,
    "request_inference_time_seconds": _SECONDS_REQUEST,
    "request_prefill_time_seconds": _SECONDS_REQUEST,
    "request_decode_time_seconds": _SECONDS_REQUEST,
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "request_max_num_generation_tokens": _TOKENS,
    "request_params_max_tokens": _TOKENS,
    "request_prefill_kv_computed_tokens": _TOKENS,
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "request_params_n": "1 2 5 10 20",
    "request_num_preemptions": "1 2 3 4 5 10 20",
}

Page = list[tuple[str, dict[str, str], float]]


@pytest.fixture
def page() -> str:
    """Of a service that has just begun."""
    return Metrics("m", 2048, process=False).render(Gauges()).decode()


def kinds(page: str) -> dict[str, str]:
    """Type by name."""
    lines = (line.split() for line in page.splitlines() if line.startswith("# TYPE"))
    return {name: kind for _, _, name, kind in lines}


@pytest.mark.parametrize("name", SERIES)
def test_counters_and_gauges(page: str, name: str) -> None:
    """All series are there at 0 (one state of the engine is always 1)."""
    kind, labels, values = SERIES[name]
    assert kinds(page)[f"vllm:{name}"] == kind
    found = [(labels, value) for series, labels, value in samples(page) if series == f"vllm:{name}"]
    assert all(given.keys() == labels for given, _ in found)
    assert {given["model_name"] for given, _ in found} == {"m"}
    own = labels - OF_MODEL
    assert len(found) == (len(values) or 1)
    if own:
        (label,) = own
        assert {given[label] for given, _ in found} == values
    assert sum(value for _, value in found) == (name == "engine_sleep_state")


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms(page: str, name: str) -> None:
    """vLLM's buckets, all at 0."""
    assert kinds(page)[f"vllm:{name}"] == "histogram"
    buckets = [
        (labels, value)
        for series, labels, value in samples(page)
        if series == f"vllm:{name}_bucket"
    ]
    bounds = [float(labels["le"]) for labels, _ in buckets]
    assert bounds == [*map(float, HISTOGRAMS[name].split()), float("inf")]
    assert {value for _, value in buckets} == {0.0}
    assert all(labels.keys() == OF_MODEL | {"le"} for labels, _ in buckets)


def test_no_invented_names(page: str) -> None:
    """What vLLM has no name for has our prefix."""
    known = {f"vllm:{name}" for name in (*SERIES, *HISTOGRAMS)}
    known |= {"vllm:cache_config_info", "vllm:tool_call_parser_invocations_total"}
    ours = {name for name in kinds(page) if name.startswith("vllm:")}
    assert {name for name in ours if not name.endswith("_created")} == known
    assert any(name.startswith("ellm:") for name in kinds(page))


def test_cache_in_vllms_words() -> None:
    """Slots of a length, told as pages of one token; what others read is not empty."""
    metrics = Metrics("m", 2048, process=False)
    page = metrics.render(Gauges(num_slots=4, sequence_length=1000)).decode()
    (labels,) = [given for name, given, _ in samples(page) if name == "vllm:cache_config_info"]
    assert labels["block_size"] == "1" and labels["num_gpu_blocks"] == "4000"
    assert labels["kv_cache_size_tokens"] == "4000"
    assert float(labels["kv_cache_max_concurrency"]) == 4
    assert "model_name" not in labels


def test_totals_of_the_engine_only_grow() -> None:
    """Also when a page is asked for with older numbers than the one before."""
    metrics = Metrics("m", process=False)
    for total in (3, 5, 4, 5):
        page = metrics.render(Gauges(total_evictions=total)).decode()
    (value,) = [v for name, _, v in samples(page) if name == "ellm:session_evictions_total"]
    assert value == 5


# --- over HTTP ---------------------------------------------------------------------------------


def test_the_page(serve_app: ServeApp) -> None:
    """Before there is an engine; read by a plain client, without a key."""
    config = ServeConfig.from_options(model="a/b", served_model_name=["x", "y"], api_keys=["k"])
    url = serve_app(create_app(AppState(Metrics(config.names[0])), config))
    with closing(urlopen(f"{url}/metrics")) as answer:
        assert answer.status == 200
        assert answer.headers["content-type"] == CONTENT_TYPE
        found = list(samples(answer.read().decode()))
    assert CONTENT_TYPE == "text/plain; version=1.0.0; charset=utf-8"
    running = [labels for name, labels, _ in found if name == "vllm:num_requests_running"]
    assert running == [{"model_name": "x", "engine": "0"}]
    assert {"process_resident_memory_bytes", "python_info"} <= {name for name, _, _ in found}


def serving_words(scripted: MakeServer, **options: object) -> Server:
    """A model that says three words and ends; prompts that end in 301 it answers for ever."""
    return scripted(
        lambda prefix: 300 if 301 in prefix or prefix[-3:] != (300,) * 3 else 4089, **options
    )


def test_exact_counts(scripted: MakeServer) -> None:
    """One request that ends by itself, one by its length, one by its client."""
    server = serving_words(scripted, executor={"before": Pace(decode=0.005)})
    client = server.client
    stopped = client.post(COMPLETIONS, {"prompt": [7, 8], "max_tokens": 50}).json
    assert stopped["choices"][0]["finish_reason"] == "stop"
    length = client.post(COMPLETIONS, {"prompt": [9, 301], "max_tokens": 6}).json
    assert length["choices"][0]["finish_reason"] == "length"
    endless = {"prompt": [5, 6, 301], "max_tokens": 1500, "stream": True}
    with client.open(COMPLETIONS, endless) as stream:
        next(stream.events())
        assert client.metric("vllm:num_requests_running") == 1
        assert 0 < client.metric("vllm:kv_cache_usage_perc") < 0.1
    wait_until(lambda: client.metric("vllm:num_requests_running") == 0, "an idle engine")
    for reason, count in {"stop": 1, "length": 1, "abort": 1, "error": 0}.items():
        assert client.metric("vllm:request_success_total", finished_reason=reason) == count
    # Sizes and times are those of requests that were served.
    served = stopped["usage"]["completion_tokens"] + 6
    assert client.metric("vllm:request_generation_tokens_sum") == served
    assert client.metric("vllm:request_generation_tokens_count") == 2
    assert client.metric("vllm:request_prompt_tokens_sum") == 4
    assert client.metric("vllm:e2e_request_latency_seconds_count") == 2
    assert client.metric("vllm:request_params_max_tokens_sum") == 56
    assert client.metric("vllm:time_to_first_token_seconds_count") == 3
    assert client.metric("vllm:prompt_tokens_total") == 7
    assert client.metric("vllm:kv_cache_usage_perc") == 0
    assert client.metric("ellm:sessions") >= 1


def test_reused_tokens(scripted: MakeServer) -> None:
    """Looked up, found, and where they came from."""
    client = scripted().client
    for _ in range(2):
        usage = client.post(COMPLETIONS, {"prompt": [300] * 200, "max_tokens": 1}).json["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 100
    assert client.metric("vllm:prefix_cache_queries_total") == 400
    assert client.metric("vllm:prefix_cache_hits_total") == cached
    by = "vllm:prompt_tokens_by_source_total"
    assert client.metric(by, source="local_cache_hit") == cached
    assert client.metric(by, source="local_compute") == 400 - cached


METHODS = ("PROPFIND", "PURGE", "MKCOL", "DELETE")


def all_series(client: Client) -> Iterator[set[tuple[str, str]]]:
    """The series there are, again and again."""
    while True:
        page = client.get("/metrics").text
        yield {(name, json.dumps(labels, sort_keys=True)) for name, labels, _ in samples(page)}


def test_users_make_no_series(scripted: MakeServer) -> None:
    """Whatever they name: sessions, ids, models, paths, methods, keys."""
    client = scripted().client
    pages = all_series(client)

    def ask(number: int) -> None:
        headers = {"X-Session-Id": f"s{number}", "X-Request-Id": f"r{number}"}
        body = {"prompt": "x", "max_tokens": 1, "user": f"u{number}"}
        assert client.post(COMPLETIONS, body, headers=headers).status == 200
        assert client.post(COMPLETIONS, {**body, "model": f"m{number}"}).status == 404
        assert client.get(f"/path{number}").status == 404
        assert client.request(METHODS[number % len(METHODS)], COMPLETIONS).status == 405

    for number in range(len(METHODS)):
        ask(number)
    before = next(pages)
    assert not any(method in labels for _, labels in before for method in METHODS)
    for number in range(len(METHODS), 250):
        ask(number)
    assert next(pages) == before


def test_http_requests(scripted: MakeServer) -> None:
    """By the route's template; probes do not count."""
    client = scripted().client
    client.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
    client.post(COMPLETIONS, {"prompt": "x", "max_tokens": -1})
    client.get("/health")
    client.get("/nosuch")
    name = "http_requests_total"
    assert client.metric(name, handler=COMPLETIONS, status="2xx") == 1
    assert client.metric(name, handler=COMPLETIONS, status="4xx") == 1
    assert client.metric(name, handler="none", status="4xx") == 1
    page = client.get("/metrics").text
    assert 'handler="/health"' not in page and 'handler="/metrics"' not in page
    assert client.metric("http_request_duration_seconds_count", handler=COMPLETIONS) == 2
    assert client.metric("http_request_size_bytes_sum", handler=COMPLETIONS) > 20
