"""The engine's promises to its callers: refusals, ends, isolation, stopping."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest

from ellm_serve.engine.engine import Engine
from ellm_serve.engine.executor import Span
from ellm_serve.engine.stats import Progress, RequestStats
from ellm_serve.errors import (
    ContextLengthExceeded,
    EngineError,
    InvalidRequest,
    Overloaded,
    WorkerDied,
)
from ellm_serve.request import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from tests.engine.doubles import (
    EOS,
    Consumer,
    FailOnce,
    HashExecutor,
    ScriptedExecutor,
    alone,
    limits,
    run,
    step_error,
)

pytestmark = pytest.mark.usefixtures("compiled_kernels")


def request(name: str, prompt: Sequence[int] = (5, 6, 7), **sampling: object) -> GenerateRequest:
    params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling}
    return GenerateRequest(name, tuple(prompt), SamplingParams(**params))  # type: ignore[arg-type]


class Gate:
    """Holds the loop thread before a step of some kind until it is opened."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, kind: str, spans: Sequence[Span]) -> None:
        if kind == self.kind:
            self.reached.set()
            assert self.open.wait(30)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (request("r", ()), "prompt"),
        (request("r", (1, 48)), "prompt"),
        (request("r", (-1, 2)), "prompt"),
        (request("r", logit_bias=((48, 1.0),)), "logit_bias"),
        (request("r", logit_bias=((-1, 1.0),)), "logit_bias"),
        (request("r", stop_token_ids=(7, 48)), "stop_token_ids"),
        (request("r", allowed_token_ids=(7, 48)), "allowed_token_ids"),
        (request("r", allowed_token_ids=(-1,)), "allowed_token_ids"),
        (request("r", bad_words=((7,), (5, 48, 6))), "bad_words"),
    ],
)
def test_bad_requests_never_reach_the_executor(bad: GenerateRequest, param: str) -> None:
    """An id outside the vocabulary would be read from memory that is not there."""
    executor = HashExecutor(limits())
    with Engine(executor, eos_token_ids=[EOS]) as engine:
        with pytest.raises(InvalidRequest) as caught:
            engine.submit(bad)
        assert caught.value.param == param
        assert run(engine, request("next")).last.finish_reason is FinishReason.LENGTH
    assert all(span.slot >= 0 for _, spans in executor.calls for span in spans)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", ((3, float("nan")),)),
        ("logit_bias", ((3, float("-inf")),)),
        ("logit_bias", ((3, 1e39),)),
        ("logit_bias", ((3.5, 1.0),)),
        ("logit_bias", 5),
        ("stop_token_ids", 5),
        ("stop_token_ids", (1.0,)),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", (1.0,)),
        ("bad_words", 5),
        ("bad_words", (5,)),
        ("bad_words", ((),)),
        ("bad_words", (("a",),)),
        ("bad_words", ((3,),) * 1025),
        ("bad_words", ((3,) * 8193,)),
        ("temperature", "hot"),
        ("temperature", True),
        ("max_tokens", 1.5),
        ("seed", 1 << 80),
        ("logprobs", True),
        ("top_k", 1.5),
    ],
)
def test_bad_values_are_refused_where_they_are_written(field: str, value: object) -> None:
    """A wrong type would reach a compiled kernel, or stop a step that others share."""
    with pytest.raises(InvalidRequest) as caught:
        request("r", **{field: value})
    assert caught.value.param == field


def test_whole_numbers_become_floats() -> None:
    """Kernels are compiled for one type only."""
    params = SamplingParams(temperature=1, top_p=1, min_p=0, logit_bias={3: 2})  # type: ignore[arg-type]
    assert [type(value) for value in (params.temperature, params.top_p, params.min_p)] == [
        float
    ] * 3
    assert params.logit_bias == ((3, 2.0),)


def test_edge_lengths() -> None:
    """A prompt leaves room for one token; without output it may fill the slot."""
    with Engine(HashExecutor(limits()), eos_token_ids=[EOS]) as engine:
        with pytest.raises(ContextLengthExceeded) as caught:
            engine.submit(request("full", [3] * 64, max_tokens=1))
        assert (caught.value.num_tokens, caught.value.limit) == (65, 64)
        with pytest.raises(ContextLengthExceeded):
            engine.submit(request("over", [3] * 65, max_tokens=0))
        full = run(engine, request("full", [3] * 64, max_tokens=0))
        assert (full.token_ids, full.last.finish_reason) == ([], FinishReason.LENGTH)
        almost = run(engine, request("almost", [4] * 63, max_tokens=None))
        assert len(almost.token_ids) == 1
        assert almost.last.finish_reason is FinishReason.LENGTH
        one = run(engine, request("one", [4], max_tokens=None))
        assert len(one.token_ids) == 63
        wish = run(engine, request("wish", [4], max_tokens=1000))
        assert wish.token_ids == one.token_ids


