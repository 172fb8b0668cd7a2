"""A request's output is its own: neighbours, arrival, aborts, reuse and cuts never change it."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest

from ellm_serve.engine.engine import Engine
from ellm_serve.engine.executor import ExecutorLimits, Span
from ellm_serve.request import FinishReason, GenerateRequest, SamplingParams
from tests.engine.doubles import EOS, Consumer, HashExecutor, alone, limits, run

pytestmark = pytest.mark.usefixtures("compiled_kernels")


def random_limits(rng: random.Random) -> ExecutorLimits:
    """Any shape an executor may have."""
    return limits(
        num_slots=rng.randint(1, 5),
        max_decode_rows=rng.randint(1, 5),
        prefill_block=rng.choice([1, 2, 5, 16, 64]),
        max_logit_rows=rng.choice([1, 2, 4, 16]),
    )


def random_sampling(rng: random.Random) -> SamplingParams:
    """Any mix of parameters; always with a seed."""
    max_tokens = rng.choice([None, 0, 1, 2, 5, 12, 200])
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, min(3, max_tokens)) if max_tokens is not None else 0,
        temperature=rng.choice([0.0, 0.7, 1.0, 5.0]),
        top_k=rng.choice([0, 0, 1, 5, 100]),
        top_p=rng.choice([1.0, 1.0, 0.5, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        logit_bias=rng.choice([(), ((5, 4.0), (7, -3.0), (5, 1.0))]),
        stop_token_ids=rng.choice([(), (4, 9)]),
        allowed_token_ids=rng.choice([None, None, None, tuple(range(20, 44))]),
        bad_words=rng.choice([(), (), ((21,), (30, 31), (22, 23, 24))]),
        ignore_eos=rng.random() < 0.3,
        seed=rng.randrange(5),
        logprobs=rng.choice([None, None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, None, 2]),
    )


def random_requests(rng: random.Random, bounds: ExecutorLimits) -> list[GenerateRequest]:
    """Requests whose prompts share beginnings, with and without session keys."""
    stems = [
        tuple(rng.randrange(bounds.vocab_size) for _ in range(rng.randint(1, 40))) for _ in range(3)
    ]
    requests = []
    for number in range(rng.randint(2, 14)):
        stem = rng.choice(stems)
        tail = tuple(rng.randrange(bounds.vocab_size) for _ in range(rng.randint(0, 30)))
        prompt = (stem[: rng.randint(1, len(stem))] + tail)[: bounds.sequence_length - 1]
        requests.append(
            GenerateRequest(
                f"r{number}",
                prompt,
                random_sampling(rng),
                rng.choice([None, "a", "b"]),
                rng.choice(["", "", "other"]),
                rng.choice([0, 0, 1, -1]),
                rng.choice(["", "", "salt"]),
            )
        )
    return requests


class Arrivals:
    """Submits and aborts at random steps, from inside the loop, so that a seed decides it all."""

    def __init__(self, rng: random.Random, requests: list[GenerateRequest]) -> None:
        self.rng = rng
        self.left = requests[::-1]
        self.consumers = {request.request_id: Consumer() for request in requests}
        self.aborted: set[str] = set()
        self.engine: Engine | None = None
        self.lock = threading.Lock()

    def __call__(self, kind: str, spans: Sequence[Span]) -> None:
        while self.left and self.rng.random() < 0.3:
            self.submit_one()
        if self.rng.random() < 0.05:
            self.abort_one()

    def submit_one(self) -> None:
        assert self.engine is not None
        with self.lock:
            if self.left:
                request = self.left.pop()
                self.engine.submit(request, self.consumers[request.request_id])

    def abort_one(self) -> None:
        assert self.engine is not None
        name = self.rng.choice(sorted(self.consumers))
        self.aborted.add(name)
        self.engine.abort(name)

    def run_all(self, engine: Engine) -> None:
        """Submits whatever the loop did not, each time all that runs has ended."""
        self.engine = engine
        while self.left:
            self.submit_one()
            waiting = {request.request_id for request in self.left}
            for name in self.consumers.keys() - waiting:
                self.consumers[name].wait()
        for consumer in self.consumers.values():
            consumer.wait()
        # Ends after whatever a late abort has left in flight.
        last = run(engine, GenerateRequest("last", (1, 2, 3), SamplingParams(max_tokens=3)))
        assert last.last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert engine.stopped is None
        assert not any(session.busy for session in engine.stats().sessions)


def check(arrivals: Arrivals, requests: list[GenerateRequest], bounds: ExecutorLimits) -> None:
    for request in requests:
        consumer = arrivals.consumers[request.request_id]
        expected = alone(request, bounds)
        if consumer.last.finish_reason is FinishReason.ABORT:
            assert request.request_id in arrivals.aborted
            got = consumer.token_ids
            assert got == expected.token_ids[: len(got)]
            continue
        assert consumer.outcome == expected.outcome
        assert consumer.deltas[0].prompt_logprobs == expected.deltas[0].prompt_logprobs
        assert all(delta.prompt_logprobs == () for delta in consumer.deltas[1:])
        assert consumer.last.usage.num_prompt_tokens == len(request.prompt_token_ids)


@pytest.mark.parametrize("seed", range(60))
def test_any_mix_equals_each_request_alone(seed: int) -> None:
    """Arrival order, aborts, forks, evictions, block sizes and row counts change nothing.

    The double raises if a row is read that does not hold what the engine believes.
    """
    rng = random.Random(seed)
    bounds = random_limits(rng)
    requests = random_requests(rng, bounds)
    arrivals = Arrivals(rng, requests)
    executor = HashExecutor(bounds, segments=(1, 3, 2), before=arrivals)
    threshold = rng.choice([1, 4, 64])
    with Engine(executor, eos_token_ids=[EOS], fork_threshold=threshold) as engine:
        arrivals.run_all(engine)
    check(arrivals, requests, bounds)


@pytest.mark.parametrize("seed", range(30))
def test_scarce_memory_changes_nothing_but_who_waits(seed: int) -> None:
    """With memory for little more than one sequence, rows wait or start again; all complete."""
    rng = random.Random(1000 + seed)
    bounds = random_limits(rng)
    requests = random_requests(rng, bounds)
    arrivals = Arrivals(rng, requests)
    executor = HashExecutor(
        bounds, segments=(1, 2), before=arrivals, capacity=rng.choice([64, 80, 120])
    )
    with Engine(executor, eos_token_ids=[EOS], fork_threshold=4) as engine:
        arrivals.run_all(engine)
    check(arrivals, requests, bounds)


@pytest.mark.parametrize("seed", range(10))
def test_two_turns_equal_one_prompt(seed: int) -> None:
    """The second turn computes only what is new and continues as a cold run would."""
    rng = random.Random(seed)
    bounds = limits(prefill_block=rng.choice([1, 7, 64]))
    first = GenerateRequest(
        "one", tuple(rng.randrange(2, 48) for _ in range(20)), SamplingParams(seed=1, max_tokens=6),
        "s",
    )  # fmt: skip
    executor = HashExecutor(bounds)
    with Engine(executor, eos_token_ids=[EOS]) as engine:
        answer = run(engine, first)
        history = first.prompt_token_ids + tuple(answer.token_ids)
        second = GenerateRequest("two", (*history, 7, 8, 9), SamplingParams(seed=2), "s")
        before = executor.num_computed
        warm = run(engine, second)
    # The token sampled last was never computed; an end id is no part of the answer.
    num_valid = len(history) - (answer.last.finish_reason is FinishReason.LENGTH)
    assert warm.last.usage.num_cached_tokens == num_valid
    assert all(d.usage.num_cached_tokens == num_valid for d in warm.deltas)
    new_tokens = len(second.prompt_token_ids) - num_valid
    num_decoded = warm.last.usage.num_output_tokens - 1
    assert executor.num_computed - before == new_tokens + num_decoded
    assert warm.outcome == alone(second, bounds).outcome


def test_seed_and_position_decide_a_draw() -> None:
    """A prompt that ends with the first tokens of an answer is continued by the rest of it."""
    sampling = SamplingParams(seed=5, max_tokens=10, ignore_eos=True)
    whole = alone(GenerateRequest("whole", (3, 4, 5), sampling), limits()).token_ids
    prompt = (3, 4, 5, *whole[:4])
    rest = alone(GenerateRequest("rest", prompt, sampling), limits()).token_ids
    assert rest[:6] == whole[4:]
    other = SamplingParams(seed=6, max_tokens=10, ignore_eos=True)
    assert alone(GenerateRequest("other", (3, 4, 5), other), limits()).token_ids != whole
