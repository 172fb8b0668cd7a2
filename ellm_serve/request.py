"""The plain values that travel between the layers, and later between processes.

Frozen, slotted, built-in types only: no arrays, no pydantic, no locks. The engine sees token ids
and never text; stop *strings* are therefore not here but in `text.stop`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ellm_serve.errors import InvalidRequest


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; names and neutral values are vLLM's.

    `max_tokens=None` means up to the end of the slot. `top_k` 0 or -1 means off. `seed=None` draws
    one. `logprobs` / `prompt_logprobs` give the number of alternatives per position (0: only the
    token itself), None switches them off. `stop_token_ids` end a sequence and are not part of the
    output text; the model's own end ids do the same unless `ignore_eos`. With `allowed_token_ids`
    nothing else can be chosen; the output never completes one of the token sequences `bad_words`.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        self._number("temperature", 0.0, 100.0)
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.0, 100.0, open_low=True)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._count("top_k", -1, _MANY)
        self._count("min_tokens", 0, _MANY)
        self._count("max_tokens", 0, _MANY, optional=True)
        self._count("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._count("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        self._count("seed", -(1 << 63), (1 << 64) - 1, optional=True)
        object.__setattr__(self, "stop_token_ids", _ids(self.stop_token_ids, "stop_token_ids"))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "allowed_token_ids", _allowed(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", _words(self.bad_words))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                "min_tokens",
            )

    def _number(self, name: str, low: float, high: float, open_low: bool = False) -> None:
        """A finite float in the range; a whole number becomes one, so that kernels see one type."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f"{name} must be a number, got {value!r}", name)
        # Written so that NaN fails too.
        if not (low < value <= high if open_low else low <= value <= high):
            bracket = "(" if open_low else "["
            raise InvalidRequest(
                f"{name} must be in {bracket}{low:g}, {high:g}], got {value}", name
            )
        object.__setattr__(self, name, float(value))

    def _count(self, name: str, low: int, high: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not _is_int(value):
            raise InvalidRequest(f"{name} must be a whole number, got {value!r}", name)
        if not low <= value <= high:
            raise InvalidRequest(f"{name} must be in [{low}, {high}], got {value}", name)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken. vLLM treats tiny temperatures as 0 as well."""
        return self.temperature < MIN_TEMPERATURE


# A result of 20 alternatives per token is already 40 times the size of the token itself.
MAX_LOGPROBS = 20
MIN_TEMPERATURE = 1e-5
MAX_BIAS = 1e6
# Each is looked at before every token, between two steps that others wait for.
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 8192
_MANY = 1 << 31


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids(value: object, param: str) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or not all(map(_is_int, value)):
        raise InvalidRequest(f"{param} must be a list of token ids", param)
    return tuple(value)


def _allowed(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = _ids(value, "allowed_token_ids")
    if not ids:
        raise InvalidRequest("allowed_token_ids is not None and empty!", "allowed_token_ids")
    return tuple(sorted(set(ids)))


def _words(value: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, Sequence):
        raise InvalidRequest("bad_words must be a list of lists of token ids", "bad_words")
    words = tuple(_ids(word, "bad_words") for word in value)
    if () in words:
        raise InvalidRequest("bad_words must not contain an empty word", "bad_words")
    if len(words) > MAX_BAD_WORDS or sum(map(len, words)) > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(
            f"bad_words takes at most {MAX_BAD_WORDS} words of {MAX_BAD_WORD_TOKENS} tokens"
            " together",
            "bad_words",
        )
    return words


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias; also given as a mapping."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, Sequence):
        raise InvalidRequest("logit_bias must map token ids to numbers", "logit_bias")
    checked = []
    for pair in pairs:
        if not (isinstance(pair, Sequence) and len(pair) == 2 and _is_int(pair[0])):
            raise InvalidRequest("logit_bias must map token ids to numbers", "logit_bias")
        token_id, bias = pair
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not number or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequest(
                f"logit_bias must be a number in [{-MAX_BIAS:g}, {MAX_BIAS:g}], got {bias!r}",
                "logit_bias",
            )
        checked.append((token_id, float(bias)))
    return tuple(checked)


class GrammarKind(StrEnum):
    """What the text of a grammar is."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"  # any JSON object; there is no text
    REGEX = "regex"  # matches the whole answer
    CHOICE = "choice"  # a JSON list of the possible answers
    GRAMMAR = "grammar"  # of a client: llguidance's Lark, or GBNF
    LARK = "lark"  # of our own making


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an answer; `grammar.compiler` makes it something the engine can follow.

    `whitespace` is the regex of what may stand between two tokens of JSON, "" for nothing.
    `lenient` ignores keywords of a schema that cannot be enforced, instead of refusing them.
    `field` is the request's field that errors name. Equal grammars are compiled once.
    """

    kind: GrammarKind
    text: str = ""
    whitespace: str | None = None
    lenient: bool = False
    field: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate: a prompt of token ids and how to continue it.

    `session_key` names the conversation whose KV may be reused and kept; None means no session of
    its own (the longest matching prefix of the same owner is still used). A `principal` is whom
    fairness and the queue's bounds count; requests of one principal with different `cache_salt`
    share no KV. A lower `priority` runs earlier, among the requests of one principal. A grammar, if
    the request is submitted with one, holds from behind the token `grammar_after` on.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    session_key: str | None = None
    principal: str = ""
    priority: int = 0
    cache_salt: str = ""
    grammar_after: int | None = None

    @property
    def cache_owner(self) -> str:
        """Within which requests computed prefixes are shared."""
        return f"{self.principal}\0{self.cache_salt}" if self.cache_salt else self.principal


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token, its value and rank, and the alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one step added to a sequence.

    `token_ids` never contains the end id that stopped the sequence: `stop_token_id` names it, and
    its log-probabilities, if wanted, are the last entry of `logprobs`. `prompt_logprobs` comes
    once, with the first delta; its first entry is None. `time` is the engine's clock (seconds,
    `time.monotonic()`) when the token was sampled, or when a sequence ended without one; `started`
    when the request left the queue, None if it never did.
    """

    request_id: str
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    error: str | None = None
    time: float = 0.0
    started: float | None = None