def test_prompt_only() -> None:
    """max_tokens 0 returns the prompt's log-probabilities and nothing else, in one delta."""
    result = alone(request("r", range(2, 32), max_tokens=0, prompt_logprobs=1), limits())
    (delta,) = result.deltas
    assert delta.token_ids == () and delta.usage.num_output_tokens == 0
    assert delta.prompt_logprobs[0] is None
    entries = [entry for entry in delta.prompt_logprobs if entry is not None]
    assert [entry.token_id for entry in entries] == list(range(3, 32))
    assert all(len(entry.top) == 1 and entry.rank >= 1 for entry in entries)


def test_prompt_logprobs_do_not_come_from_the_cache() -> None:
    """A reused prefix has no logits; every position is computed again for them."""
    with Engine(HashExecutor(limits()), eos_token_ids=[EOS]) as engine:
        run(engine, request("warm", range(2, 32)))
        asked = request("asked", range(2, 32), prompt_logprobs=0)
        again = run(engine, asked)
    assert again.last.usage.num_cached_tokens == 0
    assert len(again.deltas[0].prompt_logprobs) == 30
    assert again.deltas[0].prompt_logprobs == alone(asked, limits()).deltas[0].prompt_logprobs
    assert all(delta.prompt_logprobs == () for delta in again.deltas[1:])


def test_full_queue_is_refused_with_a_time() -> None:
    """Requests and prompt tokens that wait are bounded; what was refused left no trace."""
    gate = Gate("prefill")
    executor = HashExecutor(limits(num_slots=1), before=gate)
    engine = Engine(executor, eos_token_ids=[EOS], max_queued_requests=3, max_queued_tokens=50)
    with engine:
        first = Consumer()
        engine.submit(request("first"), first)
        assert gate.reached.wait(30)
        waiting = [Consumer() for _ in range(3)]
        engine.submit(request("w0", [2] * 20), waiting[0])
        with pytest.raises(Overloaded) as caught:
            engine.submit(request("tokens", [2] * 31))
        assert 1.0 <= caught.value.retry_after_s <= 600.0
        engine.submit(request("w1", [2] * 20), waiting[1])
        engine.submit(request("w2", [2] * 2), waiting[2])
        with pytest.raises(Overloaded):
            engine.submit(request("requests", [2]))
        assert engine.stats().num_rejected == 2
        gate.open.set()
        for consumer in (first, *waiting):
            consumer.wait()
        # A single prompt may be longer than the bound on waiting tokens.
        assert run(engine, request("long", [2] * 60, max_tokens=2)).token_ids
        assert run(engine, request("tokens")).last.finish_reason is FinishReason.LENGTH


def test_running_id_is_refused_and_free_again_afterwards() -> None:
    """Two live requests with one id could not be told apart by `abort`."""
    gate = Gate("prefill")
    with Engine(HashExecutor(limits(), before=gate), eos_token_ids=[EOS]) as engine:
        first = Consumer()
        engine.submit(request("same"), first)
        with pytest.raises(InvalidRequest, match="'same'"):
            engine.submit(request("same"))
        gate.open.set()
        first.wait()
        run(engine, request("same"))


# --- how a sequence ends -------------------------------------------------------------------------


def scripted(answer: Sequence[int], prompt_length: int = 3) -> ScriptedExecutor:
    return ScriptedExecutor(limits(), lambda prefix: answer[len(prefix) - prompt_length])


@pytest.mark.parametrize(
    ("sampling", "tokens", "finish", "stop"),
    [
        ({"ignore_eos": False}, [9, 8], FinishReason.STOP, EOS),
        ({"stop_token_ids": (8,)}, [9], FinishReason.STOP, 8),
        ({"stop_token_ids": (7,)}, [9, 8, EOS], FinishReason.STOP, 7),
        ({"max_tokens": 2}, [9, 8], FinishReason.LENGTH, None),
        ({"max_tokens": 3, "ignore_eos": False}, [9, 8], FinishReason.STOP, EOS),
        ({}, [9, 8, EOS, 7, 6], FinishReason.LENGTH, None),
    ],
)
def test_ends(
    sampling: dict[str, object], tokens: list[int], finish: FinishReason, stop: int | None
) -> None:
    """End ids are named, counted and not part of the output; `ignore_eos` spares stop ids only."""
    with Engine(scripted([9, 8, EOS, 7, 6]), eos_token_ids=[EOS]) as engine:
        result = run(engine, request("r", (5, 6, 7), **{"max_tokens": 5, **sampling}))
    assert result.outcome[:3] == (tokens, finish, stop)
    num_stop = int(finish is FinishReason.STOP)
    assert result.last.usage.num_output_tokens == len(tokens) + num_stop


