"""From a request's sampling fields to `SamplingParams`, with vLLM's checks, order and words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ellm_serve.errors import ConfigError, InvalidRequest, shortened
from ellm_serve.protocol.common import SamplingFields
from ellm_serve.protocol.fields import named
from ellm_serve.protocol.limits import MAX_WORD_BYTES, RequestLimits, check_prompt_length
from ellm_serve.request import SamplingParams

MIN_SAMPLED_TEMPERATURE = 0.01
MAX_TEMPERATURE = 2.0
MAX_BIAS = 100.0

_NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The server's values for fields that a request leaves out; None: vLLM's neutral value.

    `max_tokens` replaces the rest of the slot where a request gives no bound; `max_tokens_cap`
    bounds every request.

    Raises:
        ConfigError: a value that no request could have.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    max_tokens_cap: int | None = None

    def __post_init__(self) -> None:
        for bound in (self.max_tokens, self.max_tokens_cap):
            if bound is not None and bound < 1:
                raise ConfigError(f"default max_tokens must be at least 1, got {bound}")
        try:
            _check_numbers(self.values())
        except InvalidRequest as error:
            raise ConfigError(f"sampling defaults: {error.message}") from error

    def values(self) -> dict[str, float]:
        """The numeric fields by name, neutral where nothing else is given."""
        return _chosen(self, _NEUTRAL)


def to_sampling_params(
    request: SamplingFields,
    defaults: SamplingDefaults,
    limits: RequestLimits,
    prompt_len: int,
) -> SamplingParams:
    """What the engine needs to know of a request, for a prompt of `prompt_len` tokens.

    Strings are checked here and handled above: stop strings by whoever reads the text, bad words by
    whoever has a tokenizer.

    Raises:
        ContextLengthExceeded: the prompt does not fit.
        InvalidRequest: a value is not allowed.
    """
    check_prompt_length(prompt_len, limits)
    max_tokens = _max_tokens(request, defaults, limits, prompt_len)
    biases = _biases(request.logit_bias)
    numbers = _chosen(request, defaults.values())
    _check_choices(request.num_choices, limits)
    _check_numbers(numbers)
    _check_lengths(max_tokens, request.min_tokens)
    _check_words("stop", request.stop_strings)
    _check_words("bad_words", request.bad_words or [])
    _settle_temperature(numbers)
    if numbers["temperature"] == 0 and request.num_choices > 1:
        raise InvalidRequest(f"n must be 1 when using greedy sampling, got {request.num_choices}.")
    name, wanted = request.requested_logprobs()
    logprobs = _logprobs("sample", name, wanted, limits)
    prompt_wanted = request.requested_prompt_logprobs()
    prompt_logprobs = _logprobs("prompt", "prompt_logprobs", prompt_wanted, limits)
    _check_ids("logit_bias", biases, limits)
    _check_ids("stop_token_ids", request.stop_token_ids or (), limits)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=numbers["temperature"],
        # More than the vocabulary is the same as off, and fits every integer.
        top_k=0 if numbers["top_k"] >= limits.vocab_size else int(numbers["top_k"]),
        top_p=numbers["top_p"],
        min_p=numbers["min_p"],
        repetition_penalty=numbers["repetition_penalty"],
        presence_penalty=numbers["presence_penalty"],
        frequency_penalty=numbers["frequency_penalty"],
        logit_bias=tuple(biases.items()),
        stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
        ignore_eos=request.ignore_eos,
        seed=None if request.seed == -1 else request.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        allowed_token_ids=_allowed_ids(request.allowed_token_ids, limits),
    )


def _chosen(given: object, fallback: Mapping[str, float]) -> dict[str, float]:
    """The numeric fields of `given`, those that are None taken from `fallback`."""
    values = {name: getattr(given, name) for name in _NEUTRAL}
    return {name: fallback[name] if value is None else value for name, value in values.items()}


def _max_tokens(
    request: SamplingFields, defaults: SamplingDefaults, limits: RequestLimits, prompt_len: int
) -> int:
    """The bound of the output: what was asked for, but no more than the room that is left."""
    name, wanted = request.requested_max_tokens()
    if wanted is not None and wanted > limits.max_model_len:
        raise InvalidRequest(
            f"{name}={wanted} cannot be greater than max_model_len={limits.max_model_len}. Please"
            " request fewer output tokens.",
            name,
            wanted,
        )
    bounds = [limits.max_model_len - prompt_len, defaults.max_tokens_cap]
    bounds.append(request.default_max_tokens or defaults.max_tokens if wanted is None else wanted)
    return min(bound for bound in bounds if bound is not None)


def _biases(given: Mapping[str, float] | None) -> dict[int, float]:
    """Token id -> bias within [-100, 100]; JSON has the ids as strings."""
    biases, wrong = {}, []
    for key, bias in (given or {}).items():
        try:
            token_id = int(key)
        except ValueError:
            wrong.append(key)
            continue
        if not math.isfinite(bias):
            raise InvalidRequest("logit_bias must be finite numbers.", "logit_bias", bias)
        biases[token_id] = min(max(bias, -MAX_BIAS), MAX_BIAS)
    if wrong:
        raise InvalidRequest(
            "logit_bias contains key(s) that cannot be converted to integer token IDs:"
            f" {shortened(wrong)}",
            "logit_bias",
            wrong,
        )
    return biases


def _check_choices(n: int, limits: RequestLimits) -> None:
    if n < 1:
        raise InvalidRequest(f"n must be at least 1, got {n}.")
    if n > limits.max_n:
        raise InvalidRequest(f"n must be at most {limits.max_n}, got {n}.", "n", n)


def _check_numbers(numbers: Mapping[str, float]) -> None:
    """Written so that NaN never passes."""
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2.0 <= numbers[name] <= 2.0:
            raise InvalidRequest(f"{name} must be in [-2, 2], got {numbers[name]}.")
    penalty = numbers["repetition_penalty"]
    if not penalty > 0.0:
        raise InvalidRequest(f"repetition_penalty must be greater than zero, got {penalty}.")
    _check_temperature(numbers["temperature"])
    top_p, top_k, min_p = numbers["top_p"], numbers["top_k"], numbers["min_p"]
    if not 0.0 < top_p <= 1.0:
        raise InvalidRequest(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    if top_k < -1:
        raise InvalidRequest(f"top_k must be 0 (disable), or at least 1, got {top_k}.")
    if not 0.0 <= min_p <= 1.0:
        raise InvalidRequest(f"min_p must be in [0, 1], got {min_p}.")


def _check_temperature(value: float) -> None:
    if math.isnan(value):
        reason = "must be a number"
    elif value < 0.0:
        reason = "must be non-negative"
    elif value > MAX_TEMPERATURE:
        reason = "must be in [0, 2]"
    else:
        return
    raise InvalidRequest(f"temperature {reason}, got {value}.", "temperature", value)


def _settle_temperature(numbers: dict[str, float]) -> None:
    """Greedy switches the filters off; a temperature too small to divide by is raised."""
    if numbers["temperature"] == 0:
        numbers.update(top_p=1.0, top_k=0, min_p=0.0)
    else:
        numbers["temperature"] = max(numbers["temperature"], MIN_SAMPLED_TEMPERATURE)


def _check_lengths(max_tokens: int, min_tokens: int) -> None:
    if max_tokens < 1:
        raise InvalidRequest(
            f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens
        )
    if min_tokens < 0:
        raise InvalidRequest(f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
        )


def _check_words(name: str, words: Iterable[str]) -> None:
    for word in words:
        if not word:
            raise InvalidRequest(f"{name} cannot contain an empty string.")
        if len(word.encode()) > MAX_WORD_BYTES:
            raise named(
                f"{name} cannot contain a string of more than {MAX_WORD_BYTES} bytes.", name
            )


def _logprobs(kind: str, name: str, wanted: int | None, limits: RequestLimits) -> int | None:
    """How many alternatives; -1 asks for the whole vocabulary."""
    if wanted is None:
        return None
    number = limits.vocab_size if wanted == -1 else wanted
    if number > limits.max_logprobs:
        raise InvalidRequest(
            f"Requested {kind} logprobs of {number}, which is greater than max allowed:"
            f" {limits.max_logprobs}",
            name,
            wanted,
        )
    return number


def _check_ids(name: str, token_ids: Iterable[int], limits: RequestLimits) -> None:
    wrong = [token_id for token_id in token_ids if not 0 <= token_id < limits.vocab_size]
    if wrong:
        raise InvalidRequest(
            f"token_id(s) {shortened(wrong)} in {name} contain out-of-vocab token ids."
            f" Vocabulary size: {limits.vocab_size}",
            name,
            wrong,
        )


def _allowed_ids(given: list[int] | None, limits: RequestLimits) -> tuple[int, ...] | None:
    if given is None:
        return None
    if not given:
        raise InvalidRequest("allowed_token_ids is not None and empty!", "allowed_token_ids", given)
    if min(given) < 0 or max(given) >= limits.vocab_size:
        raise InvalidRequest(
            "allowed_token_ids contains out-of-vocab token id!", "allowed_token_ids", given
        )
    return tuple(dict.fromkeys(given))
