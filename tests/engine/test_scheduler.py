"""What shares a block, what waits, what never waits. Read from the calls the executor got."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from ellm_serve.engine.engine import Engine
from ellm_serve.engine.executor import ExecutorLimits, Span
from ellm_serve.request import FinishReason, GenerateRequest, SamplingParams
from tests.engine.doubles import EOS, Consumer, HashExecutor, alone, limits

pytestmark = pytest.mark.usefixtures("compiled_kernels")


def request(name: str, prompt: Sequence[int], max_tokens: int | None = 3) -> GenerateRequest:
    return GenerateRequest(
        name, tuple(prompt), SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    )


class Script:
    """Submits requests before a given step of the loop, counted over decode and prefill calls."""

    def __init__(self, bounds: ExecutorLimits, **options: object) -> None:
        self.at: dict[int, list[GenerateRequest]] = {}
        self.consumers: dict[str, Consumer] = {}
        self.count = 0
        self.ready = threading.Event()
        self.executor = HashExecutor(bounds, before=self, **options)  # type: ignore[arg-type]
        self.engine = Engine(self.executor, eos_token_ids=[EOS], fork_threshold=4)

    def __call__(self, kind: str, spans: Sequence[Span]) -> None:
        assert self.ready.wait(30)
        for item in self.at.pop(self.count, []):
            self.submit(item)
        self.count += 1

    def submit(self, item: GenerateRequest) -> None:
        self.consumers[item.request_id] = Consumer()
        self.engine.submit(item, self.consumers[item.request_id])

    def run(self, first: GenerateRequest) -> list[tuple[str, tuple[Span, ...]]]:
        with self.engine:
            self.submit(first)
            self.ready.set()
            self.consumers[first.request_id].wait()
            for consumer in list(self.consumers.values()):
                consumer.wait()
        assert not self.at, "a step of the script was never reached"
        return self.executor.calls

    def blocks(self) -> list[list[int]]:
        """Sizes of the spans of each block."""
        seen: list[list[int]] = []
        previous: tuple[Span, ...] = ()
        for kind, spans in self.executor.calls:
            if kind == "prefill" and spans != previous:
                seen.append(sorted(len(span.token_ids) for span in spans))
                previous = spans
        return seen


def test_short_prompts_share_a_block() -> None:
    """What fits joins; the first that does not fit does not stop those behind it."""
    script = Script(limits(num_slots=8))
    script.at[0] = [
        request("a", [20] * 5),
        request("b", [21] * 9),
        request("c", [22] * 4),
        request("d", [23] * 6),
    ]
    script.run(request("first", [19] * 2))
    assert script.blocks() == [[2], [5, 9], [4, 6]]


def test_long_prompt_leaves_half_a_block_to_short_ones() -> None:
    """Short requests answer while the long one, first in line, advances in every block."""
    script = Script(limits(num_slots=8))
    script.at[0] = [request("s1", [20] * 5), request("s2", [21] * 3), request("s3", [22] * 1)]
    script.run(request("long", list(range(48)) + [0, 0]))
    assert script.blocks() == [[16], [3, 5, 8], [1, 15], [11]]


def test_decode_runs_between_segments() -> None:
    """A stream goes on while a long prompt is computed: one token per segment."""
    script = Script(limits(), segments=(5,))
    script.at[7] = [request("long", list(range(30)))]
    calls = script.run(request("stream", [40, 41], max_tokens=20))
    kinds = [kind for kind, _ in calls]
    first = kinds.index("decode")
    during = kinds[first + 3 : first + 18]
    assert during.count("prefill") >= 6
    assert all({a, b} == {"prefill", "decode"} for a, b in zip(during, during[1:], strict=False))


def test_rows_take_turns_when_they_are_too_many() -> None:
    """More sequences than decode rows: everybody advances."""
    script = Script(limits(num_slots=4, max_decode_rows=2))
    others = [request(f"r{n}", [10 + n, 3], max_tokens=12) for n in range(3)]
    script.at[0] = others
    calls = script.run(request("first", [9, 3], max_tokens=12))
    rows = [{span.slot for span in spans} for kind, spans in calls if kind == "decode"]
    assert max(len(row) for row in rows) == 2
    middle = rows[4:12]
    assert set().union(*middle) == {0, 1, 2, 3}
    for item in others:
        expected = alone(item, limits()).token_ids
        assert script.consumers[item.request_id].token_ids == expected


def test_equal_prompts_are_computed_once() -> None:
    """Copies of a prompt wait for the first one's block and take its rows over."""
    prompt = list(range(6))
    script = Script(limits(num_slots=4))
    script.at[0] = [request("one", prompt), request("two", prompt), request("three", prompt)]
    script.run(request("first", [40, 41]))
    assert script.blocks() == [[2], [6], [1, 1]]
    assert script.consumers["three"].last.usage.num_cached_tokens == 5
    assert len({tuple(script.consumers[name].token_ids) for name in ("one", "two", "three")}) == 1