def test_min_tokens_masks_every_end_id() -> None:
    """An end id can neither be chosen nor end the sequence before min_tokens."""
    with Engine(scripted([EOS] * 5), eos_token_ids=[EOS]) as engine:
        result = run(engine, request("r", min_tokens=2, ignore_eos=False, stop_token_ids=(0, 2)))
    # Scripted logits are equal but for the end id: the lowest other id wins.
    assert result.outcome[:3] == ([3, 3], FinishReason.STOP, EOS)


def test_abort_in_every_phase() -> None:
    """Waiting, in prefill and decoding: one last delta each, and slots are free again."""
    for kind in ("prefill", "decode"):
        gate = Gate(kind)
        executor = HashExecutor(limits(num_slots=1), segments=(3,), before=gate)
        with Engine(executor, eos_token_ids=[EOS]) as engine:
            running, waiting = Consumer(), Consumer()
            engine.submit(request("running", range(2, 14), max_tokens=None), running)
            engine.submit(request("waiting"), waiting)
            assert gate.reached.wait(30)
            engine.abort("waiting")
            engine.abort("running")
            engine.abort("unknown")
            gate.open.set()
            assert running.wait().last.finish_reason is FinishReason.ABORT
            assert waiting.wait().last.finish_reason is FinishReason.ABORT
            run(engine, request("next", range(30, 40)))
            assert engine.stats().steps.num_cancelled_in_prefill == (kind == "prefill")
            assert engine.stats().steps.finished[FinishReason.ABORT] == 2


def test_cancelled_prefill_is_given_up_at_the_next_segment() -> None:
    """Its block is dropped, later blocks are never started, and no row of it is reused."""
    gate = Gate("prefill")
    executor = HashExecutor(limits(prefill_block=16), segments=(100, 1), before=gate)
    with Engine(executor, eos_token_ids=[EOS]) as engine:
        consumer = Consumer()
        engine.submit(request("gone", range(2, 42)), consumer)
        assert gate.reached.wait(30)
        engine.abort("gone")
        gate.open.set()
        consumer.wait()
        again = run(engine, request("again", range(2, 42)))
        assert again.last.usage.num_cached_tokens == 0
    kinds = [kind for kind, _ in executor.calls]
    assert kinds.index("cancel") <= 2


def test_aborted_output_is_reused() -> None:
    """A client that went away and retries finds the prompt computed."""
    gate = Gate("decode")
    with Engine(HashExecutor(limits(), before=gate), eos_token_ids=[EOS]) as engine:
        consumer = Consumer()
        engine.submit(request("first", range(2, 32)), consumer)
        assert gate.reached.wait(30)
        progress = engine.progress("first")
        assert progress == Progress("decode", 30, 30, 0)
        engine.abort("first")
        gate.open.set()
        consumer.wait()
        retry = run(engine, request("retry", range(2, 32)))
        assert retry.last.usage.num_cached_tokens == 29
        assert engine.progress("first") is None


def test_no_slot_leaks_over_many_aborts() -> None:
    """200 clients that leave at once cost nothing that lasts."""
    executor = HashExecutor(limits(), segments=(1, 2))
    with Engine(executor, eos_token_ids=[EOS]) as engine:
        consumers = []
        for number in range(200):
            consumer = Consumer()
            consumers.append(consumer)
            prompt = [2 + number % 40, 3, 4, 5] * (1 + number % 5)
            engine.submit(request(f"r{number}", prompt), consumer)
            engine.abort(f"r{number}")
        for consumer in consumers:
            consumer.wait()
        expected = alone(request("after", range(2, 30)), limits()).token_ids
        assert run(engine, request("after", range(2, 30))).token_ids == expected
        stats = engine.stats()
        assert not any(session.busy for session in stats.sessions)
        assert (stats.num_waiting, stats.num_prefilling, stats.num_decoding) == (0, 0, 0)
        assert stats.steps.finished.total() == 201


