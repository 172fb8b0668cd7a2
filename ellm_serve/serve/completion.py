"""/v1/completions: prompts in, their continuations out, whole or piece by piece."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ellm_serve.errors import EllmError
from ellm_serve.protocol.completion import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from ellm_serve.serve.answer import Answer, Piece
from ellm_serve.serve.backend import Backend, Demand
from ellm_serve.serve.context import RequestContext
from ellm_serve.serve.generation import Generation
from ellm_serve.serve.logprobs import CompletionLogprobsWriter, TokenNames, prompt_logprobs
from ellm_serve.serve.naming import response_id
from ellm_serve.serve.prompts import Prompt
from ellm_serve.serve.sse import DONE, EventStream, failure_chunk, time_comment, to_json
from ellm_serve.serve.usage import UsageReport, UsageTails


async def complete(
    backend: Backend, request: CompletionRequest, context: RequestContext
) -> CompletionResponse | EventStream:
    """The whole answer, or its events if the request wants a stream.

    Raises:
        RequestError: it is refused; nothing was generated.
        EngineError: the engine failed, and the answer was wanted whole.
    """
    backend.check_model(request.model)
    answer_id = response_id("cmpl", context.request_id, request.request_id)
    prompts = await backend.prompts.prompts(request.prompts, backend.truncation(request))
    demand = None
    if request.has_form:
        demand = Demand(await backend.grammars.compile(request.grammar))
    generation = backend.start(answer_id, request, prompts, context, demand=demand)
    completion = _Completion(backend, request, answer_id, prompts, generation)
    if request.stream:
        return EventStream(generation, _ChunkWriter(completion, context.token_times))
    return await completion.response()


class _Choice:
    """One answer as its request wants to see it."""

    def __init__(
        self, request: CompletionRequest, answer: Answer, names: TokenNames, echo: str | None
    ) -> None:
        """`echo`: the prompt's text, if it is to be shown before the answer."""
        self.answer = answer
        self._echo = echo
        self._silent = request.echo_only
        self._wants_logprobs = request.logprobs is not None
        self._hide_special = request.skip_special_tokens is not False
        self._logprobs = CompletionLogprobsWriter(names)

    def show(self, piece: Piece) -> tuple[str, dict[str, list[object]] | None]:
        """Text and log-probabilities of what has come, behind those of the prompt if echoed."""
        echo, self._echo = self._echo, None
        text = "" if self._silent else piece.text
        if self._wants_logprobs:
            if echo is not None:
                prompt = self.answer.request.prompt_token_ids
                self._logprobs.add(prompt, self.answer.prompt_logprobs)
            if not self._silent:
                self._logprobs.add(piece.token_ids, piece.logprobs, self._hide_special)
        return (echo or "") + text, self._logprobs.take() if self._wants_logprobs else None


class _Completion:
    """One request on its way."""

    def __init__(
        self,
        backend: Backend,
        request: CompletionRequest,
        answer_id: str,
        prompts: Sequence[Prompt],
        generation: Generation,
    ) -> None:
        self.backend = backend
        self.request = request
        self.id = answer_id
        self.created = int(time.time())
        self.generation = generation
        self.usage = UsageReport(generation, backend.config)
        self.wants_ids = bool(request.return_token_ids)
        self._names = TokenNames(backend.tokenizer, bool(request.return_tokens_as_token_ids))
        echoes = [backend.prompts.text(prompt) if request.echo else None for prompt in prompts]
        self.choices = [
            _Choice(request, answer, self._names, echoes[answer.index // generation.n])
            for answer in generation.answers
        ]

    async def response(self) -> CompletionResponse:
        """The whole answer."""
        pieces = await self.generation.collect()
        return CompletionResponse(
            id=self.id,
            created=self.created,
            model=self.backend.model_name,
            choices=list(map(self._choice, pieces)),
            system_fingerprint=self.backend.fingerprint,
            usage=self.usage.info(),
            metrics=self.usage.metrics(),
        )

    def _choice(self, piece: Piece) -> CompletionChoice:
        choice = self.choices[piece.index]
        text, logprobs = choice.show(piece)
        request = choice.answer.request
        wants_prompt = request.sampling.prompt_logprobs is not None
        return CompletionChoice(
            index=piece.index,
            text=text,
            logprobs=None if logprobs is None else CompletionLogprobs.model_validate(logprobs),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if self.wants_ids else None,
            prompt_logprobs=(
                prompt_logprobs(self._names, choice.answer.prompt_logprobs)
                if wants_prompt
                else None
            ),
            prompt_token_ids=list(request.prompt_token_ids) if self.wants_ids else None,
        )


class _ChunkWriter:
    """Writes the chunks of a stream as JSON text: a model object per token would cost too much."""

    def __init__(self, completion: _Completion, token_times: bool) -> None:
        backend = completion.backend
        self._completion = completion
        self._times = token_times
        self._tails = UsageTails(
            completion.usage, completion.request.stream_options, backend.config, backend.fingerprint
        )
        self._head = (
            f'data: {{"id":{to_json(completion.id)},"object":"text_completion"'
            f',"created":{completion.created},"model":{to_json(backend.model_name)},"choices":['
        )
        self._begun: set[int] = set()

    def events(self, pieces: Sequence[Piece]) -> str:
        """One chunk for each piece."""
        return "".join(map(self._chunk, pieces))

    def _chunk(self, piece: Piece) -> str:
        choice = self._completion.choices[piece.index]
        text, logprobs = choice.show(piece)
        prompt_ids = token_ids = None
        if self._completion.wants_ids:
            token_ids = piece.token_ids
            if piece.index not in self._begun:
                self._begun.add(piece.index)
                prompt_ids = choice.answer.request.prompt_token_ids
        answer, finished = choice.answer, piece.finish_reason is not None
        tail = self._tails.last(answer) if finished else self._tails.running(answer)
        return (
            f"{time_comment(piece.time) if self._times else ''}{self._head}"
            f'{{"index":{piece.index},"text":{to_json(text)},"logprobs":{to_json(logprobs)}'
            f',"finish_reason":{to_json(piece.finish_reason)}'
            f',"stop_reason":{to_json(piece.stop_reason)}'
            f',"prompt_token_ids":{to_json(prompt_ids)},"token_ids":{to_json(token_ids)}}}]'
            f"{tail}}}\n\n"
        )

    def end(self) -> str:
        """The chunk with the whole request's usage, if it is wanted, and [DONE]."""
        tail = self._tails.final()
        return f"{self._head}]{tail}}}\n\n{DONE}" if tail else DONE

    def failure(self, error: EllmError) -> str:
        """What is sent if there is no whole answer."""
        return failure_chunk(error)
