"""Completions: the same text whole and in pieces, and every way to ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ellm_serve.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from tests.serve.frames import Told, read
from tests.serve.scripted import END_OF_TEXT, IM_END, Harness, harness, run, tokenizer

TEXT = "Hello there, world. 世界 🙂 This is a test."


@pytest.fixture(scope="module")
def served() -> Iterator[Harness]:
    with harness() as scripted:
        yield scripted


def whole(served: Harness, **body: Any) -> Any:
    return run(served.complete(**body))


def streamed(served: Harness, **body: Any) -> Told:
    async def ask() -> Told:
        return await read(await served.complete(stream=True, **body))

    return run(ask())


# --- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text", "end"),
    [
        ({}, TEXT, ("stop", None)),
        ({"stop": "world"}, "Hello there, ", ("stop", "world")),
        ({"stop": "界 🙂", "include_stop_str_in_output": True}, TEXT[:24], ("stop", "界 🙂")),
        ({"stop": ["zzz", "test", "a t"]}, TEXT[:-7], ("stop", "a t")),
        ({"stop": ["never"]}, TEXT, ("stop", None)),
        ({"max_tokens": 3}, "Hell", ("length", None)),
        ({"max_tokens": 3, "stop": "ello"}, "Hell", ("length", None)),
        ({"stop": "H", "min_tokens": 2}, TEXT, ("stop", None)),
        ({"stop_token_ids": [13]}, "Hello there, world", ("stop", 13)),
        (
            {"stop_token_ids": [13], "include_stop_str_in_output": True},
            "Hello there, world.",
            ("stop", 13),
        ),
        ({"skip_special_tokens": False}, TEXT, ("stop", None)),
        ({"ignore_eos": True, "max_tokens": 40, "stop": "HH"}, TEXT, ("stop", "HH")),
    ],
)
def test_text_and_end(
    served: Harness, options: dict[str, Any], text: str, end: tuple[str, object]
) -> None:
    """Stop strings over several tokens, characters of several tokens; whole and in pieces."""
    served.say(TEXT, IM_END)
    body = {"max_tokens": 60} | options
    answer = whole(served, **body)
    (choice,) = answer.choices
    assert (choice.text, (choice.finish_reason, choice.stop_reason)) == (text, end)
    pieces = streamed(served, **body, stream_options={"include_usage": True})
    assert pieces.text() == text
    assert pieces.ends() == [(0, *end)]
    assert pieces.done
    assert pieces.chunks[-1]["usage"]["completion_tokens"] == answer.usage.completion_tokens


def test_other_end_ids_are_named(served: Harness) -> None:
    """Only the tokenizer's own end id goes without saying."""
    served.say("Hi", END_OF_TEXT)
    choice = whole(served, return_token_ids=True).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("Hi", "stop", END_OF_TEXT)
    assert choice.token_ids == [39, 72, END_OF_TEXT]
    assert choice.prompt_token_ids == [39, 72]


def test_half_a_character_at_the_end(served: Harness) -> None:
    """What max_tokens cuts off is U+FFFD, once, and not lost."""
    emoji = tokenizer.encode("🙂")
    assert len(emoji) == 4
    served.script.say([39, *emoji])
    assert whole(served, max_tokens=3).choices[0].text == "H\ufffd"
    assert streamed(served, max_tokens=3).text() == "H\ufffd"


tokens = st.lists(st.integers(0, 2012).filter(lambda token: token != IM_END), max_size=12)


@settings(max_examples=40)
@given(token_ids=tokens, stop=st.lists(st.text("Hel 世\ufffd", min_size=1, max_size=3), max_size=3))
def test_pieces_make_the_whole(served: Harness, token_ids: list[int], stop: list[str]) -> None:
    """Whatever is said and whatever stops it."""
    served.script.say([*token_ids, IM_END])
    body = {"max_tokens": 20, "stop": stop, "skip_special_tokens": False}
    choice = whole(served, **body).choices[0]
    pieces = streamed(served, **body)
    assert pieces.text() == choice.text
    assert pieces.ends() == [(0, choice.finish_reason, choice.stop_reason)]


# --- several answers -----------------------------------------------------------------------------


