"""/v1/chat/completions: conversations in, the next message out, whole or piece by piece."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ellm_serve.protocol.chat import (
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatMessage,
)
from ellm_serve.serve.answer import Answer, Piece
from ellm_serve.serve.backend import Backend
from ellm_serve.serve.context import RequestContext
from ellm_serve.serve.conversation import Conversation, text_of
from ellm_serve.serve.generation import Generation
from ellm_serve.serve.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from ellm_serve.serve.naming import response_id
from ellm_serve.serve.prompts import Prompt
from ellm_serve.serve.sse import EventStream, time_comment, to_json
from ellm_serve.serve.usage import UsageReport, UsageTails


async def chat(
    backend: Backend, request: ChatCompletionRequest, context: RequestContext
) -> ChatCompletionResponse | EventStream:
    """The whole answer, or its events if the request wants a stream.

    Raises:
        RequestError: it is refused; nothing was generated.
        EngineError: the engine failed, and the answer was wanted whole.
    """
    backend.check_model(request.model)
    answer_id = response_id("chatcmpl", context.request_id, request.request_id)
    conversation = Conversation.of(request, backend.config)
    prompt = await backend.prompts.conversation(conversation, backend.truncation(request))
    generation = backend.start(answer_id, request, [prompt], context)
    answer = _Chat(backend, request, answer_id, conversation, prompt, generation)
    if request.stream:
        return EventStream(generation, _ChunkWriter(answer, context.token_times))
    return await answer.response()


class _Chat:
    """One request on its way."""

    def __init__(
        self,
        backend: Backend,
        request: ChatCompletionRequest,
        answer_id: str,
        conversation: Conversation,
        prompt: Prompt,
        generation: Generation,
    ) -> None:
        self.backend = backend
        self.request = request
        self.id = answer_id
        self.created = int(time.time())
        self.generation = generation
        self.usage = UsageReport(generation, backend.config, counts_writes=True)
        final = conversation.messages[-1]
        opens = conversation.add_generation_prompt
        self.role = backend.config.response_role if opens else str(final["role"])
        self.echo = text_of(final) if request.echo and final["role"] == self.role else ""
        self.prompt_ids = list(prompt.token_ids) if request.return_token_ids else None
        self.prompt_text = prompt.text if request.return_prompt_text else None
        self._names = TokenNames(backend.tokenizer, bool(request.return_tokens_as_token_ids))

    async def response(self) -> ChatCompletionResponse:
        """The whole answer."""
        pieces = await self.generation.collect()
        answers = self.generation.answers
        wants_prompt = answers[0].request.sampling.prompt_logprobs is not None
        return ChatCompletionResponse(
            id=self.id,
            created=self.created,
            model=self.backend.model_name,
            choices=list(map(self._choice, pieces)),
            system_fingerprint=self.backend.fingerprint,
            usage=self.usage.info(),
            prompt_logprobs=(
                prompt_logprobs(self._names, answers[0].prompt_logprobs) if wants_prompt else None
            ),
            prompt_token_ids=self.prompt_ids,
            prompt_text=self.prompt_text,
            metrics=self.usage.metrics(),
        )

    def _choice(self, piece: Piece) -> ChatChoice:
        logprobs = self.logprobs(piece)
        return ChatChoice(
            index=piece.index,
            message=ChatMessage(role=self.role, content=self.echo + piece.text),
            logprobs=None if logprobs is None else ChatLogprobs.model_validate(logprobs),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if self.request.return_token_ids else None,
        )

    def logprobs(self, piece: Piece) -> dict[str, object] | None:
        """Those of a piece, if they are wanted."""
        if not self.request.logprobs:
            return None
        return chat_logprobs(self._names, piece.logprobs, self.request.top_logprobs or 0)


class _ChunkWriter:
    """Writes the chunks of a stream as JSON text: a model object per token would cost too much.

    A token without text of its own (half a character, the start of a stop string) waits for the
    next one, so that its log-probability and its id come with the text they belong to.
    """

    def __init__(self, chat: _Chat, token_times: bool) -> None:
        request, backend = chat.request, chat.backend
        self._chat = chat
        self._times = token_times
        self._wants_ids = bool(request.return_token_ids)
        self._tails = UsageTails(
            chat.usage, request.stream_options, backend.config, backend.fingerprint
        )
        self._head = (
            f'data: {{"id":{to_json(chat.id)},"object":"chat.completion.chunk",'
            f'"created":{chat.created},"model":{to_json(backend.model_name)},"choices":['
        )
        self._held: dict[int, Piece] = {}
        self._begun = False

    def events(self, pieces: Sequence[Piece]) -> str:
        """One chunk for each piece that has something to show; before them all, those of roles."""
        events = [] if self._begun else self._openings()
        for piece in pieces:
            held = self._held.pop(piece.index, None)
            if held is not None:
                held.add(piece)
                piece = held
            if piece.text or piece.finish_reason is not None:
                events.append(self._chunk(piece))
            else:
                self._held[piece.index] = piece
        return "".join(events)

    def _openings(self) -> list[str]:
        self._begun = True
        chat = self._chat
        events = []
        for answer in chat.generation.answers:
            delta = to_json({"role": chat.role, "content": ""})
            tail = (
                f'{self._tails.running(answer)},"prompt_token_ids":{to_json(chat.prompt_ids)}'
                f',"prompt_text":{to_json(chat.prompt_text)}'
            )
            events.append(self._event(answer, delta, tail))
        if chat.echo:
            delta = to_json({"content": chat.echo})
            for answer in chat.generation.answers:
                events.append(self._event(answer, delta, self._tails.running(answer)))
        return events

    def _event(self, answer: Answer, delta: str, tail: str) -> str:
        return (
            f'{self._head}{{"index":{answer.index},"delta":{delta},"logprobs":null'
            f',"finish_reason":null}}]{tail}}}\n\n'
        )

    def _chunk(self, piece: Piece) -> str:
        answer = self._chat.generation.answers[piece.index]
        moment = time_comment(piece.time) if self._times else ""
        delta = f'{{"content":{to_json(piece.text)}}}' if piece.text else "{}"
        ids = piece.token_ids if self._wants_ids else None
        if piece.finish_reason is None:
            finish, tail = "null", self._tails.running(answer)
        else:
            finish = f'"{piece.finish_reason}","stop_reason":{to_json(piece.stop_reason)}'
            tail = self._tails.last(answer)
        return (
            f'{moment}{self._head}{{"index":{piece.index},"delta":{delta}'
            f',"logprobs":{to_json(self._chat.logprobs(piece))},"finish_reason":{finish}'
            f',"token_ids":{to_json(ids)}}}]{tail}}}\n\n'
        )

    def end(self) -> str:
        """The chunk with the whole request's usage, if it is wanted."""
        usage = self._tails.final()
        return f"{self._head}]{usage}}}\n\n" if usage else ""
