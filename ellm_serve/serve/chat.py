"""/v1/chat/completions: conversations in, the next message out, whole or piece by piece."""

from __future__ import annotations

from ellm_serve.protocol.chat import (
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatMessage,
    FunctionCall,
    ToolCall,
)
from ellm_serve.serve.backend import Backend
from ellm_serve.serve.chat_chunks import ChatChunkWriter
from ellm_serve.serve.chat_events import ChatAnswer
from ellm_serve.serve.chat_start import start_chat
from ellm_serve.serve.chat_view import ChatView
from ellm_serve.serve.context import RequestContext
from ellm_serve.serve.sse import EventStream


async def chat(
    backend: Backend, request: ChatCompletionRequest, context: RequestContext
) -> ChatCompletionResponse | EventStream:
    """The whole answer, or its events if the request wants a stream.

    Raises:
        RequestError: it is refused; nothing was generated.
        EngineError: the engine failed, and the answer was wanted whole.
    """
    run = await start_chat(backend, request, context)
    view = ChatView(backend, run)
    if request.stream:
        return EventStream(run, ChatChunkWriter(view, context.token_times))
    return _response(view, await run.collect())


def _response(view: ChatView, answers: list[ChatAnswer]) -> ChatCompletionResponse:
    """The whole answer."""
    return ChatCompletionResponse(
        id=view.run.id,
        created=view.created,
        model=view.backend.model_name,
        choices=[_choice(view, answer) for answer in answers],
        system_fingerprint=view.backend.fingerprint,
        usage=view.usage.info(),
        prompt_logprobs=view.prompt_logprobs(),
        prompt_token_ids=view.prompt_ids,
        prompt_text=view.prompt_text,
        metrics=view.usage.metrics(),
    )


def _choice(view: ChatView, answer: ChatAnswer) -> ChatChoice:
    logprobs = view.logprobs(answer.logprobs)
    return ChatChoice(
        index=answer.index,
        message=_message(view, answer),
        logprobs=None if logprobs is None else ChatLogprobs.model_validate(logprobs),
        finish_reason=answer.finish.reason,
        stop_reason=answer.finish.stop_reason,
        token_ids=answer.token_ids if view.wants_ids else None,
    )


def _message(view: ChatView, answer: ChatAnswer) -> ChatMessage:
    output = answer.output
    calls = [
        ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
        for call in output.tool_calls
    ]
    return ChatMessage(
        role=view.role,
        content=_content(view, answer),
        tool_calls=calls or None,
        reasoning=output.reasoning,
        reasoning_content=output.reasoning if view.aliases_reasoning else None,
    )


def _content(view: ChatView, answer: ChatAnswer) -> str | None:
    """Null where a call or a thought stands in for it, unless a call was demanded: as in vLLM."""
    said = view.echo + (answer.output.content or "")
    if said or view.run.requires_tool:
        return said
    replaced = answer.output.tool_calls or view.run.answers[answer.index].num_reasoning_tokens
    return None if replaced else ""
