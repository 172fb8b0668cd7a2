"""`ellm-serve chat`: a conversation in the terminal.

The session stays in the KV tensor, so every turn prefills only what is new; the line under each
answer shows how much was reused.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ellm_serve.cli.options import add_engine_flags, add_sampling_flags, engine_options, sampling
from ellm_serve.cli.verb import Subparsers
from ellm_serve.errors import RequestError

if TYPE_CHECKING:
    from ellm_serve.llm import LLM, TextDelta
    from ellm_serve.request import SamplingParams

_SESSION = "chat"
_HELP = "commands: /reset starts over, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


def add_parser(subparsers: Subparsers) -> None:
    """Declares the verb."""
    parser = subparsers.add_parser("chat", help="talk to a model in the terminal")
    add_engine_flags(parser)
    add_sampling_flags(parser)
    parser.add_argument("--system", help="system message")


def _read_lines() -> Iterator[str]:
    """Lines the user types, or standard input's when it is a pipe."""
    while sys.stdin is not None:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            return
        if line:
            yield line


class _Conversation:
    """The messages so far, and the model that answers them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system: list[dict[str, object]] = []
        if system:
            self._system.append({"role": "system", "content": system})
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._messages: list[dict[str, object]] = list(self._system)

    def ask(self, text: str) -> None:
        """One turn: prints the answer as it comes, then what it cost."""
        self._messages.append({"role": "user", "content": text})
        start = time.perf_counter()
        first_s = 0.0
        answer = ""
        last: TextDelta | None = None
        # Ctrl-C drops the iterator, and with it the generation.
        with contextlib.suppress(KeyboardInterrupt):
            for last in self._llm.chat_stream(self._messages, self._params, session=_SESSION):
                first_s = first_s or time.perf_counter() - start
                answer += last.text
                print(last.text, end="", flush=True)
        print()
        self._messages.append({"role": "assistant", "content": answer})
        if last is not None:
            _print_figures(last, first_s, time.perf_counter() - start)


def _print_figures(last: TextDelta, first_s: float, seconds: float) -> None:
    usage = last.usage
    rate = (usage.num_output_tokens - 1) / (seconds - first_s) if seconds > first_s else 0.0
    print(
        f"[{usage.num_cached_tokens} of {usage.num_prompt_tokens} prompt tokens cached,"
        f" {usage.num_output_tokens} generated, first after {1e3 * first_s:.0f} ms,"
        f" {rate:.1f} tokens/s]",
        file=sys.stderr,
    )


def run(args: argparse.Namespace) -> int:
    """Reads questions until the input ends."""
    from ellm_serve.llm import LLM

    with LLM(**engine_options(args), progress=sys.stderr.isatty()) as llm:
        conversation = _Conversation(llm, sampling(args, llm), args.system)
        print(f"{llm.config.model}: {_HELP}", file=sys.stderr)
        for line in _read_lines():
            if line == "/exit":
                break
            if line == "/reset":
                conversation.reset()
            elif line == "/help":
                print(_HELP, file=sys.stderr)
            else:
                try:
                    conversation.ask(line)
                except RequestError as error:
                    print(f"refused: {error} (the conversation starts over)", file=sys.stderr)
                    conversation.reset()
    return 0
