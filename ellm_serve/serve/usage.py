"""Token counts and times of a request as the wire shows them."""

from __future__ import annotations

from ellm_serve.config import ServeConfig
from ellm_serve.protocol.common import (
    CompletionTokensDetails,
    PromptTokensDetails,
    RequestMetrics,
    StreamOptions,
    UsageInfo,
)
from ellm_serve.serve.answer import Answer
from ellm_serve.serve.generation import Generation
from ellm_serve.serve.sse import to_json


class UsageReport:
    """What a request has used.

    counts_writes: also how many prompt tokens were newly kept.
    counts_reasoning: also how many tokens of the answers are thoughts.
    """

    def __init__(
        self,
        generation: Generation,
        config: ServeConfig,
        *,
        counts_writes: bool = False,
        counts_reasoning: bool = False,
    ) -> None:
        self._generation = generation
        self._config = config
        self._counts_writes = counts_writes
        self._counts_reasoning = counts_reasoning

    def info(self) -> UsageInfo:
        """Of the whole request: every prompt counts once, however many answers it has."""
        answers = self._generation.answers
        prompts = [answer.usage for answer in answers[:: self._generation.n]]
        num_prompt = sum(usage.num_prompt_tokens for usage in prompts)
        num_cached = sum(usage.num_cached_tokens for usage in prompts)
        num_output = sum(answer.usage.num_output_tokens for answer in answers)
        return UsageInfo(
            prompt_tokens=num_prompt,
            total_tokens=num_prompt + num_output,
            completion_tokens=num_output,
            prompt_tokens_details=self._details(num_prompt, num_cached),
            completion_tokens_details=self._output_details(),
        )

    def _output_details(self) -> CompletionTokensDetails | None:
        if not self._counts_reasoning:
            return None
        answers = self._generation.answers
        return CompletionTokensDetails(
            reasoning_tokens=sum(answer.num_reasoning_tokens for answer in answers)
        )

    def _details(self, num_prompt: int, num_cached: int) -> PromptTokensDetails | None:
        if not self._config.enable_prompt_tokens_details:
            return None
        return PromptTokensDetails(
            cached_tokens=num_cached,
            created_cache_tokens=num_prompt - num_cached if self._counts_writes else None,
        )

    def metrics(self) -> RequestMetrics | None:
        """Times of the first answer, if the server is set up to tell them."""
        if not self._config.enable_per_request_metrics:
            return None
        answer = self._generation.answers[0]
        times, num_output = answer.times, answer.usage.num_output_tokens
        return RequestMetrics(
            time_to_first_token_ms=(times.queue_s + times.prefill_s) * 1e3,
            generation_time_ms=times.decode_s * 1e3,
            queue_time_ms=times.queue_s * 1e3,
            mean_itl_ms=times.decode_s * 1e3 / (num_output - 1) if num_output > 1 else None,
            tokens_per_second=num_output / times.decode_s if times.decode_s else None,
        )


class UsageTails:
    """What ends each chunk of a stream besides its choices."""

    def __init__(
        self, report: UsageReport, options: StreamOptions | None, config: ServeConfig, seal: str
    ) -> None:
        """`seal`: the server's fingerprint, for the last chunks."""
        forced = config.enable_force_include_usage
        self._report = report
        self._seal = f',"system_fingerprint":{to_json(seal)}'
        self._wanted = forced or bool(options and options.include_usage)
        self._continuous = forced or bool(
            self._wanted and options and options.continuous_usage_stats
        )

    def running(self, answer: Answer) -> str:
        """For a chunk that others follow: the counts so far, if they are wanted all along."""
        if not self._continuous:
            return ""
        num_prompt, num_output = answer.usage.num_prompt_tokens, answer.usage.num_output_tokens
        return (
            f',"usage":{{"prompt_tokens":{num_prompt},"total_tokens":{num_prompt + num_output}'
            f',"completion_tokens":{num_output}}}'
        )

    def last(self, answer: Answer) -> str:
        """For the last chunk of an answer."""
        return self.running(answer) if self._wanted else self._seal

    def final(self) -> str:
        """For the chunk behind all answers; empty if there is to be none."""
        if not self._wanted:
            return ""
        usage = self._report.info().model_dump_json(exclude_none=True)
        metrics = self._report.metrics()
        times = "" if metrics is None else f',"metrics":{metrics.model_dump_json()}'
        return f',"usage":{usage}{self._seal}{times}'
