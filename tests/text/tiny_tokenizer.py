"""A small real tokenizer: byte-level BPE with a few merges and the control tokens of Qwen3.

Writes the files of a model directory (`tokenizer.json`, `tokenizer_config.json`, a template), so
tests read it the way a model is read. Trained on a fixed text, hence the same everywhere.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
FORMAT_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

_CORPUS = (
    "The user asks the assistant and the assistant answers the user with a tool call.",
    "Some function arguments are names, some are numbers: 1, 20, 300; others are text.",
    "im_start im_end think tool_response system user assistant tool",
    "Größe 你好 мир 🙂 naïve",
)

# The word borders of GPT-4-like tokenizers: contractions, words, single digits, marks, blanks.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_backend(vocab_size: int = 400) -> tokenizers.Tokenizer:
    """The tokenizer without files."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS * 3, trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(token, normalized=False) for token in FORMAT_TOKENS])
    return backend


def write_tiny_tokenizer(directory: Path, template: str | None = None) -> Path:
    """Writes a model directory's tokenizer files and returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    build_backend().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory
