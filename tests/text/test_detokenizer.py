"""Text from tokens: never half a character, never a lost byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_serve.text import IncrementalDetokenizer, Tokenizer

# Bytes around the borders of what UTF-8 allows, and short runs of good text.
_chunks = st.one_of(
    st.binary(max_size=4),
    st.text(max_size=3).map(lambda text: text.encode("utf-8", "replace")),
    st.sampled_from(
        [b"\xe4\xb8", b"\xf0\x9f\x99", b"\xed\xa0\x80", b"\xf4\x90", b"\xc0\xaf", b"\xff", b"\x80"]
    ),
)


def _byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return {byte: ids[bytes([byte])] for byte in range(256)}


@pytest.fixture(scope="module")
def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    return _byte_ids(tokenizer)


def _incomplete(tail: bytes) -> bool:
    """Whether some continuation makes `tail` one valid character."""
    second = [bytes([b]) for b in range(0x80, 0xC0)]
    fills = [b"", b"\x80", b"\x80\x80"]
    return any(_is_character(tail + a + b) for a in second for b in fills)


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


@given(st.lists(_chunks, max_size=8))
def test_text_is_that_of_all_bytes(
    tokenizer: Tokenizer, byte_ids: dict[int, int], chunks: list[bytes]
) -> None:
    """Invalid bytes held back for ever had swallowed all the text behind them."""
    data = b"".join(chunks)
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = ""
    for i, byte in enumerate(data):
        text += detokenizer.push(byte_ids[byte])
        pending = detokenizer.pending
        assert text == data[: i + 1 - len(pending)].decode("utf-8", "replace")
        assert not pending or _incomplete(pending)
    assert text + detokenizer.flush() == data.decode("utf-8", "replace")
    assert detokenizer.flush() == ""


@given(st.lists(st.integers(0, 450), max_size=30), st.booleans())
def test_any_tokens(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    """Streamed text is that of a reply in one piece; ids without a token add nothing."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=skip)
    streamed = detokenizer.push_all(ids) + detokenizer.flush()
    assert streamed == tokenizer.decode(ids, skip_special=skip)


def test_invalid_bytes_are_released_at_once(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    """Two bytes of a three-byte character and then ASCII: one mark, and the text goes on."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push(byte_ids[b]) for b in b"\xe4\xb8A"] == ["", "", "\ufffdA"]


def test_cut_character_is_flushed_once(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    """max_tokens may cut a character; its bytes must not vanish without a trace."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push_all(byte_ids[b] for b in b"ok\xf0\x9f") == "ok"
    assert (detokenizer.flush(), detokenizer.flush()) == ("\ufffd", "")


def test_special_tokens(tokenizer: Tokenizer) -> None:
    """Turn marks are hidden by default; format marks such as `<think>` are for the parsers."""
    ids = tokenizer.encode("<think>a</think><|im_end|>", allow_special=True)
    assert IncrementalDetokenizer(tokenizer).push_all(ids) == "<think>a</think>"
    shown = IncrementalDetokenizer(tokenizer, skip_special=False).push_all(ids)
    assert shown == "<think>a</think><|im_end|>"
