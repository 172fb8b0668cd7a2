"""AnswerText: what a reader sees of an answer, however its tokens arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_serve.errors import InvalidRequest
from ellm_serve.text import AnswerText, Tokenizer

_WORDS = ("a", "b", "ab", "ba", "é", "你", "🙂", " ")


@pytest.fixture(scope="module")
def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return {byte: ids[bytes([byte])] for byte in range(256)}


def _ids(text: str, byte_ids: dict[int, int]) -> list[int]:
    """A token for each byte, so that characters lie across tokens."""
    return [byte_ids[byte] for byte in text.encode()]


def _read(answer: AnswerText, pieces: list[list[int]]) -> str:
    return "".join(map(answer.push, pieces)) + answer.finish()


def _search(text: str, strings: list[str], include: bool, first: int) -> tuple[str, str | None]:
    """The first stop string to end behind the first characters; the longest that ends there."""
    for end in range(first + 1, len(text) + 1):
        for string in sorted(strings, key=len, reverse=True):
            if text[:end].endswith(string):
                return text[: end if include else end - len(string)], string
    return text, None


@given(
    words=st.lists(st.sampled_from(_WORDS), max_size=12),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
)
def test_any_split_is_a_search(
    words: list[str],
    stops: list[str],
    cuts: list[int],
    include: bool,
    min_tokens: int,
    tokenizer: Tokenizer,
    byte_ids: dict[int, int],
) -> None:
    """Text and match depend on the tokens alone; stops within `min_tokens` tokens do not count."""
    text = "".join(words)
    ids = _ids(text, byte_ids)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    answer = AnswerText(tokenizer, stops, include, min_tokens=min_tokens)
    shown = _read(answer, [ids[a:b] for a, b in zip(edges, edges[1:], strict=False)])
    first = len(text.encode()[:min_tokens].decode(errors="ignore"))
    assert (shown, answer.matched) == _search(text, stops, include, first)


def test_tokens_of_the_answer_are_counted_up_to_the_stop(
    tokenizer: Tokenizer, byte_ids: dict[int, int]
) -> None:
    """What came in the same piece behind the stop string is no part of the answer."""
    answer = AnswerText(tokenizer, ["b"])
    assert answer.push(_ids("xx", byte_ids)) == "xx"
    assert answer.push(_ids("abcde", byte_ids)) == "a"
    assert (answer.matched, answer.num_tokens) == ("b", 4)
    assert answer.push(_ids("xyz", byte_ids)) == "" == answer.finish()
    assert answer.num_tokens == 4


def test_held_text_comes_at_the_end(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    """Half a stop string and half a character are shown when nothing follows."""
    answer = AnswerText(tokenizer, ["<end>"])
    assert answer.push(_ids("hi <en", byte_ids)) == "hi "
    assert answer.push([byte_ids[0xE4]]) == ""
    assert answer.finish() == "<en\N{REPLACEMENT CHARACTER}"


def test_special_tokens_are_shown_on_request(tokenizer: Tokenizer) -> None:
    """A stop string that spells one is found only in text that shows it."""
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    for skip, text in ((True, ""), (False, "<|im_end|>")):
        assert _read(AnswerText(tokenizer, skip_special=skip), [[end]]) == text
        stopped = AnswerText(tokenizer, ["<|im_end|>"], skip_special=skip)
        assert _read(stopped, [[end]]) == ""
        assert stopped.matched == (None if skip else "<|im_end|>")


def test_bad_stop_strings_are_refused(tokenizer: Tokenizer) -> None:
    """As StopStrings does."""
    with pytest.raises(InvalidRequest):
        AnswerText(tokenizer, [""])
