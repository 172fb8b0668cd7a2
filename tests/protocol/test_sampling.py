"""Sampling fields: which value holds, what is refused, what is settled for the engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_serve.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from ellm_serve.protocol.chat import ChatCompletionRequest
from ellm_serve.protocol.completion import CompletionRequest
from ellm_serve.protocol.limits import RequestLimits
from ellm_serve.protocol.sampling import SamplingDefaults, to_sampling_params
from ellm_serve.request import SamplingParams

LIMITS = RequestLimits(max_model_len=100, vocab_size=1000, max_n=4, max_chars_per_token=16)
MODEL = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
USER = [{"role": "user", "content": "hi"}]


def completion(
    defaults: SamplingDefaults | None = None, prompt_len: int = 10, **fields: Any
) -> SamplingParams:
    """The parameters of a completion with these fields."""
    request = CompletionRequest(prompt="x", **fields)
    return to_sampling_params(request, defaults or SamplingDefaults(), LIMITS, prompt_len)


def chat(
    defaults: SamplingDefaults | None = None, prompt_len: int = 10, **fields: Any
) -> SamplingParams:
    """The parameters of a chat completion with these fields."""
    request = ChatCompletionRequest.model_validate({"messages": USER} | fields)
    return to_sampling_params(request, defaults or SamplingDefaults(), LIMITS, prompt_len)


def refusal(**fields: Any) -> InvalidRequest:
    """Why a completion with these fields is refused."""
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    return caught.value


# --- which value holds ---------------------------------------------------------------------------


def test_neutral_without_defaults() -> None:
    """Nothing from the model, nothing from the request: vLLM's neutral values."""
    assert completion() == SamplingParams(max_tokens=16)
    assert chat() == SamplingParams(max_tokens=90)


def test_request_before_server_before_neutral() -> None:
    """Field by field; null in a request means that it is left out."""
    params = completion(MODEL, temperature=0.5, top_p=None)
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.8, 20)
    assert (params.repetition_penalty, params.min_p) == (1.05, 0.0)
    assert completion(MODEL, top_k=0).top_k == 0
    every = SamplingDefaults(0.5, 0.4, 3, 0.2, 1.5, 0.3, -0.3)
    params = completion(every)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.4, 3, 0.2)
    assert params.repetition_penalty == 1.5
    assert (params.presence_penalty, params.frequency_penalty) == (0.3, -0.3)


def test_greedy_switches_the_filters_off() -> None:
    """Temperature 0 is pure argmax whatever the model's file says; penalties stay."""
    params = completion(MODEL, temperature=0)
    assert params.greedy
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert params.repetition_penalty == 1.05


@pytest.mark.parametrize("small", [1e-9, 1e-5, 0.0099])
def test_tiny_temperatures_are_raised(small: float) -> None:
    """Only 0 itself is greedy."""
    params = completion(temperature=small, top_k=5, n=2)
    assert (params.temperature, params.top_k, params.greedy) == (0.01, 5, False)


def test_bound_of_the_output() -> None:
    """Completions: 16 unless told otherwise. Chat: the rest of the slot, or the server's bound."""
    assert completion(max_tokens=None).max_tokens == 16
    assert completion(prompt_len=95).max_tokens == 5
    assert completion(max_tokens=50).max_tokens == 50
    assert completion(max_tokens=95).max_tokens == 90
    assert chat(max_tokens=None).max_tokens == 90
    assert chat(max_tokens=3, max_completion_tokens=5).max_tokens == 5
    assert chat(max_tokens=3).max_tokens == 3
    bounded = SamplingDefaults(max_tokens=20)
    assert chat(bounded).max_tokens == 20
    assert chat(bounded, max_tokens=30).max_tokens == 30
    assert completion(bounded).max_tokens == 16
    capped = SamplingDefaults(max_tokens_cap=8)
    assert chat(capped, max_tokens=30).max_tokens == 8
    assert completion(capped).max_tokens == 8


def test_short_slots_take_the_default() -> None:
    """The default of 16 is no request for 16: a slot of 8 tokens is not refused."""
    limits = RequestLimits(max_model_len=8, vocab_size=1000, max_n=4, max_chars_per_token=16)
    for request in (CompletionRequest(prompt="x"), CompletionRequest(prompt="x", max_tokens=None)):
        assert to_sampling_params(request, SamplingDefaults(), limits, 3).max_tokens == 5


def test_echo_alone_computes_one_token() -> None:
    """max_tokens 0 is for echo only."""
    request = CompletionRequest(prompt="x", echo=True, max_tokens=0, logprobs=1)
    params = to_sampling_params(request, SamplingDefaults(), LIMITS, 10)
    assert (params.max_tokens, request.echo_only) == (1, True)
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)
    assert "max_tokens must be at least 1, got 0." in refusal(max_tokens=0).message
    with pytest.raises(InvalidRequest, match="max_tokens must be at least 1, got 0"):
        chat(max_tokens=0)


def test_log_probabilities() -> None:
    """Completions give a number, chat a flag and a number; -1 means the whole vocabulary."""
    assert completion(logprobs=3).logprobs == 3
    assert completion(logprobs=3).prompt_logprobs is None
    assert completion(logprobs=3, echo=True, prompt_logprobs=5).prompt_logprobs == 5
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=None).logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).logprobs == 4
    assert chat(logprobs=True, echo=True, top_logprobs=4).prompt_logprobs is None
    assert chat(top_logprobs=0).logprobs is None
    assert refusal(logprobs=-1).message == (
        "Requested sample logprobs of 1000, which is greater than max allowed: 20"
        " (parameter=logprobs, value=-1)"
    )
    assert refusal(prompt_logprobs=-1).param == "prompt_logprobs"
    with pytest.raises(InvalidRequest, match="parameter=top_logprobs, value=21"):
        chat(logprobs=True, top_logprobs=21)
    assert chat(logprobs=True, top_logprobs=20).logprobs == 20