# --- what fails, and how far it reaches ----------------------------------------------------------


def four_rows(engine: Engine, breaking: Consumer) -> list[Consumer]:
    """Three ordinary rows beside one that goes to `breaking`."""
    consumers = [Consumer(), Consumer(), Consumer()]
    for number, consumer in enumerate(consumers):
        engine.submit(request(f"good{number}", [10 + number, 11, 12]), consumer)
    engine.submit(request("bad", [30, 31]), breaking)
    return [consumer.wait() for consumer in consumers]


def good_outputs() -> list[list[int]]:
    return [alone(request("r", [10 + n, 11, 12]), limits()).token_ids for n in range(3)]


def test_a_row_with_nan_logits_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    """One sequence's broken logits end it with an error; the others' output is what it was."""

    class OneBadRow(HashExecutor):
        def logits_after(self, chain: bytes, prefix: tuple[int, ...]) -> object:  # type: ignore[override]
            row = super().logits_after(chain, prefix)
            if prefix[:2] == (30, 31) and len(prefix) == 5:
                row[7] = float("nan")
            return row

    with Engine(OneBadRow(limits()), eos_token_ids=[EOS]) as engine:
        bad = Consumer()
        good = four_rows(engine, bad)
        bad.wait()
        assert bad.last.finish_reason is FinishReason.ERROR
        assert bad.last.error is not None and "NaN" in bad.last.error
        assert len(bad.token_ids) == 3
        assert [consumer.token_ids for consumer in good] == good_outputs()
        assert run(engine, request("next")).last.finish_reason is FinishReason.LENGTH
    assert "bad" in caplog.text


def test_a_consumer_that_raises_loses_only_its_own_row(caplog: pytest.LogCaptureFixture) -> None:
    """A closed event loop behind one callback must not stop the others; it is not called again."""
    calls: list[TokenDelta] = []

    def broken(delta: TokenDelta) -> None:
        calls.append(delta)
        if len(calls) == 2:
            raise RuntimeError("event loop is closed")

    with Engine(HashExecutor(limits()), eos_token_ids=[EOS]) as engine:
        good = four_rows(engine, Consumer(broken))
        assert [consumer.token_ids for consumer in good] == good_outputs()
        run(engine, request("next"))
        assert not any(session.busy for session in engine.stats().sessions)
    assert len(calls) == 2
    assert "event loop is closed" in caplog.text


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_failed_step_ends_what_was_running(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Rows of the step end with its error; what waits, and what comes later, is served."""
    executor = HashExecutor(limits(num_slots=2), before=FailOnce(kind, 1, step_error()))
    with Engine(executor, eos_token_ids=[EOS]) as engine:
        consumers = [Consumer() for _ in range(4)]
        for number, consumer in enumerate(consumers):
            engine.submit(request(f"r{number}", [10 + number, 11, 12]), consumer)
        ends = [consumer.wait().last for consumer in consumers]
        failed = [end for end in ends if end.finish_reason is FinishReason.ERROR]
        assert 1 <= len(failed) <= 2
        assert all(end.error == "the step was lost" for end in failed)
        again = run(engine, request("again", [10, 11, 12]))
        assert again.token_ids == good_outputs()[0]
        assert engine.stopped is None
    assert "the step was lost" in caplog.text


@pytest.mark.parametrize("error", [WorkerDied("worker 1 is gone"), ZeroDivisionError("a bug")])
def test_a_fatal_error_releases_everybody(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """A dead worker or a bug stops the engine: every request gets its last delta."""
    gate, fail = Gate("prefill"), FailOnce("decode", 2, error)

    def before(kind: str, spans: Sequence[Span]) -> None:
        gate(kind, spans)
        fail(kind, spans)

    executor = HashExecutor(limits(num_slots=1), before=before)
    engine = Engine(executor, eos_token_ids=[EOS])
    consumers = [Consumer() for _ in range(3)]
    for number, consumer in enumerate(consumers):
        engine.submit(request(f"r{number}"), consumer)
    stream = engine.submit(request("stream"))
    gate.open.set()
    assert list(stream)[-1].finish_reason is FinishReason.ERROR
    for consumer in consumers:
        assert consumer.wait().last.finish_reason is FinishReason.ERROR
        assert consumer.last.error
    assert engine.stopped
    with pytest.raises(EngineError, match="gone|stopped"):
        engine.submit(request("late"))
    engine.close()
    assert executor.closed
    assert any(record.levelno >= logging.ERROR for record in caplog.records)


def test_a_bug_in_the_bookkeeping_stops_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """A failure that is not one row's own is never taken for one: everybody is told."""

    class Broken(HashExecutor):
        def release(self, slot: int) -> None:
            super().release(slot)
            if self.num_computed:
                raise LookupError("bookkeeping")

    gate = Gate("prefill")
    executor = Broken(limits(num_slots=1), before=gate)
    engine = Engine(executor, eos_token_ids=[EOS])
    consumers = [Consumer() for _ in range(3)]
    for number, consumer in enumerate(consumers):
        engine.submit(request(f"r{number}", [10 * number + 2, 3]), consumer)
    gate.open.set()
    finishes = [consumer.wait().last.finish_reason for consumer in consumers]
    assert finishes == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.ERROR]
    engine.close()
    assert "bookkeeping" in caplog.text


