"""Who is served next when several principals wait, and how much each may have waiting."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest

from ellm_serve.engine.admission import new_sequence, share
from ellm_serve.engine.engine import Engine
from ellm_serve.engine.executor import Span
from ellm_serve.engine.sequence import Sequence as Generated
from ellm_serve.engine.stats import Progress, RequestStats
from ellm_serve.engine.waiting import FairQueue
from ellm_serve.errors import Overloaded
from ellm_serve.request import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from tests.engine.doubles import EOS, Consumer, HashExecutor, limits, run

pytestmark = pytest.mark.usefixtures("compiled_kernels")


def request(
    name: str, prompt: Sequence[int], principal: str, priority: int = 0, max_tokens: int = 2
) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(name, tuple(prompt), sampling, None, principal, priority)


class Crowd:
    """An engine with one slot, held before its first step until everybody has come."""

    def __init__(self, num_slots: int = 1, **options: int) -> None:
        self.open = threading.Event()
        self.consumers: dict[str, Consumer] = {}
        self.order: list[str] = []
        self.executor = HashExecutor(limits(num_slots=num_slots), before=self._hold)
        self.engine = Engine(
            self.executor, eos_token_ids=[EOS], on_finished=self._finished, **options
        )
        self.started = threading.Event()
        self.submit(request("first", [40], "first"))
        assert self.started.wait(30)

    def _hold(self, kind: str, spans: Sequence[Span]) -> None:
        self.started.set()
        assert self.open.wait(30)

    def _finished(self, stats: RequestStats) -> None:
        self.order.append(stats.request_id)

    def submit(self, item: GenerateRequest, consumer: Consumer | None = None) -> None:
        self.consumers[item.request_id] = consumer or Consumer()
        self.engine.submit(item, self.consumers[item.request_id])

    def finish(self) -> list[str]:
        """The other requests in the order in which they ended: with one slot, that of service."""
        self.open.set()
        waited: set[str] = set()
        while left := self.consumers.keys() - waited:
            for name in left:
                self.consumers[name].wait()
            waited |= left
        self.engine.close()
        return [name for name in self.order if name != "first"]


def test_a_hundred_prompts_of_one_delay_another_by_one() -> None:
    """Somebody who asks one thing at a time takes turns with somebody who asked 100 at once."""
    crowd = Crowd(max_queued_requests=200)
    for number in range(100):
        crowd.submit(request(f"many{number}", [number % 20] * 2, "many"))

    def ask(number: int) -> None:
        def next_one(delta: TokenDelta) -> None:
            if delta.finish_reason is not None and number < 9:
                ask(number + 1)

        crowd.submit(request(f"few{number}", [30, number], "few"), Consumer(next_one))

    ask(0)
    order = crowd.finish()
    places = [place for place, name in enumerate(order) if name.startswith("few")]
    assert (len(order), len(places)) == (110, 10)
    assert places[0] <= 1
    assert max(b - a for a, b in zip(places, places[1:], strict=False)) <= 2


def test_long_prompts_get_their_share() -> None:
    """Somebody who floods the queue with short prompts does not put long ones off for ever."""
    crowd = Crowd(max_queued_requests=200)
    for number in range(5):
        crowd.submit(request(f"long{number}", [30 + number] * 48, "long"))
    for number in range(60):
        crowd.submit(request(f"short{number}", [number % 20] * 2, "short"))
    order = crowd.finish()
    places = [place for place, name in enumerate(order) if name.startswith("long")]
    # A long prompt counts 16 + 48 tokens, a short one 16 + 2: three or four of them for a long one.
    assert places[0] == 0
    assert all(3 <= b - a <= 5 for a, b in zip(places, places[1:], strict=False))


def test_short_prompts_of_another_join_a_long_one() -> None:
    """While a long prompt takes several blocks, short ones of others go with it."""
    crowd = Crowd(num_slots=4)
    crowd.submit(request("long", [20] * 48, "a"))
    crowd.submit(request("short", [30] * 3, "b"))
    crowd.finish()
    sizes = [
        sorted(len(span.token_ids) for span in spans)
        for kind, spans in crowd.executor.calls
        if kind == "prefill"
    ]
    assert sizes == [[1], [3, 13], [16], [16], [3]]


def test_priority_orders_the_requests_of_one_principal() -> None:
    """The lowest value first, then by arrival; it is no way past other principals."""
    crowd = Crowd()
    for number, (principal, priority) in enumerate(
        [("a", 0), ("a", 5), ("a", 0), ("a", -1), ("b", 9), ("b", 8)]
    ):
        crowd.submit(request(f"r{number}", [20 + number], principal, priority))
    order = crowd.finish()
    assert [name for name in order if name < "r4"] == ["r3", "r0", "r2", "r1"]
    assert [name for name in order if name >= "r4"] == ["r5", "r4"]
    assert set(order[:2]) == {"r3", "r5"}


def test_an_aborted_prompt_is_never_computed() -> None:
    """A client that left while it waited costs nothing; those behind it move up."""
    crowd = Crowd()
    for number in range(4):
        crowd.submit(request(f"r{number}", [20 + number], "a"))
    crowd.engine.abort("r0")
    crowd.engine.abort("r2", FinishReason.STOP)
    crowd.finish()
    prompts = [spans[0].token_ids for kind, spans in crowd.executor.calls if kind == "prefill"]
    assert prompts == [(40,), (21,), (23,)]
    ends = [crowd.consumers[f"r{number}"].last.finish_reason for number in range(4)]
    assert ends[0] is FinishReason.ABORT and ends[2] is FinishReason.STOP
    assert crowd.consumers["r0"].last.started is None


# --- how many may wait ---------------------------------------------------------------------------


def test_one_principal_leaves_room_for_another() -> None:
    """It may fill the queue but for an eighth, and what it left is there for others."""
    crowd = Crowd(max_queued_requests=16, max_queued_tokens=160)
    for number in range(14):
        crowd.submit(request(f"a{number}", [20], "a"))
    with pytest.raises(Overloaded) as caught:
        crowd.submit(request("a14", [20], "a"))
    assert caught.value.retry_after_s >= 1.0
    crowd.submit(request("b0", [21] * 20, "b"))
    crowd.submit(request("c0", [21] * 20, "c"))
    with pytest.raises(Overloaded):
        crowd.submit(request("d0", [22], "d"))
    assert crowd.engine.stats().num_rejected == 2
    crowd.consumers.pop("a14")
    crowd.consumers.pop("d0")
    crowd.finish()


def test_prompt_tokens_are_bounded_for_each_and_for_all() -> None:
    """Long prompts fill the queue as well."""
    crowd = Crowd(max_queued_requests=100, max_queued_tokens=160)
    for number in range(4):
        crowd.submit(request(f"a{number}", [20] * 35, "a"))
    with pytest.raises(Overloaded):
        crowd.engine.submit(request("a4", [20], "a"))
    crowd.submit(request("b0", [21] * 20, "b"))
    with pytest.raises(Overloaded):
        crowd.engine.submit(request("c0", [21], "c"))
    crowd.engine.abort("a0")
    crowd.finish()


def test_the_smallest_queue_takes_one_request() -> None:
    """The reserve is never all there is."""
    assert [share(bound) for bound in (1, 7, 8, 256)] == [1, 7, 7, 224]


def test_a_request_that_came_and_left_at_once_is_not_counted_for_ever() -> None:
    """Submitted and aborted between two steps: the queue is as empty as before."""
    crowd = Crowd(max_queued_requests=2)
    for number in range(20):
        crowd.submit(request(f"r{number}", [20], "a"))
        crowd.engine.abort(f"r{number}")
        if number == 0:
            crowd.open.set()
        crowd.consumers[f"r{number}"].wait()
    crowd.finish()
    assert crowd.engine.stats().num_waiting == 0


# --- what a client is told -----------------------------------------------------------------------


def test_progress_tells_place_and_tokens() -> None:
    """The place is the one in the order of service, not of arrival."""
    reached, go_on = threading.Event(), threading.Semaphore(0)

    def hold(kind: str, spans: Sequence[Span]) -> None:
        reached.set()
        assert go_on.acquire(timeout=30)

    with Engine(HashExecutor(limits(num_slots=1), before=hold), eos_token_ids=[EOS]) as engine:
        consumers = [Consumer() for _ in range(4)]
        engine.submit(request("runs", [5] * 40, "a"), consumers[0])
        assert reached.wait(30)
        engine.submit(request("a1", [20] * 3, "a"), consumers[1])
        engine.submit(request("a2", [21] * 3, "a"), consumers[2])
        engine.submit(request("b1", [22] * 3, "b"), consumers[3])
        # Not in the queue yet: they come behind all that is.
        assert engine.progress("b1") == Progress("waiting", 0, 3, 2)
        reached.clear()
        go_on.release()
        assert reached.wait(30)
        assert engine.progress("runs") == Progress("prefill", 16, 40, 0)
        places = {name: engine.progress(name) for name in ("a1", "a2", "b1")}
        assert places["a1"] == Progress("waiting", 0, 3, 0)
        assert places["b1"] == Progress("waiting", 0, 3, 1)
        assert places["a2"] == Progress("waiting", 0, 3, 2)
        go_on.release(1000)
        for consumer in consumers:
            consumer.wait()
        assert engine.progress("runs") is None


# --- the queue by itself -------------------------------------------------------------------------


def waiting(name: str, length: int, principal: str) -> Generated:
    item = request(name, [3] * length, principal)
    return new_sequence(item, limits(sequence_length=1000), frozenset(), lambda delta: None, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_backlogged_principals_are_served_alike(seed: int) -> None:
    """However long their prompts are, nobody who waits falls behind by more than two turns."""
    rng = random.Random(seed)
    names = ["a", "b", "c"][: rng.randint(2, 3)]
    longest = {name: rng.choice([1, 10, 200]) for name in names}
    queue = FairQueue(16)
    served = dict.fromkeys(names, 0)

    def refill(name: str) -> None:
        queue.add(waiting(name, rng.randint(1, longest[name]), name))

    for name in names:
        for _ in range(rng.randint(2, 6)):
            refill(name)
    for _ in range(300):
        sequence = queue.in_order()[0]
        queue.start(sequence, sequence.num_prompt_tokens)
        name = sequence.request.principal
        served[name] += 16 + sequence.num_prompt_tokens
        refill(name)
        assert max(served.values()) - min(served.values()) <= 2 * (16 + max(longest.values()))


def test_time_away_gives_no_credit() -> None:
    """Who comes back is served in turn with those who stayed, not before them for a long while."""
    queue = FairQueue(16)
    for name in ("back", "stays"):
        queue.add(waiting(name, 10, name))
    queue.start(queue.in_order()[0], 10)
    for _ in range(50):
        queue.add(waiting("stays", 10, "stays"))
        queue.start(queue.in_order()[0], 10)
    for name in ("back", "stays"):
        for _ in range(4):
            queue.add(waiting(name, 10, name))
    order = [sequence.request.principal for sequence in queue.in_order()][:8]
    assert 3 <= order.count("back") <= 5


def test_new_principals_do_not_put_a_served_one_off_for_ever() -> None:
    """Each newcomer is served once; whoever had a long turn before comes next in a bounded time."""
    queue = FairQueue(16)
    for name, length in (("old", 500), ("old again", 1)):
        queue.add(waiting(name, length, "old"))
    queue.add(waiting("other", 1, "other"))
    for sequence in queue.in_order()[:2]:
        queue.start(sequence, sequence.num_prompt_tokens)
    for number in range(200):
        queue.add(waiting(f"new{number}", 1, f"new{number}"))
        first = queue.in_order()[0]
        queue.start(first, 1)
        if first.request.request_id == "old again":
            break
    assert 0 < number < 100


def test_what_gave_its_memory_up_comes_first_and_pays_once() -> None:
    """It had its turn already: it neither queues up again nor is its principal charged twice."""
    queue = FairQueue(16)
    for name in ("a", "b"):
        for number in range(3):
            queue.add(waiting(f"{name}{number}", 10, name))
    first = queue.in_order()[0]
    queue.start(first, 10)
    before = queue.in_order()
    queue.put_back(first)
    assert queue.in_order() == (first, *before)
    queue.start(first, 10)
    assert queue.in_order() == before
    queue.put_back(first)
    queue.remove(first)
    assert queue.in_order() == before
    for sequence in before:
        queue.remove(sequence)
    assert not queue and queue.in_order() == ()


def test_salt_separates_what_is_computed() -> None:
    """One principal's requests share prefixes only under the same salt."""
    prompt = tuple(range(2, 42))
    with Engine(HashExecutor(limits()), eos_token_ids=[EOS]) as engine:
        cached = []
        for number, salt in enumerate(("", "x", "x", "")):
            item = GenerateRequest(
                f"r{number}", prompt, SamplingParams(max_tokens=1), principal="p", cache_salt=salt
            )
            cached.append(run(engine, item).last.usage.num_cached_tokens)
    assert cached == [0, 0, 39, 39]
