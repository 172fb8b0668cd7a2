"""LLM: a model in this process, text in and text out.

    from ellm_serve import LLM
    llm = LLM("builtin")
    print(llm.generate("def fibonacci(n):")[0].text)

The same engine as the service runs, without Ray and HTTP.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ellm_serve.cluster.launch import launch_engine
from ellm_serve.cluster.startup import plan_start
from ellm_serve.config import EngineConfig
from ellm_serve.engine.engine import Engine
from ellm_serve.engine.stream import TokenStream
from ellm_serve.errors import EngineError, InvalidRequest, ModelError
from ellm_serve.model.generation_config import GenerationDefaults
from ellm_serve.request import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
    Usage,
)
from ellm_serve.text.chat_encoder import ChatEncoder
from ellm_serve.text.chat_template import ChatTemplate
from ellm_serve.text.detokenizer import IncrementalDetokenizer
from ellm_serve.text.stop import StopStrings
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


class LLM:
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

        Without `sampling` the model's own defaults hold and at most 16 tokens are generated.
        """
        streams = [
            self.stream(prompt, sampling, stop=stop, session=session)
            for prompt in _as_list(prompts)
        ]
        return [Completion.collect(stream) for stream in streams]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        session: str | None = None,
    ) -> Iterator[TextDelta]:
        """Continues a prompt piece by piece; closing the iterator ends the generation."""
        if isinstance(prompt, str):
            # A raw prompt is the caller's own: control tokens in it count.
            ids = self.tokenizer.encode(prompt, allow_special=True)
        else:
            ids = list(prompt)
        return self._submit(ids, sampling or self.sampling(), stop, session)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        session: str | None = None,
    ) -> Completion:
        """Answers a conversation (OpenAI's message form)."""
        return Completion.collect(self.chat_stream(messages, sampling, stop=stop, session=session))

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        session: str | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
    ) -> Iterator[TextDelta]:
        """Answers a conversation piece by piece.

        Without `sampling` the model's defaults hold, up to the end of the slot. With `session` the
        keys and values of earlier turns under that name are used again.
        """
        if self._encoder is None:
            raise ModelError(f"{self.model_dir} has no chat template; use generate instead")
        prompt = self._encoder.encode_chat(messages, tools=tools, variables=template_variables)
        sampling = sampling or dataclasses.replace(
            self.sampling(), max_tokens=self.defaults.max_new_tokens
        )
        return self._submit(prompt.token_ids, sampling, stop, session)

    # --- engine --------------------------------------------------------------------------------

    def _submit(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        stop: str | Sequence[str],
        session: str | None,
    ) -> Iterator[TextDelta]:
        """Submits at once (so that refusals come now) and returns the iterator."""
        strings = StopStrings([stop] if isinstance(stop, str) else stop)
        request = GenerateRequest(
            f"llm-{next(self._ids)}", tuple(token_ids), sampling, session_key=session
        )
        return self._deltas(self.engine.submit(request), strings)

    def _deltas(self, stream: TokenStream, stop: StopStrings) -> Iterator[TextDelta]:
        detokenizer = IncrementalDetokenizer(self.tokenizer)
        with stream:
            for delta in stream:
                if delta.finish_reason is FinishReason.ERROR:
                    raise EngineError(delta.error or "the generation failed")
                text = stop.push(detokenizer.push_all(delta.token_ids))
                if stop.matched is not None:
                    yield _text_delta(delta, text, FinishReason.STOP, stop.matched)
                    return
                if delta.finish_reason is not None:
                    text += stop.push(detokenizer.flush()) + stop.flush()
                    yield _text_delta(delta, text, delta.finish_reason, delta.stop_token_id)
                    return
                yield _text_delta(delta, text, None, None)

    def close(self) -> None:
        """Ends the engine and gives its memory back."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _text_delta(
    delta: TokenDelta, text: str, finish: FinishReason | None, stop: str | int | None
) -> TextDelta:
    return TextDelta(
        text, delta.token_ids, delta.usage, finish, stop, delta.logprobs, delta.prompt_logprobs
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several; a flat sequence of ints is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if not items:
        raise InvalidRequest("at least one prompt is needed", "prompt")
    ids = [item for item in items if isinstance(item, int)]
    if len(ids) == len(items):
        return [ids]
    if ids:
        raise InvalidRequest("prompts are strings or lists of token ids, not a mix", "prompt")
    return [item for item in items if not isinstance(item, int)]
