"""Bodies that are broken, hostile or huge: always a short 400 that names the place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_serve.errors import InvalidBody, InvalidRequest, RequestError, UnsupportedMediaType
from ellm_serve.protocol.errors import error_body
from ellm_serve.protocol.limits import (
    RequestLimits,
    check_prompt_ids,
    check_prompt_length,
    check_prompt_text,
    truncated_length,
)
from ellm_serve.protocol.sampling import SamplingDefaults, to_sampling_params
from ellm_serve.protocol.validation import (
    CHAT,
    COMPLETION,
    TOKENIZE,
    check_content_type,
    parse_json,
    parse_request,
)

LIMITS = RequestLimits(max_model_len=100, vocab_size=1000, max_n=8, max_chars_per_token=10)
USER = [{"role": "user", "content": "x"}]


def refusal(body: dict[str, Any] | bytes, adapter: Any = COMPLETION) -> RequestError:
    """Why a body is refused; the answer to it must have a UTF-8 form."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(RequestError) as caught:
        request = parse_request(adapter, raw)
        to_sampling_params(request, SamplingDefaults(), LIMITS, 1)
    envelope = json.dumps(error_body(caught.value), ensure_ascii=False).encode()
    assert len(envelope) < 12_000
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    "value",
    ["application/json", "Application/JSON", "application/json; charset=utf-8"],
)
def test_json_types(value: str) -> None:
    """Parameters and case do not matter."""
    check_content_type(value)


@pytest.mark.parametrize("value", [None, "", "text/plain", "application/jsonl", "multipart/x"])
def test_other_types(value: str | None) -> None:
    """Nothing else is read as JSON."""
    with pytest.raises(UnsupportedMediaType):
        check_content_type(value)


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        (b"", "body", "Field required"),
        (b"{", "body.1", "Expecting property name"),
        (b'{"a": 1}x', "body.8", "Extra data"),
        (b"\xff\xfe{", "body.", "JSON decode error"),
        (b'{"prompt": "\xc3"}', "body.12", "not valid UTF-8"),
        (b"[" * 200_000, "body.0", "nested too deeply"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "body.0", "too many digits"),
        (b"null", "body", "Input should be a valid dictionary"),
        (b"5", "body", "Input should be a valid dictionary"),
    ],
)
def test_no_json(body: bytes, param: str, reason: str) -> None:
    """The position where reading stopped, and why."""
    error = refusal(body)
    assert isinstance(error, InvalidBody)
    assert (error.param or "").startswith(param)
    assert reason in error.message


def test_half_characters_are_mended() -> None:
    """Clients that cut text at UTF-16 units would otherwise be refused with every later turn."""
    cut = b'{"prompt": "a\\ud83d", "\\udc00": ["\\uD83D\\uDE42", "\\\\ud83d"]}'
    assert parse_json(cut) == {"prompt": "a\ufffd", "\ufffd": ["🙂", "\\ud83d"]}
    whole = b'{"a": "\\ud83d\\ude42"}'
    assert parse_json(whole) == {"a": "🙂"}


def test_names_of_classes_stay_inside() -> None:
    """A wrong type for a nested object is told in the wire's words."""
    for body in (
        {"prompt": "x", "stream": True, "stream_options": "yes"},
        {"prompt": "x", "response_format": 5},
    ):
        message = refusal(body).message
        for name in ("StreamOptions", "ResponseFormat", "StructuralTag", "constrained", "Request"):
            assert name not in message
    message = refusal({"messages": [5]}, CHAT).message
    assert "MessageParam" not in message
    assert "'loc': 'body.messages.0'" in message
    assert "Tokenize" not in refusal({}, TOKENIZE).message


def test_ten_errors_at_most() -> None:
    """And the number of the others."""
    numbers = ("temperature", "top_p", "top_k", "min_p", "n", "seed", "max_tokens", "min_tokens")
    flags = ("echo", "ignore_eos", "stream", "add_special_tokens")
    body = {"prompt": "x"} | dict.fromkeys(numbers + flags, "a")
    error = refusal(body)
    lines = error.message.split("\n  ")
    assert lines[0] == "12 validation errors:"
    assert len(lines) == 12
    assert lines[-1] == "...and 2 more errors"
    assert error.param == "body.temperature"


