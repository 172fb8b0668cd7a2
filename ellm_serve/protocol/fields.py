"""What happens to request fields that this server does not act on: one table each.

A field of REFUSED is answered with 400 when it asks for something; its neutral values pass. A field
of IGNORED is accepted and changes nothing, as in vLLM or because its effect cannot show here. Any
field that no model declares is accepted and ignored as well, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ellm_serve.errors import InvalidRequest

# Field -> why. Refused unless the value is absent, null or false.
REFUSED: Mapping[str, str] = {
    "ec_transfer_params": "keys and values are not exchanged between servers",
    "kv_transfer_params": "keys and values are not exchanged between servers",
    "logprob_token_ids": "log-probabilities of chosen tokens are not reported",
    "media_io_kwargs": "only text is served",
    "mm_processor_kwargs": "only text is served",
    "prompt_embeds": "a prompt is text or token ids",
    "repetition_detection": "repetition is not detected",
    "return_weight_versions": "weights have no version here",
    "stream_interval": "every step is streamed",
    "thinking_token_budget": "thinking is not limited apart from the output",
    "use_beam_search": "tokens are sampled, beams are not searched",
    "watermarking": "output is not watermarked",
}

# Field -> why it has no effect.
IGNORED: Mapping[str, str] = {
    "best_of": "removed from vLLM",
    "guided_choice": "removed from vLLM; structured_outputs took its place",
    "guided_grammar": "removed from vLLM; structured_outputs took its place",
    "guided_json": "removed from vLLM; structured_outputs took its place",
    "guided_regex": "removed from vLLM; structured_outputs took its place",
    "length_penalty": "means something for beam search only",
    "metadata": "no effect in vLLM",
    "prompt_cache_key": "no effect in vLLM; session_id names a conversation",
    "service_tier": "no effect in vLLM",
    "spaces_between_special_tokens": "no effect on byte-level vocabularies",
    "store": "no effect in vLLM",
    "user": "no effect in vLLM",
    "vllm_xargs": "only its session_id is read",
}


def refuse_unsupported(declared: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for the first field of REFUSED that asks for something."""
    for name, reason in REFUSED.items():
        if declared.get(name) is not None and declared[name] is not False:
            raise unsupported(name, reason)


def unsupported(name: str, reason: str) -> InvalidRequest:
    """The refusal of a field that this server does not have."""
    return named(f"`{name}` is not supported: {reason}.", name)


def named(message: str, param: str) -> InvalidRequest:
    """A refusal in vLLM's form that names the parameter but not its value."""
    return InvalidRequest(f"{message} (parameter={param})", param)
