"""/tokenize and /detokenize: text to token ids and back, as prompts of the model would have it."""

from __future__ import annotations

from ellm_serve.errors import InvalidRequest
from ellm_serve.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeCompletionRequest,
    TokenizeRequest,
    TokenizeResponse,
)
from ellm_serve.serve.backend import Backend
from ellm_serve.serve.context import RequestContext
from ellm_serve.serve.conversation import Conversation
from ellm_serve.serve.prompts import offload

# Serve's proxy breaks answers of more than some ten megabytes.
MAX_LISTED = 1_000_000


async def tokenize(
    backend: Backend, request: TokenizeRequest, context: RequestContext
) -> TokenizeResponse:
    """The ids of a raw prompt or of a conversation, whether or not they fit in a slot.

    Raises:
        RequestError: it is refused.
    """
    backend.check_model(request.model)
    if isinstance(request, TokenizeCompletionRequest):
        tokens = await backend.prompts.tokens(request.prompt)
    else:
        prompt = await backend.prompts.render(Conversation.of(request, backend.config))
        tokens = list(prompt.token_ids)
    context.log["prompt_tokens"] = len(tokens)
    if len(tokens) > MAX_LISTED:
        raise InvalidRequest(
            f"The text has {len(tokens)} tokens, and at most {MAX_LISTED} are listed.", "prompt"
        )
    names = map(backend.tokenizer.id_to_token, tokens)
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=backend.limits.max_model_len,
        tokens=tokens,
        token_strs=[name or "" for name in names] if request.return_token_strs else None,
    )


async def detokenize(
    backend: Backend, request: DetokenizeRequest, context: RequestContext
) -> DetokenizeResponse:
    """The text of some ids, control tokens as they are spelt.

    Raises:
        RequestError: it is refused.
    """
    backend.check_model(request.model)
    tokenizer = backend.tokenizer
    context.log["output_tokens"] = len(request.tokens)
    known = [token for token in request.tokens if token < tokenizer.vocab_size]
    text = await offload(len(known), lambda: tokenizer.decode(known, skip_special=False))
    return DetokenizeResponse(prompt=text)