def test_aborted_part_of_a_shared_block_is_not_reused() -> None:
    """The block goes on for the others; the aborted prompt's rows count as never computed."""
    script = Script(limits(), segments=(1, 4, 1))
    script.at[0] = [request("gone", [20] * 7), request("stays", [21] * 6, max_tokens=1)]

    def abort(kind: str, spans: Sequence[Span]) -> None:
        script(kind, spans)
        if kind == "prefill" and len(spans) == 2:
            script.engine.abort("gone")

    script.executor.before = abort
    script.run(request("first", [19] * 2, max_tokens=1))
    assert script.consumers["gone"].last.finish_reason is FinishReason.ABORT
    assert script.consumers["stays"].last.finish_reason is FinishReason.LENGTH
    held = {session.num_tokens for session in script.engine.stats().sessions}
    assert held == {2, 6}


def test_sequence_without_memory_ends_with_an_error() -> None:
    """One that can never fit says so; what fits is served before and after."""
    script = Script(limits(), capacity=20)
    script.at[1] = [request("long", list(range(30))), request("next", [40, 41])]
    script.run(request("first", [42, 43], max_tokens=4))
    assert script.consumers["first"].last.finish_reason is FinishReason.LENGTH
    assert script.consumers["long"].last.finish_reason is FinishReason.ERROR
    assert "memory" in (script.consumers["long"].last.error or "")
    assert script.consumers["next"].last.finish_reason is FinishReason.LENGTH


def test_rows_out_of_memory_give_way_to_the_oldest() -> None:
    """Two growing rows that do not fit together: the younger starts again later, both complete."""
    script = Script(limits(), capacity=30)
    items = [request("old", [22, 23], max_tokens=20), request("young", [20, 21], max_tokens=20)]
    script.at[0] = items[1:]
    script.run(items[0])
    for item in items:
        consumer = script.consumers[item.request_id]
        assert consumer.outcome == alone(item, limits()).outcome
        assert consumer.last.usage.num_cached_tokens == 0
    assert script.engine.stats().num_requeued >= 1


def test_prompt_waits_for_memory_that_running_rows_hold() -> None:
    """It goes back to the queue and is served when they end, with what it had computed."""
    script = Script(limits(), capacity=40)
    script.at[2] = [request("waits", list(range(32)), max_tokens=2)]
    script.run(request("runs", [40] * 4, max_tokens=10))
    assert script.consumers["waits"].last.finish_reason is FinishReason.LENGTH
    assert script.consumers["waits"].last.usage.num_cached_tokens == 0
    # Not tried again at each of the other row's tokens.
    assert script.engine.stats().num_requeued == 1
    expected = alone(request("waits", list(range(32)), max_tokens=2), limits())
    assert script.consumers["waits"].token_ids == expected.token_ids
