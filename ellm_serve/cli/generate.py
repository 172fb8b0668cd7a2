"""`ellm-serve generate`: continues one prompt and streams the text."""

from __future__ import annotations

import argparse
import sys
import time

from ellm_serve.cli.options import add_engine_flags, add_sampling_flags, engine_options, sampling
from ellm_serve.cli.verb import Subparsers
from ellm_serve.errors import ConfigError


def add_parser(subparsers: Subparsers) -> None:
    """Declares the verb."""
    parser = subparsers.add_parser("generate", help="continue a prompt")
    add_engine_flags(parser)
    add_sampling_flags(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text to continue; - reads standard input")
    source.add_argument("--prompt-file", help="file whose text is continued")
    parser.add_argument("--stop", action="append", default=[], help="stop string (repeatable)")
    parser.set_defaults(max_tokens=128)


def _prompt(args: argparse.Namespace) -> str:
    try:
        if args.prompt_file is not None:
            with open(args.prompt_file, encoding="utf-8") as file:
                return file.read()
        if args.prompt == "-":
            if sys.stdin is None:
                raise ConfigError("--prompt - reads standard input, which is closed")
            return sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompt: {error}") from error
    return str(args.prompt)


def run(args: argparse.Namespace) -> int:
    """Text to standard output, figures to standard error."""
    from ellm_serve.llm import LLM

    prompt = _prompt(args)
    with LLM(**engine_options(args), progress=sys.stderr.isatty()) as llm:
        start = time.perf_counter()
        first_s = None
        for delta in llm.stream(prompt, sampling(args, llm), stop=args.stop):
            if first_s is None:
                first_s = time.perf_counter() - start
            print(delta.text, end="", flush=True)
        seconds = time.perf_counter() - start
    print()
    usage = delta.usage
    decode_s = seconds - (first_s or 0.0)
    rate = (usage.num_output_tokens - 1) / decode_s if usage.num_output_tokens > 1 else 0.0
    print(
        f"[{usage.num_prompt_tokens} prompt tokens, {usage.num_output_tokens} generated"
        f" ({delta.finish_reason}), first token after {1e3 * (first_s or 0.0):.0f} ms,"
        f" {rate:.1f} tokens/s]",
        file=sys.stderr,
    )
    return 0
