"""How large a request may be, and the checks of a prompt against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ellm_serve.errors import ContextLengthExceeded, InvalidRequest

# Limits of the wire format. They bound what one small body can cost before anything is computed.
MAX_PROMPTS = 1024
MAX_STOP_STRINGS = 4
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 1024
MAX_WORD_BYTES = 1024
MAX_ID_CHARS = 256
MAX_SALT_CHARS = 128


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits that depend on the model and on the server's configuration.

    `max_model_len` is in tokens, `max_chars_per_token` the length of the vocabulary's longest
    token: a longer text than their product cannot fit and is refused before it is tokenised.
    """

    max_model_len: int
    vocab_size: int
    max_n: int
    max_chars_per_token: int
    max_logprobs: int = 20


def check_prompt_text(text: str, limits: RequestLimits) -> None:
    """Refuses a text that is too long however it is tokenised.

    Raises:
        InvalidRequest: in the words of the context length's refusal.
    """
    most = limits.max_model_len * limits.max_chars_per_token
    if len(text) > most:
        raise InvalidRequest(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your"
            f" prompt contains {len(text)} characters (more than {most} characters, which is the"
            f" upper bound for {limits.max_model_len} input tokens). Please reduce the length of"
            " the input prompt.",
            "input_text",
            len(text),
        )


def check_prompt_length(num_tokens: int, limits: RequestLimits, *, at_least: bool = False) -> None:
    """Refuses a prompt that does not fit in a slot; `at_least`: counting has stopped there.

    Raises:
        ContextLengthExceeded: the prompt is longer than a slot.
    """
    if num_tokens > limits.max_model_len:
        raise ContextLengthExceeded(num_tokens, limits.max_model_len, at_least=at_least)


def check_prompt_ids(token_ids: Sequence[int], limits: RequestLimits) -> None:
    """Refuses ids that the vocabulary does not have; nothing below looks at them again.

    Raises:
        InvalidRequest: names the largest id.
    """
    largest = max(token_ids, default=0)
    if largest >= limits.vocab_size:
        raise InvalidRequest(f"Token id {largest} is out of vocabulary")


def truncated_length(truncate_prompt_tokens: int | None, limits: RequestLimits) -> int | None:
    """How many tokens of the prompt are kept; None: all of them. -1 leaves room for one token.

    Raises:
        InvalidRequest: more than a slot holds.
    """
    if truncate_prompt_tokens == -1:
        return limits.max_model_len - 1
    if truncate_prompt_tokens is not None and truncate_prompt_tokens > limits.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens value ({truncate_prompt_tokens}) is greater than max_model_len"
            f" ({limits.max_model_len}). Please request a smaller truncation size.",
            "truncate_prompt_tokens",
        )
    return truncate_prompt_tokens
