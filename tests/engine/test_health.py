"""What the engine says about itself while it runs: stalls, steps, times of tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from ellm_serve.engine.engine import Engine
from ellm_serve.engine.executor import Span
from ellm_serve.engine.stats import StepReport
from ellm_serve.errors import WorkerDied
from ellm_serve.request import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from tests.engine.doubles import (
    EOS,
    Consumer,
    ExecutorDouble,
    FailOnce,
    HashExecutor,
    ScriptedExecutor,
    limits,
    run,
)

pytestmark = pytest.mark.usefixtures("compiled_kernels")


class Clock:
    """Stands still until told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Hang:
    """A `before` hook that blocks at a step of one kind while it is armed."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.armed = True
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, kind: str, spans: Sequence[Span]) -> None:
        if kind == self.kind and self.armed:
            self.reached.set()
            assert self.open.wait(30)


def request(name: str, length: int = 3, **sampling: object) -> GenerateRequest:
    params = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, **sampling}
    return GenerateRequest(name, tuple(range(5, 5 + length)), SamplingParams(**params))  # type: ignore[arg-type]


def engine_on(executor: ExecutorDouble, clock: Clock, **options: float) -> Engine:
    return Engine(executor, eos_token_ids=[EOS], clock=clock, **options)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_deadlock_is_reported_within_the_bound(kind: str) -> None:
    """And taken back when the step ends after all."""
    clock, hang = Clock(), Hang(kind)
    with engine_on(HashExecutor(limits(), before=hang), clock, stall_timeout_s=10.0) as engine:
        consumer = Consumer()
        engine.submit(request("r"), consumer)
        assert hang.reached.wait(30)
        assert engine.stalled_s == 0.0 and engine.health() is None
        clock.now += 10.0
        assert engine.stalled_s == 10.0 and engine.health() is None
        clock.now += 0.1
        assert engine.health() == "The engine has made no progress for 10 s (allowed: 10 s)."
        hang.armed = False
        hang.open.set()
        consumer.wait()
        run(engine, request("next"))
        assert engine.health() is None


def test_a_blocked_consumer_is_a_stall() -> None:
    """Whatever holds the loop up, requests wait for it."""
    clock = Clock()
    reached, go_on = threading.Event(), threading.Event()

    def block(delta: TokenDelta) -> None:
        reached.set()
        assert go_on.wait(30)

    with engine_on(HashExecutor(limits()), clock, stall_timeout_s=10.0) as engine:
        consumer = Consumer(block)
        engine.submit(request("r"), consumer)
        assert reached.wait(30)
        clock.now += 11.0
        assert engine.health() is not None
        go_on.set()
        consumer.wait()


def test_an_idle_engine_is_never_stalled() -> None:
    """Nothing to do for a day, then work again."""
    clock = Clock()
    engine = engine_on(HashExecutor(limits()), clock, stall_timeout_s=10.0)
    with engine:
        assert engine.health() is None
        for name in ("a", "b"):
            run(engine, request(name))
            # The loop goes to sleep soon after the last delta.
            while engine.expected_step_s or engine.stats().num_decoding:
                threading.Event().wait(0.001)
            clock.now += 86_400.0
            assert engine.stalled_s == 0.0 and engine.health() is None
    assert engine.stalled_s == 0.0
    assert engine.health() == "The engine was shut down."


def test_a_long_prefill_without_a_pause_is_no_stall() -> None:
    """The measured rate says how long it may take; three times that and the timeout is too much."""
    clock, hang = Clock(), Hang("prefill")
    hang.armed = False

    def slow(kind: str, spans: Sequence[Span]) -> None:
        if kind == "prefill" and not hang.armed:
            clock.now += 10.0 * sum(len(span.token_ids) for span in spans)
        hang(kind, spans)

    executor = HashExecutor(limits(), before=slow)
    with engine_on(executor, clock, stall_timeout_s=5.0, fork_threshold=64) as engine:
        run(engine, request("measured", 16, max_tokens=1))
        assert engine.stats().steps.prefill_tokens_per_s == pytest.approx(0.1)
        hang.armed = True
        consumer = Consumer()
        engine.submit(GenerateRequest("long", (30,) * 12, SamplingParams(max_tokens=1)), consumer)
        assert hang.reached.wait(30)
        assert engine.expected_step_s == pytest.approx(120.0)
        clock.now += 364.0
        assert engine.health() is None
        clock.now += 2.0
        assert "366 s" in (engine.health() or "")
        hang.armed = False
        hang.open.set()
        consumer.wait()


def test_a_dead_engine_says_why() -> None:
    """A stopped loop is not a stalled one; the reason is what stopped it."""
    error = WorkerDied("worker 1 is gone")
    executor = HashExecutor(limits(), before=FailOnce("decode", 1, error))
    engine = engine_on(executor, Clock())
    assert run(engine, request("r")).last.finish_reason is FinishReason.ERROR
    engine.close()
    assert engine.health() == "worker 1 is gone" and engine.stalled_s == 0.0


# --- numbers -------------------------------------------------------------------------------------


def test_step_reports_add_up() -> None:
    """Every computed token is in exactly one report, prompt tokens with the end of their block."""
    clock = Clock()

    def tick(kind: str, spans: Sequence[Span]) -> None:
        clock.now += 0.5

    reports: list[StepReport] = []
    executor = HashExecutor(limits(), segments=(3, 1), before=tick)
    engine = Engine(executor, eos_token_ids=[EOS], clock=clock, on_step=reports.append)
    with engine:
        run(engine, request("a", 40))
        run(engine, request("b", 5))
    steps = engine.stats().steps
    assert sum(report.num_prefill_tokens for report in reports) == steps.num_prefill_tokens == 45
    assert sum(report.num_decode_tokens for report in reports) == steps.num_decode_tokens == 6
    assert [report.num_prefill_tokens for report in reports[:5]] == [0, 0, 16, 16, 0]
    assert all(report.seconds == 0.5 for report in reports)
    assert steps.decode_step_s == 0.5


def test_a_listener_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Metrics are not worth a request."""

    def broken(report: StepReport) -> None:
        raise RuntimeError("no such metric")

    with Engine(HashExecutor(limits()), eos_token_ids=[EOS], on_step=broken) as engine:
        assert run(engine, request("r")).last.finish_reason is FinishReason.LENGTH
        assert engine.health() is None
    assert "no such metric" in caplog.text