def test_prompts_times_n(served: Harness) -> None:
    """Answers come prompt by prompt; a prompt counts once, however many answers it has."""
    served.say("Hi you", IM_END)
    answer = whole(served, prompt=["Hi", "Hi you."], n=3, temperature=1.0, return_token_ids=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    prompts = [choice.prompt_token_ids for choice in answer.choices]
    assert prompts == [[39, 72]] * 3 + [[39, 72, 666, 13]] * 3
    assert answer.usage.prompt_tokens == 2 + 4
    assert answer.usage.completion_tokens == sum(len(one.token_ids) for one in answer.choices)
    assert answer.usage.total_tokens == 6 + answer.usage.completion_tokens


def test_stream_of_several_answers(served: Harness) -> None:
    """Each chunk is of one answer; each answer ends once; ids of a prompt come once."""
    served.say(TEXT, IM_END)
    pieces = streamed(served, n=3, temperature=1.0, max_tokens=60, return_token_ids=True)
    assert all(len(chunk["choices"]) == 1 for chunk in pieces.chunks)
    assert [pieces.text(index) for index in range(3)] == [TEXT] * 3
    assert sorted(pieces.ends()) == [(index, "stop", None) for index in range(3)]
    for index in range(3):
        mine = [choice for choice in pieces.choices if choice["index"] == index]
        assert [one["prompt_token_ids"] for one in mine] == [[39, 72]] + [None] * (len(mine) - 1)
        token_ids = [token for one in mine for token in one["token_ids"]]
        assert token_ids == [*tokenizer.encode(TEXT), IM_END]


def test_seeds_of_several_answers(served: Harness) -> None:
    """The i-th answer has the i-th seed after the one given."""
    seen = []
    submit = served.engine.submit

    def spy(request: Any, on_delta: Any, grammar: Any) -> None:
        seen.append((request.sampling.seed, request.priority, request.session_key))
        submit(request, on_delta, grammar=grammar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.engine, "submit", spy)
        whole(served, n=3, temperature=1.0, seed=7, priority=-2, session_id="mine")
        whole(served, context=served.context(session_id="head", priority=3))
    assert seen[:3] == [(7, -2, "mine"), (8, -2, "mine"), (9, -2, "mine")]
    assert seen[3:] == [(None, 3, "head")]


def test_more_than_the_queue_could_hold() -> None:
    """Refused for good, and not with an invitation to try again."""
    with harness(max_queued_requests=8) as served:
        assert len(run(served.complete(prompt=["Hi"] * 7)).choices) == 7
        with pytest.raises(InvalidRequest, match="are 8 sequences"):
            run(served.complete(prompt=["Hi"] * 4, n=2, temperature=1.0))


# --- echo and log-probabilities ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [("Hi 世界", "Hi 世界"), ([39, 72, 666], "Hi you"), ([2002, 39], "<|im_start|>H")],
)
def test_echo(served: Harness, prompt: Any, shown: str) -> None:
    """The prompt's text comes first, also of a prompt that was given as ids."""
    served.say("Hello", IM_END)
    assert whole(served, prompt=prompt, echo=True).choices[0].text == shown + "Hello"
    assert streamed(served, prompt=prompt, echo=True).text() == shown + "Hello"


def test_echo_alone(served: Harness) -> None:
    """Scoring: the prompt with its log-probabilities, and nothing else."""
    choice = whole(served, prompt="Hi you", echo=True, max_tokens=0, logprobs=1).choices[0]
    assert choice.text == "Hi you"
    assert choice.logprobs.tokens == ["H", "i", " you"]
    assert choice.logprobs.token_logprobs[0] is None
    assert [len(one) for one in choice.prompt_logprobs[1:]] == [2, 2]
    assert choice.prompt_logprobs[1][72].decoded_token == "i"


def test_logprobs_have_places_and_distinct_names(served: Harness) -> None:
    """Single bytes of a character are told apart, and offsets count characters of the text."""
    served.say("a🙂b", IM_END)
    body = {"prompt": "é", "echo": True, "logprobs": 3, "max_tokens": 10}
    answer = whole(served, **body)
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert choice.text == "éa🙂b"
    half = [name for name in logprobs.tokens if name.startswith("bytes:")]
    assert half[-4:] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82"]
    assert logprobs.text_offset[-7:] == [1, 2, 2, 2, 2, 3, 4]
    assert logprobs.tokens[-2:] == ["b", "<|im_end|>"]
    for name, top in list(zip(logprobs.tokens, logprobs.top_logprobs, strict=True))[1:]:
        assert next(iter(top)) == name and len(top) in (3, 4)
    pieces = [one["logprobs"] for one in streamed(served, **body).choices]
    for key in ("text_offset", "tokens", "token_logprobs", "top_logprobs"):
        joined = [item for piece in pieces for item in piece[key]]
        assert joined == getattr(logprobs, key)


def test_tokens_as_ids(served: Harness) -> None:
    """Names that are never ambiguous."""
    served.say("Hi", IM_END)
    logprobs = whole(served, logprobs=0, return_tokens_as_token_ids=True).choices[0].logprobs
    assert logprobs.tokens == ["token_id:39", "token_id:72", "token_id:2000"]
    assert [list(top) for top in logprobs.top_logprobs] == [[name] for name in logprobs.tokens]