def test_the_rest_arrives() -> None:
    """Fields that only change form."""
    params = completion(
        logit_bias={"5": 200, "7": -3.5, "9": -101},
        stop_token_ids=[4, 3, 4],
        allowed_token_ids=[1, 2, 1],
        ignore_eos=True,
        min_tokens=2,
        seed=11,
        top_k=10**30,
    )
    assert params.logit_bias == ((5, 100.0), (7, -3.5), (9, -100.0))
    assert (params.stop_token_ids, params.allowed_token_ids) == ((4, 3), (1, 2))
    assert (params.ignore_eos, params.min_tokens, params.seed, params.top_k) == (True, 2, 11, 0)
    assert completion(seed=-1).seed is None
    assert completion(stop_token_ids=None, n=None).stop_token_ids == ()


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_numbers_that_are_none(field: str, value: float) -> None:
    """NaN passes no comparison, and no bound is open."""
    assert refusal(**{field: value}).message.startswith(f"{field} must be")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 5}, "n must be at most 4, got 5. (parameter=n, value=5)"),
        ({"n": -1}, "n must be at least 1, got -1."),
        ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1."),
        ({"stop": ""}, "stop cannot contain an empty string."),
        ({"bad_words": ["a", ""]}, "bad_words cannot contain an empty string."),
        (
            {"stop": "é" * 513},
            "stop cannot contain a string of more than 1024 bytes. (parameter=stop)",
        ),
        (
            {"max_tokens": 101},
            "max_tokens=101 cannot be greater than max_model_len=100. Please request fewer output"
            " tokens. (parameter=max_tokens, value=101)",
        ),
        (
            {"logit_bias": {"-1": 1}},
            "token_id(s) [-1] in logit_bias contain out-of-vocab token ids. Vocabulary size: 1000"
            " (parameter=logit_bias, value=[-1])",
        ),
        (
            {"stop_token_ids": [1, -1, 1000]},
            "token_id(s) [-1, 1000] in stop_token_ids contain out-of-vocab token ids. Vocabulary"
            " size: 1000 (parameter=stop_token_ids, value=[-1, 1000])",
        ),
        (
            {"allowed_token_ids": [5, -5]},
            "allowed_token_ids contains out-of-vocab token id!"
            " (parameter=allowed_token_ids, value=[5, -5])",
        ),
        (
            {"logit_bias": {"5": math.nan}},
            "logit_bias must be finite numbers. (parameter=logit_bias, value=nan)",
        ),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    """The message says the field, the limit and the value."""
    assert refusal(**fields).message == message


def test_order_of_checks() -> None:
    """Of several faults the client hears the one that vLLM names."""
    assert refusal(max_tokens=101, temperature=-1).param == "max_tokens"
    assert refusal(logit_bias={"x": 1}, n=0).param == "logit_bias"
    assert refusal(n=0, temperature=-1).message.startswith("n must be")
    assert refusal(n=2, temperature=0, stop="").message.startswith("stop")
    assert refusal(logprobs=25, logit_bias={"5000": 1}).param == "logprobs"


def test_a_full_slot() -> None:
    """A prompt that fills the slot leaves no room; a longer one is told so."""
    with pytest.raises(InvalidRequest, match="max_tokens must be at least 1, got 0"):
        completion(prompt_len=100)
    with pytest.raises(ContextLengthExceeded) as caught:
        chat(prompt_len=101)
    assert caught.value.param == "input_tokens"
    assert "your prompt contains 101 input tokens" in caught.value.message


@pytest.mark.parametrize(
    "values",
    [{"temperature": 3.0}, {"top_p": 0.0}, {"top_k": -5}, {"max_tokens": 0}, {"max_tokens_cap": 0}],
)
def test_impossible_defaults_stop_the_start(values: dict[str, Any]) -> None:
    """Otherwise every request that leaves the field out would be refused."""
    with pytest.raises(ConfigError, match=next(iter(values)).removesuffix("_cap")):
        SamplingDefaults(**values)


numbers = st.none() | st.floats() | st.integers(-5, 5)
integers = st.none() | st.integers(-3, 200) | st.integers()


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": numbers,
            "top_p": numbers,
            "min_p": numbers,
            "repetition_penalty": numbers,
            "presence_penalty": numbers,
            "frequency_penalty": numbers,
            "top_k": integers,
            "n": integers,
            "max_tokens": integers,
            "min_tokens": st.integers(-2, 120),
            "logit_bias": st.dictionaries(st.text(max_size=4) | st.just("5"), st.floats()),
            "stop_token_ids": st.lists(st.integers(-1, 1001)),
            "allowed_token_ids": st.lists(st.integers(-1, 1001)),
        },
    ),
    st.integers(1, 110),
)
def test_parameters_or_a_refusal(fields: dict[str, Any], prompt_len: int) -> None:
    """Whatever the numbers: valid parameters that fit the slot, or a RequestError."""
    try:
        params = completion(MODEL, prompt_len, **fields)
    except (InvalidRequest, ContextLengthExceeded) as error:
        assert len(error.message) < 1000
        return
    assert params.max_tokens is not None
    assert 1 <= params.max_tokens <= 100 - prompt_len
    assert params.temperature == 0 or 0.01 <= params.temperature <= 2
    assert all(0 <= token_id < 1000 for token_id, _ in params.logit_bias)
