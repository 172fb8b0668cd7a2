"""What every handler works with, and how a request of theirs becomes sequences of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ellm_serve.config import ServeConfig
from ellm_serve.engine.admission import share
from ellm_serve.engine.engine import Engine
from ellm_serve.errors import InvalidRequest, ModelNotFound
from ellm_serve.grammar.constraint import CompiledGrammar
from ellm_serve.metrics import Metrics
from ellm_serve.protocol.common import SamplingFields
from ellm_serve.protocol.limits import RequestLimits, truncated_length
from ellm_serve.protocol.sampling import SamplingDefaults, to_sampling_params
from ellm_serve.request import GenerateRequest, SamplingParams
from ellm_serve.serve.answer import Answer, EndRules
from ellm_serve.serve.chat_output import ChatOutput
from ellm_serve.serve.context import RequestContext
from ellm_serve.serve.generation import Generation
from ellm_serve.serve.grammars import Grammars
from ellm_serve.serve.inbox import Inbox
from ellm_serve.serve.naming import engine_id, fingerprint, is_loggable, session_key
from ellm_serve.serve.parsers import Parsers
from ellm_serve.serve.prompts import Prompt, PromptReader, Truncation, bad_word_ids
from ellm_serve.text.answer import AnswerText
from ellm_serve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextRules:
    """How the tokens of an answer become text, and that text what is shown.

    output: takes one answer of a chat apart; there is one for each.
    """

    stop: Sequence[str] = ()
    skip_special: bool = True
    output: Callable[[], ChatOutput] | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """A grammar that answers follow, from behind the token `after` on."""

    grammar: CompiledGrammar
    after: int | None = None


class Backend:
    """An engine with the text side of its model. Starts generations; keeps none of them."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompts: PromptReader,
        defaults: SamplingDefaults,
        limits: RequestLimits,
        config: ServeConfig,
        metrics: Metrics,
        parsers: Parsers,
        grammars: Grammars,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.config = config
        self.limits = limits
        self.parsers = parsers
        self.grammars = grammars
        self.fingerprint = fingerprint(config)
        self._defaults = defaults
        self._metrics = metrics
        self._inbox: Inbox | None = None
        self._plain_end_id = _plain_end_id(tokenizer, engine)

    @property
    def model_name(self) -> str:
        """What answers call the model, whatever alias was asked for."""
        return self.config.names[0]

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound unless the name is one of the model's; no name is the first one."""
        if name and name not in self.config.names:
            raise ModelNotFound(name, self.config.names)

    def truncation(self, request: SamplingFields) -> Truncation | None:
        """How the request wants long prompts to be cut, if it does."""
        length = truncated_length(request.truncate_prompt_tokens, self.limits)
        return None if length is None else Truncation(length, request.truncation_side == "right")

    def start(
        self,
        answer_id: str,
        request: SamplingFields,
        prompts: Sequence[Prompt],
        context: RequestContext,
        rules: TextRules | None = None,
        demand: Demand | None = None,
    ) -> Generation:
        """Checks and submits all that a request asks for: `n` sequences for each prompt.

        `rules` are the request's own if none are given.

        Raises:
            RequestError: nothing was started.
        """
        n = request.num_choices
        samplings = [self._sampling(request, prompt) for prompt in prompts]
        self._check_count(len(prompts), n)
        session = session_key(request.session_id, context.session_id, request.vllm_xargs)
        if session is not None and is_loggable(session):
            context.session_id = session
        context.log["stream"] = bool(request.stream)
        rules = rules or text_rules(request)
        answers: list[Answer] = []
        for prompt, sampling in zip(prompts, samplings, strict=True):
            for i in range(n):
                index = len(answers)
                generate = GenerateRequest(
                    engine_id(answer_id, index),
                    prompt.token_ids,
                    _with_seed(sampling, i),
                    session,
                    context.principal,
                    request.priority or context.priority or 0,
                    request.cache_salt or "",
                    None if demand is None else demand.after,
                )
                answers.append(self._answer(index, generate, request, rules))
        generation = Generation(
            self.engine,
            self._metrics,
            self._loop_inbox(),
            context,
            answers,
            n,
            None if demand is None else demand.grammar,
        )
        generation.start()
        return generation

    def _sampling(self, request: SamplingFields, prompt: Prompt) -> SamplingParams:
        sampling = to_sampling_params(request, self._defaults, self.limits, len(prompt.token_ids))
        if not request.bad_words:
            return sampling
        return replace(sampling, bad_words=bad_word_ids(self.tokenizer, request.bad_words))

    def _check_count(self, num_prompts: int, n: int) -> None:
        """Refuses what the queue could never take, so that nobody tries again for ever."""
        limit = share(self.config.max_queued_requests)
        if num_prompts * n > limit:
            raise InvalidRequest(
                f"{num_prompts} prompts with n={n} are {num_prompts * n} sequences, but one request"
                f" may have at most {limit}.",
                "prompt" if n == 1 else "n",
            )

    def _answer(
        self, index: int, generate: GenerateRequest, request: SamplingFields, rules: TextRules
    ) -> Answer:
        include_stop = request.include_stop_str_in_output
        text = AnswerText(
            self.tokenizer, rules.stop, include_stop, rules.skip_special, request.min_tokens
        )
        ends = EndRules(None if request.ignore_eos else self._plain_end_id, include_stop)
        return Answer(index, generate, text, ends, rules.output and rules.output())

    def _loop_inbox(self) -> Inbox:
        loop = asyncio.get_running_loop()
        if self._inbox is None or self._inbox.loop is not loop:
            self._inbox = Inbox(loop)
        return self._inbox


def text_rules(request: SamplingFields) -> TextRules:
    """Those of a request whose answers are not taken apart."""
    return TextRules(request.stop_strings, request.skip_special_tokens is not False)


def _with_seed(sampling: SamplingParams, i: int) -> SamplingParams:
    """The parameters of the i-th answer to a prompt."""
    if sampling.seed is None or i == 0:
        return sampling
    return replace(sampling, seed=sampling.seed + i)


def _plain_end_id(tokenizer: Tokenizer, engine: Engine) -> int | None:
    """The end id of which answers make no mention: the tokenizer's own, or else the lowest."""
    named = tokenizer.eos_token_id
    return named if named is not None else min(engine.eos_token_ids, default=None)