# --- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [0, 1, 2]),
        ({"truncate_prompt_tokens": 100}, list(range(10))),
    ],
)
def test_truncation(served: Harness, options: dict[str, Any], kept: list[int]) -> None:
    """The end of a prompt stays, unless the other side is asked for."""
    answer = whole(served, prompt=list(range(10)), return_token_ids=True, max_tokens=1, **options)
    assert answer.choices[0].prompt_token_ids == kept


def test_truncation_to_a_slot(served: Harness) -> None:
    """-1: as long as possible, with room for a token of output."""
    answer = whole(served, prompt=[5] * 3000, truncate_prompt_tokens=-1, max_tokens=5)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2047, 1)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ({"prompt": "x " * 3000}, ContextLengthExceeded, "at least 2049 input tokens"),
        ({"prompt": [5] * 2100}, ContextLengthExceeded, "contains 2100 input tokens"),
        ({"prompt": "x" * 70_000}, InvalidRequest, "contains 70000 characters"),
        ({"prompt": [5, 5000]}, InvalidRequest, "Token id 5000 is out of vocabulary"),
        ({"prompt": [[5], [2048]]}, InvalidRequest, "Token id 2048 is out of vocabulary"),
        ({"bad_words": [" "]}, InvalidRequest, "empty word"),
        ({"n": 5, "temperature": 1.0}, InvalidRequest, "n must be at most 4"),
        ({"model": "nope"}, ModelNotFound, "nope"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_come_first(
    served: Harness, body: dict[str, Any], error: type[Exception], message: str, stream: bool
) -> None:
    """Before anything is generated, streamed or not; the next request is answered."""
    with pytest.raises(error, match=message):
        run(served.complete(stream=stream, **body))
    assert served.engine.stats().num_waiting == 0
    served.say("Hi", IM_END)
    assert whole(served).choices[0].text == "Hi"


def test_bad_words(served: Harness) -> None:
    """The model cannot say them, neither first nor after a blank."""
    served.say("Hello there", IM_END)
    text = whole(served, bad_words=["there"], max_tokens=10, ignore_eos=True).choices[0].text
    assert text.startswith("Hello") and "there" not in text


# --- usage and times -----------------------------------------------------------------------------


def test_usage_chunks(served: Harness) -> None:
    """None unless asked for; one at the end; or in every chunk as well."""
    served.say(TEXT, IM_END)
    body = {"max_tokens": 60}
    assert all(
        chunk["choices"] and "usage" not in chunk for chunk in streamed(served, **body).chunks
    )
    end = streamed(served, **body, stream_options={"include_usage": True}).chunks
    assert [("usage" in chunk, len(chunk["choices"])) for chunk in end[-2:]] == [
        (False, 1),
        (True, 0),
    ]
    options = {"include_usage": True, "continuous_usage_stats": True}
    running = [chunk["usage"] for chunk in streamed(served, **body, stream_options=options).chunks]
    counts = [usage["completion_tokens"] for usage in running]
    assert counts == sorted(counts) and counts[-2] == counts[-1] == len(tokenizer.encode(TEXT)) + 1
    assert all(usage["total_tokens"] == 2 + usage["completion_tokens"] for usage in running)


def test_usage_can_be_forced() -> None:
    """By whoever runs the server; the details and the times, too."""
    with harness(
        enable_force_include_usage=True,
        enable_prompt_tokens_details=False,
        enable_per_request_metrics=True,
    ) as served:
        served.say("Hello", IM_END)
        last = streamed(served).chunks[-1]
        assert last["choices"] == [] and "prompt_tokens_details" not in last["usage"]
        assert last["metrics"]["time_to_first_token_ms"] >= last["metrics"]["queue_time_ms"] >= 0
        answer = whole(served)
        assert answer.usage.prompt_tokens_details is None
        assert answer.metrics.tokens_per_second > 0


def test_reuse_is_counted(served: Harness) -> None:
    """All of a prompt but its last token, which gives the first logits."""
    prompt = list(range(100, 180))
    served.say("Hi", IM_END)
    fresh = whole(served, prompt=prompt, cache_salt="one").usage
    again = whole(served, prompt=prompt, cache_salt="one").usage
    other = whole(served, prompt=prompt, cache_salt="two").usage
    cached = [one.prompt_tokens_details.cached_tokens for one in (fresh, again, other)]
    assert cached == [0, 79, 0]


def test_token_times(served: Harness) -> None:
    """Each chunk comes with the engine's time of its last token, as a comment."""
    served.say(TEXT, IM_END)

    async def ask() -> Told:
        context = served.context(token_times=True)
        return await read(await served.complete(context, stream=True, max_tokens=60))

    told = run(ask())
    comments, frames = told.blocks[:-1:2], told.blocks[1:-1:2]
    assert all(frame.startswith("data: {") for frame in frames)
    times = [float(comment.removeprefix(": t=")) for comment in comments]
    assert len(times) == len(frames) and times == sorted(times)
    assert times[0] > served.contexts[-1].received
