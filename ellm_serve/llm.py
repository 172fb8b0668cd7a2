"""LLM: a model in this process, text in and text out.

    from ellm_serve import LLM
    llm = LLM("builtin")
    print(llm.generate("def fibonacci(n):")[0].text)

The same engine as the service runs, without Ray and HTTP.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self, SupportsIndex

from ellm_serve.closing import Closing
from ellm_serve.cluster.launch import launch_engine
from ellm_serve.cluster.startup import plan_start
from ellm_serve.config import EngineConfig
from ellm_serve.engine.admission import share
from ellm_serve.engine.engine import Engine
from ellm_serve.engine.stream import TokenStream
from ellm_serve.errors import EngineError, InvalidRequest
from ellm_serve.model.generation_config import GenerationDefaults
from ellm_serve.request import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
    Usage,
)
from ellm_serve.text.answer import AnswerText
from ellm_serve.text.chat_encoder import ChatEncoder, ChatPrompt
from ellm_serve.text.chat_template import ChatTemplate
from ellm_serve.text.tokenizer import Tokenizer

Message = Mapping[str, object]
Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of an answer. The last one has a `finish_reason`."""

    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. `stop` is the stop string or token id that ended it, if one did."""

    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason
    stop: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    @classmethod
    def collect(cls, deltas: Iterator[TextDelta]) -> Completion:
        """Puts the pieces together."""
        pieces = list(deltas)
        last = pieces[-1]
        assert last.finish_reason is not None
        return cls(
            "".join(piece.text for piece in pieces),
            tuple(itertools.chain.from_iterable(piece.token_ids for piece in pieces)),
            last.usage,
            last.finish_reason,
            last.stop,
            tuple(itertools.chain.from_iterable(piece.logprobs for piece in pieces)),
            tuple(itertools.chain.from_iterable(piece.prompt_logprobs for piece in pieces)),
        )


@dataclass(slots=True)
class Turn:
    """What a session's last turn was: the prompt's text and ids, and the answer so far."""

    text: str
    token_ids: tuple[int, ...]
    answer_ids: tuple[int, ...] = ()

    def extend(self, tokenizer: Tokenizer, prompt: ChatPrompt) -> list[int]:
        """The next prompt's ids: those of this turn as they were sampled, and only the rest anew.

        Tokenising an answer's text again often gives other ids than were sampled, and the keys and
        values of all that follows would be lost.
        """
        answer = tokenizer.decode(self.answer_ids)
        kept = self.text + answer
        if not answer or not prompt.text.startswith(kept):
            return prompt.token_ids
        tail = tokenizer.encode_marked(prompt.marked.tail(len(kept)))
        return [*self.token_ids, *self.answer_ids, *tail]


class TextStream:
    """Iterates over the pieces of one answer; closing or dropping it ends the generation."""

    def __init__(self, stream: TokenStream, answer: AnswerText) -> None:
        self._stream = stream
        self._answer = answer
        self._finished = False
        self.turn: Turn | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TextDelta:
        if self._finished:
            raise StopIteration
        delta = next(self._stream)
        if delta.finish_reason is FinishReason.ERROR:
            self._finished = True
            raise EngineError(delta.error or "the generation failed")
        text = self._answer.push(delta.token_ids)
        if self._answer.matched is not None:
            self._finished = True
            self._stream.abort(FinishReason.STOP)
            return self._delta(delta, text, FinishReason.STOP, self._answer.matched)
        if delta.finish_reason is not None:
            self._finished = True
            text += self._answer.finish()
        if self.turn is not None:
            self.turn.answer_ids += delta.token_ids
        return self._delta(delta, text, delta.finish_reason, delta.stop_token_id)

    def _delta(
        self, delta: TokenDelta, text: str, finish: FinishReason | None, stop: str | int | None
    ) -> TextDelta:
        return TextDelta(
            text, delta.token_ids, delta.usage, finish, stop, delta.logprobs, delta.prompt_logprobs
        )

    def close(self) -> None:
        """Ends the generation; more pieces do not come."""
        self._finished = True
        self._stream.abort()

    def __del__(self) -> None:
        self._stream.abort()


class LLM(Closing):
    """A model, its tokenizer and a running engine.

    Keyword arguments are the fields of `EngineConfig`, for example `sequence_length=8192`,
    `batch_size=8`, `threads=4`.
    """

    def __init__(
        self, model: str = "builtin", *, progress: bool = False, **options: object
    ) -> None:
        start = plan_start(EngineConfig.from_options(model=model, **options))
        self.config = start.config
        self.model_dir = start.model_dir
        self.plan = start.plan
        self.tokenizer = Tokenizer.from_dir(self.model_dir)
        self.defaults = GenerationDefaults.from_dir(self.model_dir)
        template = ChatTemplate.from_dir(self.model_dir)
        self._encoder = ChatEncoder(self.tokenizer, template) if template else None
        self._ids = itertools.count()
        self._turns: dict[str, Turn] = {}
        # Last, so that a broken tokenizer does not leave an engine behind.
        self.engine: Engine = launch_engine(start, progress)

    def sampling(self, **fields: object) -> SamplingParams:
        """Sampling parameters: the given fields, then the model's own defaults, then neutral."""
        defaults = self.defaults
        given = {
            "temperature": defaults.temperature,
            "top_k": defaults.top_k,
            "top_p": defaults.top_p,
            "min_p": defaults.min_p,
            "repetition_penalty": defaults.repetition_penalty,
            "presence_penalty": defaults.presence_penalty,
            "frequency_penalty": defaults.frequency_penalty,
        } | fields
        known = {field.name for field in dataclasses.fields(SamplingParams)}
        for name in given.keys() - known:
            raise InvalidRequest(f"unknown sampling parameter {name!r}", name)
        chosen = {k: v for k, v in given.items() if v is not None or k in fields}
        return SamplingParams(**chosen)  # type: ignore[arg-type]

    # --- text ----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        session: str | None = None,
    ) -> list[Completion]:
        """Continues one or several prompts (strings or token ids); they are computed together.

        Without `sampling` the model's own defaults hold and at most 16 tokens are generated. All
        prompts are checked before the first one starts; if one fails, the others are ended.
        """
        sampling = sampling or self.sampling()
        requests = [self._request(self._ids_of(one), sampling, session) for one in _list(prompts)]
        for request in requests:
            self.engine.check(request)
        started: list[TextStream] = []

        def complete(request: GenerateRequest) -> Completion:
            stream = self._start(request, stop)
            started.append(stream)
            return Completion.collect(stream)

        # Enough in flight to keep every slot busy, few enough to stay within the queue's bounds;
        # a reader each, so that stop strings act at once.
        num_readers = min(2 * self.config.batch_size, share(self.config.max_queued_requests))
        with ThreadPoolExecutor(num_readers, "ellm-generate") as pool:
            try:
                return list(pool.map(complete, requests))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for stream in started:
                    stream.close()
                raise

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        session: str | None = None,
    ) -> TextStream:
        """Continues a prompt piece by piece; closing or dropping the stream ends the generation."""
        request = self._request(self._ids_of(prompt), sampling or self.sampling(), session)
        return self._start(request, stop)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> Completion:
        """Answers a conversation (OpenAI's message form); options as for `chat_stream`."""
        return Completion.collect(self.chat_stream(messages, sampling, **options))

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        session: str | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
        continue_final_message: bool = False,
        allow_special: bool = False,
    ) -> TextStream:
        """Answers a conversation piece by piece.

        Without `sampling` the model's defaults hold, up to the end of the slot. With `session` the
        keys and values of earlier turns under that name are used again. `allow_special`: control
        tokens spelt in messages count, as in transformers.
        """
        if self._encoder is None:
            raise InvalidRequest(f"{self.model_dir} has no chat template; use generate", "messages")
        prompt = self._encoder.encode_chat(
            messages,
            tools=tools,
            variables=template_variables,
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
            allow_special=allow_special,
        )
        sampling = sampling or self.sampling(max_tokens=self.defaults.max_new_tokens)
        turn = self._turns.get(session) if session is not None else None
        ids = turn.extend(self.tokenizer, prompt) if turn else prompt.token_ids
        stream = self._start(self._request(ids, sampling, session), stop)
        if session is not None:
            self._turns[session] = stream.turn = Turn(prompt.text, tuple(ids))
        return stream

    # --- engine --------------------------------------------------------------------------------

    def _ids_of(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            # A raw prompt is the caller's own: control tokens in it count.
            return self.tokenizer.encode(prompt, allow_special=True)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise InvalidRequest("a prompt is a string or a list of token ids", "prompt") from None

    def _request(
        self, ids: Sequence[int], sampling: SamplingParams, session: str | None
    ) -> GenerateRequest:
        if not isinstance(sampling, SamplingParams):
            raise InvalidRequest("sampling must be SamplingParams; see LLM.sampling", "sampling")
        return GenerateRequest(f"llm-{next(self._ids)}", tuple(ids), sampling, session)

    def _start(self, request: GenerateRequest, stop: str | Sequence[str]) -> TextStream:
        """Submits at once, so that refusals come now."""
        strings = [stop] if isinstance(stop, str) else stop
        answer = AnswerText(self.tokenizer, strings, min_tokens=request.sampling.min_tokens)
        return TextStream(self.engine.submit(request), answer)

    def close(self) -> None:
        """Ends the engine and gives its memory back; running generations are ended."""
        self.engine.close()


def _list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several; a flat sequence of integers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        items = list(prompts)
    except TypeError:
        raise InvalidRequest("prompts are strings or lists of token ids", "prompt") from None
    if not items:
        raise InvalidRequest("at least one prompt is needed", "prompt")
    numbers = [isinstance(item, SupportsIndex) for item in items]
    if all(numbers):
        return [items]  # type: ignore[list-item]
    if any(numbers):
        raise InvalidRequest("prompts are strings or lists of token ids, not a mix", "prompt")
    return items  # type: ignore[return-value]
