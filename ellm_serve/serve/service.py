"""The service without HTTP: requests as objects in, answers as objects or streams out."""

from __future__ import annotations

from pathlib import Path

from ellm_serve.closing import Closing
from ellm_serve.config import ServeConfig
from ellm_serve.engine.engine import Engine
from ellm_serve.errors import ConfigError, InvalidRequest
from ellm_serve.metrics import Metrics
from ellm_serve.model.generation_config import GenerationDefaults
from ellm_serve.protocol.chat import ChatCompletionRequest, ChatCompletionResponse
from ellm_serve.protocol.common import ModelCard, ModelList
from ellm_serve.protocol.completion import CompletionRequest, CompletionResponse
from ellm_serve.protocol.limits import RequestLimits
from ellm_serve.protocol.sampling import SamplingDefaults
from ellm_serve.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from ellm_serve.serve.backend import Backend
from ellm_serve.serve.chat import chat
from ellm_serve.serve.chat_events import ChatRun
from ellm_serve.serve.chat_start import start_chat
from ellm_serve.serve.completion import complete
from ellm_serve.serve.context import RequestContext
from ellm_serve.serve.grammars import Grammars
from ellm_serve.serve.parsers import Parsers
from ellm_serve.serve.prompts import PromptReader
from ellm_serve.serve.sse import EventStream
from ellm_serve.serve.tokenization import detokenize, tokenize
from ellm_serve.text.chat_encoder import ChatEncoder
from ellm_serve.text.chat_template import ChatTemplate, RenderLimits
from ellm_serve.text.tokenizer import Tokenizer


class Service(Closing):
    """One model, ready to answer. All coroutines run in one event loop at a time.

    A refusal is raised before a coroutine returns, also when a stream is wanted: every sequence
    has been submitted by then. Cancelling a coroutine, or closing a stream, ends the generation.
    """

    def __init__(self, backend: Backend) -> None:
        self.engine = backend.engine
        self._backend = backend

    @classmethod
    def create(
        cls, engine: Engine, model_dir: Path, config: ServeConfig, metrics: Metrics
    ) -> Service:
        """The service of a running engine.

        Raises:
            StartupError: tokenizer, template or sampling defaults cannot be used.
        """
        tokenizer = Tokenizer.from_dir(model_dir)
        limits = RequestLimits(
            max_model_len=engine.limits.sequence_length,
            vocab_size=engine.limits.vocab_size,
            max_n=config.largest_n,
            max_chars_per_token=_longest_token(tokenizer),
            max_logprobs=config.max_logprobs,
        )
        encoder = _encoder(tokenizer, model_dir, config, limits)
        prompts = PromptReader(tokenizer, encoder, limits)
        defaults = sampling_defaults(model_dir, config)
        source = "" if encoder is None else encoder.template.source
        parsers = Parsers.of(config, source, tokenizer)
        grammars = Grammars(tokenizer, limits.vocab_size)
        return cls(
            Backend(
                engine, tokenizer, prompts, defaults, limits, config, metrics, parsers, grammars
            )
        )

    def start(self) -> None:
        """Does ahead of the first request what can be done then: about a second of work."""
        self._backend.grammars.start()

    def close(self) -> None:
        """Gives up what belongs to the service; the engine is its owner's."""
        self._backend.grammars.close()

    async def complete(
        self, request: CompletionRequest, context: RequestContext
    ) -> CompletionResponse | EventStream:
        """/v1/completions."""
        return await complete(self._backend, request, context)

    async def chat(
        self, request: ChatCompletionRequest, context: RequestContext
    ) -> ChatCompletionResponse | EventStream:
        """/v1/chat/completions."""
        return await chat(self._backend, request, context)

    async def start_chat(self, request: ChatCompletionRequest, context: RequestContext) -> ChatRun:
        """A chat answer as events, for endpoints that show it in a form of their own."""
        return await start_chat(self._backend, request, context)

    async def tokenize(self, request: TokenizeRequest, context: RequestContext) -> TokenizeResponse:
        """/tokenize."""
        return await tokenize(self._backend, request, context)

    async def detokenize(
        self, request: DetokenizeRequest, context: RequestContext
    ) -> DetokenizeResponse:
        """/detokenize."""
        return await detokenize(self._backend, request, context)

    def models(self) -> ModelList:
        """/v1/models: a card for each name."""
        config, length = self._backend.config, self._backend.limits.max_model_len
        cards = [
            ModelCard(id=name, root=config.model, max_model_len=length) for name in config.names
        ]
        return ModelList(data=cards)


def sampling_defaults(model_dir: Path, config: ServeConfig) -> SamplingDefaults:
    """Sampling parameters for requests that leave them out.

    The model's own bound on the output is a default; one that whoever runs the server has set holds
    for every request.

    Raises:
        StartupError: a value is out of range, or a file cannot be read.
    """
    source = config.generation_config
    if source == "auto":
        given = GenerationDefaults.from_dir(model_dir)
    elif source == "vllm":
        given = GenerationDefaults.neutral()
    else:
        given = _from_directory(Path(source))
    chosen = given.override(config.override_generation_config)
    own = source not in ("auto", "vllm") or "max_new_tokens" in config.override_generation_config
    return SamplingDefaults(
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        min_p=chosen.min_p,
        repetition_penalty=chosen.repetition_penalty,
        presence_penalty=chosen.presence_penalty,
        frequency_penalty=chosen.frequency_penalty,
        max_tokens=chosen.max_new_tokens,
        max_tokens_cap=chosen.max_new_tokens if own else None,
    )


def _from_directory(path: Path) -> GenerationDefaults:
    if not (path / "generation_config.json").is_file():
        raise ConfigError(f"generation_config: {path} has no generation_config.json")
    return GenerationDefaults.from_dir(path)


def _encoder(
    tokenizer: Tokenizer, model_dir: Path, config: ServeConfig, limits: RequestLimits
) -> ChatEncoder | None:
    """What renders conversations; None if the model has no template."""
    if config.chat_template is not None:
        template: ChatTemplate | None = _template_from_file(Path(config.chat_template))
    else:
        template = ChatTemplate.from_dir(model_dir)
    if template is None:
        return None
    # Whatever fits in a body may be rendered: it may be cut to a slot's length after that.
    max_chars = max(config.max_body_bytes, limits.max_model_len * limits.max_chars_per_token)
    return ChatEncoder(tokenizer, template, RenderLimits(max_chars))


def _template_from_file(path: Path) -> ChatTemplate:
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"chat_template: cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, InvalidRequest) as error:
        raise ConfigError(f"chat_template: {path}: {error}") from error


def _longest_token(tokenizer: Tokenizer) -> int:
    """Bytes, and so at least characters, of the longest token."""
    return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