# --- streams, threads, numbers -------------------------------------------------------------------


def test_streams_iterate_and_abort() -> None:
    """The thread-side form gives the same deltas; leaving its block ends the request."""
    with Engine(HashExecutor(limits()), eos_token_ids=[EOS]) as engine:
        deltas = list(engine.submit(request("r")))
        assert [t for d in deltas for t in d.token_ids] == alone(request("r"), limits()).token_ids
        with engine.submit(request("left", max_tokens=None)) as stream:
            next(stream)
        assert list(stream)[-1].finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
        assert list(stream) == []


def test_close_ends_everything() -> None:
    """Running and waiting requests are aborted, the thread is gone, the executor closed."""
    before = set(threading.enumerate())
    gate = Gate("decode")
    executor = HashExecutor(limits(num_slots=1), before=gate)
    engine = Engine(executor, eos_token_ids=[EOS])
    consumers = [Consumer(), Consumer()]
    for number, consumer in enumerate(consumers):
        engine.submit(request(f"r{number}", max_tokens=None), consumer)
    assert gate.reached.wait(30)
    closer = threading.Thread(target=engine.close)
    closer.start()
    gate.open.set()
    closer.join(30)
    for consumer in consumers:
        assert consumer.wait().last.finish_reason is FinishReason.ABORT
    engine.close()
    assert executor.closed and set(threading.enumerate()) == before
    with pytest.raises(EngineError, match="shut"):
        engine.submit(request("late"))


def test_submit_from_many_threads() -> None:
    """Every request of every thread gets exactly its own output."""
    expected = {n: alone(request("r", [n, 3, 4]), limits()).token_ids for n in range(2, 10)}
    wrong: list[str] = []

    def client(number: int) -> None:
        for turn in range(5):
            stream = engine.submit(request(f"{number}-{turn}", [number, 3, 4]))
            tokens = [token for delta in stream for token in delta.token_ids]
            if tokens != expected[number]:
                wrong.append(f"{number}-{turn}: {tokens}")

    with Engine(HashExecutor(limits()), eos_token_ids=[EOS]) as engine:
        threads = [threading.Thread(target=client, args=(n,)) for n in range(2, 10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert wrong == []


def test_numbers_of_a_request_and_of_the_engine() -> None:
    """Times come from the clock given, counts from what happened."""
    ticks = iter(range(1_000_000))
    finished: list[RequestStats] = []
    engine = Engine(
        HashExecutor(limits()),
        eos_token_ids=[EOS],
        on_finished=finished.append,
        clock=lambda: float(next(ticks)),
    )
    with engine:
        cold = run(engine, request("cold", range(2, 42)))
        warm = run(engine, request("warm", range(2, 42)))
        run(engine, request("flush", [45], max_tokens=1))
        stats = engine.stats()
    assert cold.last.usage.num_cached_tokens == 0 and warm.last.usage.num_cached_tokens == 39
    assert [entry.request_id for entry in finished] == ["cold", "warm", "flush"]
    for entry in finished[:2]:
        assert entry.queue_s > 0 and entry.prefill_s > 0 and entry.decode_s > 0
        assert 0 < entry.max_token_gap_s <= entry.decode_s
    assert finished[1].usage == warm.last.usage
    steps = stats.steps
    assert (steps.num_prompt_tokens, steps.num_cached_tokens) == (81, 39)
    assert steps.num_output_tokens == 17 and steps.num_decode_tokens == 14
    assert steps.num_prefill_tokens == 42 and steps.num_prefill_blocks == 5
    assert steps.finished == {FinishReason.LENGTH: 3}
    assert steps.prefill_tokens_per_s > 0
