"""Every recorded request gets vLLM's decision: the same error, byte for byte, or none."""

from __future__ import annotations

import json

import pytest

from ellm_serve.errors import ModelNotFound, RequestError
from ellm_serve.protocol.chat import ChatCompletionRequest, ConversationFields
from ellm_serve.protocol.common import SamplingFields
from ellm_serve.protocol.completion import CompletionRequest
from ellm_serve.protocol.errors import error_body, error_status
from ellm_serve.protocol.limits import (
    RequestLimits,
    check_prompt_ids,
    check_prompt_length,
    check_prompt_text,
    truncated_length,
)
from ellm_serve.protocol.sampling import SamplingDefaults, to_sampling_params
from ellm_serve.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from ellm_serve.protocol.validation import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    TOKENIZE,
    check_content_type,
    parse_request,
)
from tests.protocol.recorded import MAX_MODEL_LEN, RECORDED, SERVED, VOCAB_SIZE, Recorded

LIMITS = RequestLimits(MAX_MODEL_LEN, VOCAB_SIZE, max_n=4, max_chars_per_token=32)
ADAPTERS = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}

# Refused later, by what compiles regular expressions.
LATER = frozenset({"err_so_badregex"})

Body = CompletionRequest | ChatCompletionRequest | TokenizeRequest | DetokenizeRequest


def decide(record: Recorded) -> None:
    """All that can be decided without a tokenizer, in the order in which a server does it."""
    check_content_type(record.content_type)
    request: Body = parse_request(ADAPTERS[record.path], record.request)  # type: ignore[arg-type]
    if request.model and request.model not in SERVED:
        raise ModelNotFound(request.model, SERVED)
    if isinstance(request, ConversationFields):
        request.refuse_untrusted_template()
        request.refuse_media(SERVED[0])
    if isinstance(request, SamplingFields):
        to_sampling_params(request, SamplingDefaults(), LIMITS, prompt_length(request))


def prompt_length(request: SamplingFields) -> int:
    """Checks the prompt; a text counts a token for every five characters, up to one too many."""
    if isinstance(request, CompletionRequest) and isinstance(ids := request.prompts[0], list):
        check_prompt_ids(ids, LIMITS)
        kept = truncated_length(request.truncate_prompt_tokens, LIMITS)
        return min(len(ids), len(ids) if kept is None else kept)
    text = str(request.model_dump(include={"prompt", "messages"}))
    check_prompt_text(text, LIMITS)
    num_tokens = min(len(text) // 5, MAX_MODEL_LEN + 1)
    check_prompt_length(num_tokens, LIMITS, at_least=True)
    return num_tokens


@pytest.mark.parametrize("record", RECORDED.values(), ids=lambda record: record.name)
def test_same_decision(record: Recorded) -> None:
    """Status, message, type, param and code, and the order of the keys."""
    if record.status == 200 or record.name in LATER:
        decide(record)
    else:
        with pytest.raises(RequestError) as caught:
            decide(record)
        body = json.dumps(error_body(caught.value), ensure_ascii=False, separators=(",", ":"))
        assert body == record.body
        assert error_status(caught.value) == record.status


def test_enough_is_recorded() -> None:
    """The replay above is not empty: most refusals of the recording are decided here."""
    assert sum(record.status in (400, 404) for record in RECORDED.values()) >= 55
    assert RECORDED.keys() >= LATER
