"""Whatever happens to a request, nothing of it stays behind and everybody is told."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ellm_serve.errors import (
    DeadlineExceeded,
    EngineError,
    Overloaded,
    Unavailable,
    WorkerDied,
)
from ellm_serve.metrics import Gauges
from ellm_serve.request import FinishReason
from tests.engine.doubles import step_error
from tests.serve.client import samples
from tests.serve.frames import Told, read, told
from tests.serve.scripted import IM_END, Harness, harness, run, tokenizer, until

TEXT = "Hello there, world. This is a test."
LONG: dict[str, Any] = {"max_tokens": 1500}


@pytest.fixture
def served() -> Iterator[Harness]:
    with harness() as scripted:
        yield scripted


def ended(served: Harness, reason: str) -> float:
    """How many sequences ended for a reason, as /metrics says."""
    page = served.metrics.render(Gauges()).decode()
    return next(
        value
        for name, labels, value in samples(page)
        if name == "vllm:request_success_total" and labels["finished_reason"] == reason
    )


async def idle(served: Harness) -> None:
    """Waits until the engine has nothing to do."""

    def nothing() -> bool:
        stats = served.engine.stats()
        return not (stats.num_waiting or stats.num_prefilling or stats.num_decoding)

    await asyncio.wait_for(until(nothing), 30)


async def decoding(served: Harness, count: int = 1) -> None:
    await asyncio.wait_for(until(lambda: served.engine.stats().num_decoding >= count), 30)


async def waiting(served: Harness, count: int = 1) -> None:
    def found() -> bool:
        stats = served.engine.stats()
        return stats.num_waiting + stats.num_prefilling >= count

    await asyncio.wait_for(until(found), 30)


def slowly(served: Harness) -> None:
    """Lets the model say something long, a token every few milliseconds."""
    served.script.pause_s = 0.003


# --- clients that leave --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("endpoint", ["complete", "chat"])
def test_cancelled_while_decoding(served: Harness, endpoint: str, n: int) -> None:
    """A whole answer that nobody waits for any more."""
    slowly(served)
    ask: Callable[..., Any] = getattr(served, endpoint)

    async def scene() -> None:
        task = asyncio.create_task(ask(n=n, **LONG, temperature=1.0))
        await decoding(served, n)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(served)

    run(scene())
    assert ended(served, "abort") == n
    assert served.contexts[-1].log["finish_reason"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
def test_cancelled_before_its_turn(served: Harness, stream: bool) -> None:
    """In the queue or in prefill."""
    served.script.gate.clear()

    async def scene() -> None:
        tasks = [asyncio.create_task(served.complete(**LONG)) for _ in range(3)]
        await waiting(served, 3)
        stream_ = await served.complete(stream=True, **LONG) if stream else None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if stream_ is not None:
            await stream_.aclose()
        served.script.gate.set()
        await idle(served)

    run(scene())
    assert ended(served, "abort") == 3 + stream
    # The block that was in flight may have come to its first token.
    assert served.engine.stats().steps.num_output_tokens <= 3


@pytest.mark.parametrize("events", [0, 3])
@pytest.mark.parametrize("drop", [False, True])
def test_a_stream_that_is_left(served: Harness, events: int, drop: bool) -> None:
    """Closed or forgotten, before its first event or after some."""
    slowly(served)

    async def scene() -> None:
        stream = await served.chat(stream=True, **LONG)
        for _ in range(events):
            await anext(stream)
        if drop:
            del stream
            gc.collect()
        else:
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        await idle(served)
        await asyncio.sleep(0)

    run(scene())
    assert ended(served, "abort") == 1


def test_cancelled_while_it_waits_for_an_event(served: Harness) -> None:
    """As a server does when its client hangs up."""
    served.script.gate.clear()

    async def scene() -> None:
        stream = await served.complete(stream=True, **LONG)
        task = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended(served, "abort") == 1
        served.script.gate.set()
        await idle(served)

    run(scene())


def test_cancelled_while_its_prompt_is_read(served: Harness) -> None:
    """Nothing was submitted yet, and nothing will be."""

    async def scene() -> None:
        task = asyncio.create_task(served.complete(prompt="hello " * 1000, **LONG))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(served)

    run(scene())
    assert served.engine.stats().steps.num_prompt_tokens == 0


def test_a_stop_string_ends_the_work(served: Harness) -> None:
    """The engine goes no further than it has to; it counts as a stop, and not as an abort."""
    slowly(served)
    served.say(TEXT)
    answer = run(served.complete(stop=["there"], max_tokens=1500))
    assert answer.usage.completion_tokens == len(tokenizer.encode("Hello there"))
    run(idle(served))
    finished = served.engine.stats().steps.finished
    assert (finished[FinishReason.STOP], finished[FinishReason.ABORT]) == (1, 0)
    assert ended(served, "stop") == 1


def test_one_answer_stops_and_the_others_go_on(served: Harness) -> None:
    """Every answer of a request has its own end."""
    served.say(TEXT, IM_END)

    async def scene() -> Told:
        stream = await served.complete(stream=True, prompt=["Hi", "Hi you."], max_tokens=5)
        return await read(stream)

    assert sorted(run(scene()).ends()) == [(0, "length", None), (1, "length", None)]


# --- deadlines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_that_has_passed(served: Harness, stream: bool) -> None:
    """Nothing is started."""
    context = served.context(deadline=time.monotonic() - 1)
    with pytest.raises(DeadlineExceeded):
        run(served.complete(context, stream=stream))
    assert served.engine.stats().num_waiting == 0


def test_a_deadline_before_the_first_token(served: Harness) -> None:
    """Ends the request, whether it waits for all of the answer or for its first piece."""
    served.script.gate.clear()

    async def scene() -> Told:
        context = served.context(deadline=time.monotonic() + 0.05)
        with pytest.raises(DeadlineExceeded):
            await served.complete(context, **LONG)
        context = served.context(deadline=time.monotonic() + 0.05)
        found = await read(await served.complete(context, stream=True, **LONG))
        served.script.gate.set()
        await idle(served)
        return found

    found = run(scene())
    assert not found.done
    (chunk,) = found.chunks
    assert chunk["error"]["code"] == 504
    assert ended(served, "abort") == 2


def test_a_deadline_in_the_middle(served: Harness) -> None:
    """The part that was sent is followed by an error, and not by [DONE]."""
    slowly(served)

    async def scene() -> Told:
        context = served.context(deadline=time.monotonic() + 0.5)
        found = await read(await served.chat(context, stream=True, **LONG))
        await idle(served)
        return found

    found = run(scene())
    assert not found.done and found.ends() == [] and found.text()
    assert found.chunks[-1]["error"]["type"] == "Gateway Timeout"


def test_a_deadline_that_was_met(served: Harness) -> None:
    """Leaves no timer behind."""
    served.say("Hi", IM_END)

    async def scene() -> None:
        context = served.context(deadline=time.monotonic() + 0.5)
        answer = await served.complete(context)
        await asyncio.sleep(0.6)
        assert answer.choices[0].text == "Hi"

    run(scene())
    assert (ended(served, "stop"), ended(served, "abort")) == (1, 0)


# --- failures ------------------------------------------------------------------------------------


def test_a_failure_before_the_first_token(served: Harness) -> None:
    """An error for those who wait for the whole; an event for those who stream."""
    served.script.fail = step_error()
    with pytest.raises(EngineError):
        run(served.complete(**LONG))
    served.script.fail = step_error()

    async def scene() -> Told:
        return await read(await served.complete(stream=True, **LONG))

    found = run(scene())
    assert [list(chunk) for chunk in found.chunks] == [["error"]]
    assert found.chunks[0]["error"]["code"] == 500 and not found.done
    assert ended(served, "error") == 2
    assert served.contexts[-1].log["error"] == "InternalServerError"


def test_a_failure_in_the_middle(served: Harness) -> None:
    """All answers of the request end with it; the next request is served."""
    slowly(served)
    served.say(TEXT * 20)

    async def scene() -> Told:
        stream = await served.chat(stream=True, n=2, temperature=1.0, **LONG)
        items = [await anext(stream), await anext(stream)]
        served.script.fail = step_error()
        items += [item async for item in stream]
        await idle(served)
        return told(items)

    found = run(scene())
    assert "error" in found.chunks[-1] and not found.done and found.ends() == []
    assert "lost" not in str(found.chunks[-1])
    assert ended(served, "error") == 2
    served.say("Hi", IM_END)
    assert run(served.complete()).choices[0].text == "Hi"


def test_a_dead_worker(served: Harness) -> None:
    """503 with a time to come back, now and from now on."""
    served.script.fail = WorkerDied("a thread is gone")
    with pytest.raises(Unavailable) as caught:
        run(served.complete(**LONG))
    assert caught.value.retry_after_s > 0
    with pytest.raises(Unavailable):
        run(served.complete(stream=True, **LONG))


def test_a_server_that_ends(served: Harness) -> None:
    """What still runs is told so."""
    slowly(served)

    async def scene() -> Told:
        stream = await served.chat(stream=True, **LONG)
        items = [await anext(stream)]
        await asyncio.to_thread(served.engine.close)
        return told([*items, *[item async for item in stream]])

    found = run(scene())
    assert found.chunks[-1]["error"]["code"] == 503 and not found.done


def test_a_mistake_of_ours_ends_the_generation(served: Harness) -> None:
    """The HTTP layer gets to see it, and nothing goes on behind it."""
    slowly(served)

    async def scene() -> None:
        stream = await served.complete(stream=True, **LONG)
        await anext(stream)
        stream._writer = None
        with pytest.raises(AttributeError):
            await anext(stream)
        await idle(served)

    run(scene())
    assert ended(served, "abort") == 1


# --- the queue -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_all_of_a_request_or_nothing(stream: bool) -> None:
    """If one of its sequences finds no room, those that had found it give theirs back."""
    with harness(num_slots=1, max_queued_requests=4) as served:
        served.script.gate.clear()

        async def scene() -> None:
            first = asyncio.create_task(served.complete(**LONG))
            await waiting(served)
            second = asyncio.create_task(served.complete(**LONG))
            await waiting(served, 2)
            with pytest.raises(Overloaded) as caught:
                await served.complete(prompt=["Hi"] * 4, stream=stream, **LONG)
            assert caught.value.retry_after_s >= 1
            assert ended(served, "abort") == 0
            for task in (first, second):
                task.cancel()
            await asyncio.gather(first, second, return_exceptions=True)
            served.script.gate.set()
            await idle(served)

        run(scene())
        assert served.engine.stats().steps.num_output_tokens <= 1


def test_progress_in_words() -> None:
    """Place in the queue, then how much of the prompt is done, then nothing."""
    with harness(num_slots=1) as served:
        served.script.gate.clear()
        served.say("Hi", IM_END)

        async def scene() -> None:
            running = await served.complete(served.context(), stream=True, prompt=[5] * 100)
            await until(lambda: served.engine.stats().num_prefilling == 1)
            queued = [
                await served.complete(served.context(), stream=True, prompt=[7] * 50)
                for _ in range(2)
            ]
            await waiting(served, 3)
            said = [context.describe_progress() for context in served.contexts]
            assert said == ["prefill 0/100", "waiting 0 ahead", "waiting 1 ahead"]
            served.script.gate.set()
            for stream in (running, *queued):
                assert (await read(stream)).done
            assert [context.describe_progress() for context in served.contexts] == [None] * 3

        run(scene())


def test_what_the_access_log_gets(served: Harness) -> None:
    """Numbers of the whole request; a session's name only if it is fit for a line of text."""
    served.say("Hello", IM_END)
    prompt = list(range(50))
    for name in ("a\nb", "conversation-1", "conversation-1"):
        run(served.complete(prompt=prompt, session_id=name))
    first, _, second = served.contexts
    assert (first.session_id, second.session_id) == (None, "conversation-1")
    log = dict(second.log)
    times = [log.pop(name) for name in ("queue_s", "prefill_s", "decode_s")]
    assert log == {
        "stream": False,
        "n": 1,
        "prompt_tokens": 50,
        "cached_tokens": 49,
        "output_tokens": len(tokenizer.encode("Hello")) + 1,
        "finish_reason": "stop",
    }
    assert all(isinstance(seconds, float) and 0 <= seconds < 60 for seconds in times)


def test_many_at_once_get_their_own_texts() -> None:
    """Eight clients over four slots, streams and whole answers mixed."""
    with harness() as served:
        texts = {20 + i: f"Hello {i} " * 5 for i in range(8)}
        served.script.answers = {
            token: [*tokenizer.encode(text), IM_END] for token, text in texts.items()
        }

        async def one(token: int) -> str:
            body: dict[str, Any] = {"prompt": [token, token], "max_tokens": 200}
            if token % 2:
                return (await read(await served.complete(stream=True, **body))).text()
            return str((await served.complete(**body)).choices[0].text)

        async def scene() -> list[str]:
            return await asyncio.gather(*map(one, texts))

        assert run(scene()) == list(texts.values())
