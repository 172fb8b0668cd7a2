"""Flags that several verbs share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ellm_serve.llm import LLM
    from ellm_serve.request import SamplingParams

_ENGINE = (
    "model", "revision", "sequence_length", "batch_size", "threads", "offline", "cache_dir",
    "sockets", "expert_split", "workers", "housekeeping_cores", "keep_weights",
)  # fmt: skip
_SAMPLING = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed",
)  # fmt: skip


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, and how large an engine."""
    parser.add_argument(
        "--model", default="builtin", help="directory, Hugging Face id, or builtin (default)"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    parser.add_argument("--cache-dir", help="where downloads are kept")
    parser.add_argument("--offline", action="store_true", default=None, help="never download")
    parser.add_argument(
        "--sequence-length", "--max-model-len", type=int, help="positions per slot (default: fits)"
    )
    parser.add_argument(
        "--batch-size", "--max-num-seqs", type=int, help="slots, and rows of a decode step"
    )
    parser.add_argument("--threads", type=int, help="compute threads (default: all cores)")
    parser.add_argument(
        "--sockets", type=_auto_or_count, metavar="auto|N",
        help="cut the model over sockets, each a Ray worker (default: one, in this process)",
    )  # fmt: skip
    parser.add_argument(
        "--expert-split", choices=("slice", "whole"), help="how experts are cut (default: slice)"
    )
    parser.add_argument(
        "--workers", choices=("threads", "ray"), help="sockets in this process, or Ray workers"
    )
    parser.add_argument(
        "--housekeeping-cores", type=int, metavar="N", help="cores left free of compute threads"
    )
    parser.add_argument(
        "--keep-weights", action="store_true", default=None,
        help="Ray workers' packed weights stay in shared memory for a faster start",
    )  # fmt: skip


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, as fields of `EngineConfig`."""
    given = {name: value for name in _ENGINE if (value := vars(args)[name]) is not None}
    if "workers" not in given and given.get("sockets", 1) != 1:
        given["workers"] = "ray"
    return given


def _auto_or_count(text: str) -> int | str:
    return text if text == "auto" else int(text)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen; what is not given comes from the model's generation_config.json."""
    parser.add_argument("--max-tokens", type=int, help="most tokens to generate")
    parser.add_argument("--temperature", type=float, help="0 takes the most likely token")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--repetition-penalty", type=float)
    parser.add_argument("--presence-penalty", type=float)
    parser.add_argument("--frequency-penalty", type=float)
    parser.add_argument("--seed", type=int)


def sampling(args: argparse.Namespace, llm: LLM) -> SamplingParams:
    """The sampling flags over the model's defaults."""
    given = {name: value for name in _SAMPLING if (value := vars(args)[name]) is not None}
    return llm.sampling(**({"max_tokens": llm.defaults.max_new_tokens} | given))
