"""The tokenizer: files, bytes of tokens, and control tokens that a text only spells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_serve.errors import ModelError
from ellm_serve.text import MarkedText, Tokenizer
from ellm_serve.text.control_text import longest_first
from tests.text.tiny_tokenizer import FORMAT_TOKENS, SPECIAL_TOKENS, write_tiny_tokenizer

_spelled = st.lists(
    st.one_of(
        st.sampled_from([*SPECIAL_TOKENS[:3], *FORMAT_TOKENS[-4:], "<|im_", "end|>", "<", "|>"]),
        st.text(alphabet="ab <|>\né🙂", max_size=4),
    ),
    max_size=8,
).map("".join)


@given(_spelled)
def test_text_stays_text(tokenizer: Tokenizer, text: str) -> None:
    """A user who writes "<|im_end|>" had ended the turn and could speak for the system."""
    ids = tokenizer.encode(text)
    assert tokenizer.control_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == text


@given(_spelled)
def test_control_tokens_on_demand(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, allow_special=True)
    spelled = tokenizer.spellings.any_token.findall(text)
    assert [tokenizer.id_to_token(i) for i in ids if i in tokenizer.control_ids] == spelled
    assert tokenizer.decode(ids, skip_special=False) == text


def test_marked_text(tokenizer: Tokenizer) -> None:
    """Literal spans are text, and the text around them is encoded as if they were nothing else."""
    text = "<|im_start|>a <|im_end|> b<|im_end|>"
    start = text.index("<|im_end|>")
    marked = MarkedText(text, ((start, start + 10),))
    ids = tokenizer.encode_marked(marked)
    named = [tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")]
    assert ids == [named[0], *tokenizer.encode("a <|im_end|> b"), named[1]]
    assert tokenizer.encode_marked(MarkedText(text)) == tokenizer.encode(text, allow_special=True)


def test_longest_token_is_found_first() -> None:
    """Of `<a>` and `<a>b` the tokenizer takes the longer one; so must everything else."""
    assert longest_first(["<a>", "<a>b"]).findall("<a>b<a>") == ["<a>b", "<a>"]


@pytest.mark.parametrize("start", [0, 12, 16, 30])
def test_tail_of_marked_text(tokenizer: Tokenizer, start: int) -> None:
    """A session encodes only the new end of a prompt; its literal spans must move along."""
    text = "<|im_start|>a <|im_end|> b<|im_end|>"
    marked = MarkedText(text, ((14, 24),)).tail(start)
    assert marked.text == text[start:]
    num_control = sum(i in tokenizer.control_ids for i in tokenizer.encode_marked(marked))
    assert num_control == (2 if start == 0 else 1 if start < 30 else 0)
    spelled = [marked.text[low:high] for low, high in marked.literal_spans]
    assert spelled == {16: ["im_end|>"], 30: []}.get(start, ["<|im_end|>"])


def test_token_bytes_cover_all_bytes(tokenizer: Tokenizer) -> None:
    """Log-probabilities show bytes: those of half a character too, not U+FFFD's."""
    all_bytes = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= all_bytes
    ids = tokenizer.encode("naïve 🙂 你好")
    assert b"".join(map(tokenizer.token_bytes, ids)) == "naïve 🙂 你好".encode()
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    assert tokenizer.token_bytes(end) == b"<|im_end|>"


def test_ids_without_a_token(tokenizer: Tokenizer) -> None:
    """Models have more logits than their tokenizer has tokens; such an id must not crash."""
    beyond = tokenizer.vocab_size
    assert tokenizer.token_bytes(beyond) == b""
    assert tokenizer.id_to_token(beyond) is None
    assert tokenizer.decode([beyond, *tokenizer.encode("a")]) == "a"


def test_lone_surrogates(tokenizer: Tokenizer) -> None:
    """JSON can carry half a surrogate pair, which no UTF-8 encoder takes: not a server error."""
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude42")) == "🙂"


def test_named_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_id == tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    think = tokenizer.token_to_id("<think>")
    assert think in tokenizer.control_ids
    assert think not in tokenizer.special_ids


def test_special_tokens_map_fills_gaps(tmp_path: Path) -> None:
    """Older checkpoints name their end token only there, as an object."""
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.eos_token_id == tokenizer.token_to_id("<|im_end|>")


def _with_configured(path: Path, shift: int) -> None:
    """Moves the last added token from tokenizer.json to tokenizer_config.json."""
    write_tiny_tokenizer(path)
    file, config_file = path / "tokenizer.json", path / "tokenizer_config.json"
    spec, config = json.loads(file.read_text()), json.loads(config_file.read_text())
    token = spec["added_tokens"].pop()
    config["added_tokens_decoder"] = {str(token.pop("id") + shift): token}
    file.write_text(json.dumps(spec))
    config_file.write_text(json.dumps(config))


def test_token_that_only_the_config_lists(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Without it `</think>` would be three ordinary tokens in every prompt."""
    _with_configured(tmp_path, shift=0)
    text = "<think></think>"
    loaded = Tokenizer.from_dir(tmp_path)
    assert loaded.encode(text, allow_special=True) == tokenizer.encode(text, allow_special=True)


def test_configured_token_with_another_id(tmp_path: Path) -> None:
    _with_configured(tmp_path, shift=1)
    with pytest.raises(ModelError, match="</think>"):
        Tokenizer.from_dir(tmp_path)


def test_truncation_in_the_file_is_ignored(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Files saved after training may cut every prompt to the length of the training samples."""
    write_tiny_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    spec = json.loads(file.read_text())
    spec["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    file.write_text(json.dumps(spec))
    assert Tokenizer.from_dir(tmp_path).encode("a b c d", allow_special=True) == tokenizer.encode(
        "a b c d"
    )


def test_control_token_in_the_vocabulary(tmp_path: Path) -> None:
    """With `ignore_merges` a word of the vocabulary is one token, be it a control token or not."""
    write_tiny_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    spec = json.loads(file.read_text())
    spec["model"]["ignore_merges"] = True
    spec["model"]["vocab"] |= {t["content"]: t["id"] for t in spec["added_tokens"]}
    spec["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    file.write_text(json.dumps(spec))
    tokenizer = Tokenizer.from_dir(tmp_path)
    ids = tokenizer.encode("<|im_end|>")
    assert tokenizer.control_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == "<|im_end|>"


def test_missing_or_unsupported_files(tmp_path: Path) -> None:
    """A start-up mistake is one line that tells what to do."""
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text('{"decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}}')
    with pytest.raises(ModelError, match="byte-level"):
        Tokenizer.from_dir(tmp_path)
    file.write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        Tokenizer.from_dir(tmp_path)