def test_deltas_carry_the_time_of_their_token() -> None:
    """On the engine's clock, the last one too; `started` is when the queue was left."""
    clock = Clock()

    def tick(kind: str, spans: Sequence[Span]) -> None:
        clock.now += 1.0

    with engine_on(HashExecutor(limits(), before=tick), clock) as engine:
        result = run(engine, request("r"))
        deltas = result.deltas
    assert [delta.time for delta in deltas] == [1001.0, 1002.0, 1003.0, 1004.0]
    assert {delta.started for delta in deltas} == {1000.0}


def test_limits_and_end_ids_are_public() -> None:
    """Whoever checks requests before they come here needs them."""
    with engine_on(HashExecutor(limits()), Clock()) as engine:
        assert engine.limits == limits()
        assert engine.eos_token_ids == {EOS}


def test_a_reader_that_stops_early_is_counted_as_stop() -> None:
    """A stop string is found outside; the session keeps what was computed."""
    hang = Hang("decode")
    executor = HashExecutor(limits(), before=hang)
    with Engine(executor, eos_token_ids=[EOS]) as engine:
        consumer = Consumer()
        engine.submit(request("first", 30, max_tokens=None), consumer)
        assert hang.reached.wait(30)
        engine.abort("first", FinishReason.STOP)
        hang.armed = False
        hang.open.set()
        assert consumer.wait().last.finish_reason is FinishReason.STOP
        assert run(engine, request("again", 30)).last.usage.num_cached_tokens == 29
        steps = engine.stats().steps
    assert steps.finished == {FinishReason.STOP: 1, FinishReason.LENGTH: 1}
    assert steps.num_cancelled_in_prefill == 0


@pytest.mark.parametrize("wanted", [None, 0, 2])
def test_the_end_id_has_logprobs(wanted: int | None) -> None:
    """They are the last entry; its token is in `stop_token_id` and not in the output."""
    answer = [9, 8, EOS]
    executor = ScriptedExecutor(limits(), lambda prefix: answer[len(prefix) - 3])
    with Engine(executor, eos_token_ids=[EOS]) as engine:
        result = run(engine, request("r", logprobs=wanted, ignore_eos=False))
    tokens, finish, stop, logprobs = result.outcome
    assert (tokens, finish, stop) == ([9, 8], FinishReason.STOP, EOS)
    assert [entry.token_id for entry in logprobs] == ([] if wanted is None else [9, 8, EOS])
