"""From a chat request to a run of the engine: everything that can refuse it happens here."""

from __future__ import annotations

from ellm_serve.protocol.chat import ChatCompletionRequest
from ellm_serve.serve.backend import Backend, Demand
from ellm_serve.serve.chat_events import ChatRun
from ellm_serve.serve.chat_form import ChatForm, check_tool_choice
from ellm_serve.serve.context import RequestContext
from ellm_serve.serve.conversation import Conversation
from ellm_serve.serve.naming import response_id
from ellm_serve.serve.usage import UsageReport
from ellm_serve.text.reasoning import starts_in_reasoning


async def start_chat(
    backend: Backend, request: ChatCompletionRequest, context: RequestContext
) -> ChatRun:
    """Renders the conversation and submits it.

    Raises:
        RequestError: it is refused; nothing was generated.
    """
    backend.check_model(request.model)
    parsers = backend.parsers
    check_tool_choice(request, parsers, backend.config)
    answer_id = response_id("chatcmpl", context.request_id, request.request_id)
    conversation = Conversation.of(request, backend.config)
    prompt = await backend.prompts.conversation(conversation, backend.truncation(request))
    starts = starts_in_reasoning(backend.prompts.text(prompt)) if parsers.reasoning else None
    form = ChatForm(request, parsers, starts)
    demand = await _demand(backend, form)
    generation = backend.start(answer_id, request, [prompt], context, form.text_rules(), demand)
    usage = UsageReport(
        generation, backend.config, counts_writes=True, counts_reasoning=parsers.reasoning
    )
    return ChatRun(
        answer_id,
        request,
        conversation,
        prompt,
        generation,
        usage,
        hides_tokens=form.hides_reasoning,
        has_reasoning=parsers.reasoning,
    )


async def _demand(backend: Backend, form: ChatForm) -> Demand | None:
    write = form.grammar(backend.tokenizer)
    if write is None:
        return None
    after = form.grammar_after()
    return Demand(await backend.grammars.compile(write), after)