# --- small bodies with a large price -------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "n": 1_000_000}, "n"),
        ({"prompt": "x", "n": 10**40}, "n"),
        ({"prompt": "x", "logprobs": 10**6}, "logprobs"),
        ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "x", "max_tokens": 10**40}, "max_tokens"),
        ({"prompt": "x", "stop": ["s"] * 100_000}, "body.stop"),
        ({"prompt": "x", "stop": "s" * 1_000_000}, "stop"),
        ({"prompt": "x", "bad_words": ["s"] * 100_000}, "body.bad_words"),
        ({"prompt": "x", "logit_bias": {str(i): 1 for i in range(1_000_000)}}, "logit_bias"),
        ({"prompt": "x", "stop_token_ids": [5000] * 100_000}, "stop_token_ids"),
        ({"prompt": "x", "allowed_token_ids": [5000] * 100_000}, "allowed_token_ids"),
        ({"prompt": ["x"] * 100_000}, "prompt"),
        ({"prompt": [[1]] * 100_000}, "prompt"),
        ({"prompt": [-1] * 100_000}, "body.prompt.0"),
        ({"prompt": [1, *["x"] * 100_000]}, "body.prompt.1"),
        ({"prompt": "x", "logit_bias": {"k" * 100_000: "v"}}, "body.logit_bias.kkk"),
        ({"prompt": "x", "logit_bias": {"k" * 100_000: 1}}, "logit_bias"),
        ({"prompt": "x", "cache_salt": "s" * 1_000_000}, "cache_salt"),
    ],
)
def test_multipliers_of_completions(body: dict[str, Any], param: str) -> None:
    """Refused by name, with a message that stays small."""
    assert (refusal(body).param or "").startswith(param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": USER, "logprobs": True, "top_logprobs": 100_000}, "top_logprobs"),
        ({"messages": [5] * 100_000}, "body.messages.0"),
        ({"messages": USER, "tools": [{"type": "web"}] * 100_000}, "body.tools.0"),
        ({"messages": [{"role": "user", "content": [5] * 100_000}]}, "body.messages.0.content"),
        ({"messages": USER, "max_completion_tokens": 10**9}, "max_completion_tokens"),
    ],
)
def test_multipliers_of_chats(body: dict[str, Any], param: str) -> None:
    """The same for conversations; a long list of wrong items is one error."""
    error = refusal(body, CHAT)
    assert (error.param or "").startswith(param)
    assert error.message.count("{'type'") <= 4


def test_lengths_of_prompts() -> None:
    """By characters before tokens are known, by tokens after, and ids by the vocabulary."""
    check_prompt_text("x" * 1000, LIMITS)
    with pytest.raises(InvalidRequest) as caught:
        check_prompt_text("x" * 1001, LIMITS)
    assert caught.value.param == "input_text"
    assert caught.value.message == (
        "This model's maximum context length is 100 tokens. However, your prompt contains 1001"
        " characters (more than 1000 characters, which is the upper bound for 100 input tokens)."
        " Please reduce the length of the input prompt. (parameter=input_text, value=1001)"
    )
    check_prompt_length(100, LIMITS)
    with pytest.raises(RequestError, match="contains at least 101 input tokens"):
        check_prompt_length(101, LIMITS, at_least=True)
    check_prompt_ids([0, 999], LIMITS)
    with pytest.raises(InvalidRequest, match="^Token id 1000 is out of vocabulary$"):
        check_prompt_ids([5, 1000], LIMITS)


def test_truncation() -> None:
    """-1 keeps what fits beside one token of output."""
    assert truncated_length(None, LIMITS) is None
    assert truncated_length(-1, LIMITS) == 99
    assert truncated_length(0, LIMITS) == 0
    assert truncated_length(100, LIMITS) == 100
    with pytest.raises(InvalidRequest) as caught:
        truncated_length(101, LIMITS)
    assert caught.value.param == "truncate_prompt_tokens"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
COMPLETION_FIELDS = sorted(COMPLETION.json_schema()["properties"])
CHAT_FIELDS = sorted(CHAT.json_schema()["properties"])


@given(st.dictionaries(st.sampled_from(COMPLETION_FIELDS), json_values, max_size=4))
def test_any_completion(fields: dict[str, Any]) -> None:
    """Any JSON in any field: accepted, or refused with a 400 that can be sent."""
    _accepted_or_refused(COMPLETION, {"prompt": "x"} | fields)


@given(st.dictionaries(st.sampled_from(CHAT_FIELDS), json_values, max_size=4))
def test_any_chat(fields: dict[str, Any]) -> None:
    """The same for conversations, the template's variables included."""
    _accepted_or_refused(CHAT, {"messages": USER} | fields)


def _accepted_or_refused(adapter: Any, body: dict[str, Any]) -> None:
    try:
        request = parse_request(adapter, json.dumps(body).encode())
        to_sampling_params(request, SamplingDefaults(), LIMITS, 1)
    except RequestError as error:
        assert error.status == 400
        json.dumps(error_body(error), ensure_ascii=False).encode()
