"""The engine on a real, tiny model: the promises of `test_equality` with computed logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ellm_serve.engine.engine import Engine
from ellm_serve.engine.solo import SoloExecutor
from ellm_serve.request import GenerateRequest, SamplingParams
from tests.engine.doubles import Consumer, run
from tests.running import Model

MakeExecutor = Callable[..., SoloExecutor]


def some_requests(model: Model) -> list[GenerateRequest]:
    """Prompts that share beginnings, of lengths on both sides of the block's borders."""
    stem = model.ids(300, seed=1)
    samplings = [
        SamplingParams(temperature=0.0, max_tokens=6, logprobs=2),
        SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=9, logprobs=0),
        SamplingParams(temperature=0.8, top_k=5, seed=4, max_tokens=4, prompt_logprobs=1),
    ]
    prompts = [
        stem[:40],
        stem,
        model.ids(5, seed=2),
        (*stem[:200], *model.ids(20, seed=3)),
        (*stem[:40], 7),
        model.ids(129, seed=4),
        stem,
    ]
    return [
        GenerateRequest(f"r{n}", prompt, samplings[n % 3], f"s{n % 4}")
        for n, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("sockets", [1, 2])
@pytest.mark.parametrize("kind", ["tiny_dense", "tiny_moe"])
def test_mix_equals_each_alone(
    kind: str, sockets: int, request: pytest.FixtureRequest, make_executor: MakeExecutor
) -> None:
    """Tokens and log-probabilities are bit-equal whatever shares the machine with a request."""
    model: Model = request.getfixturevalue(kind)
    items = some_requests(model)
    expected = []
    for item in items:
        with Engine(make_executor(model, sockets=sockets), eos_token_ids=[0]) as engine:
            expected.append(run(engine, item))
    executor = make_executor(
        model, sockets=sockets, num_slots=3, prefill_block=128, max_logit_rows=16
    )
    with Engine(executor, eos_token_ids=[0], prefill_budget_s=1e-4, fork_threshold=16) as engine:
        consumers = [Consumer() for _ in items]
        for item, consumer in zip(items, consumers, strict=True):
            engine.submit(item, consumer)
        for consumer in consumers:
            consumer.wait()
        assert engine.stats().steps.num_cached_tokens > 0
    for consumer, alone in zip(consumers, expected, strict=True):
        assert consumer.outcome == alone.outcome
        assert consumer.deltas[0].prompt_logprobs == alone.deltas[0].prompt_logprobs
