"""`ellm-serve VERB …`: finds the verb, runs it, and turns start-up mistakes into one line.

A verb's module imports what it computes with inside `run`, so that `--help` stays instant.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ellm_serve.cli import chat, clean, doctor, generate, plan, serve, warmup
from ellm_serve.cli.config_flags import nearest_flag
from ellm_serve.cli.verb import Verb
from ellm_serve.errors import ConfigError, EllmError
from ellm_serve.version import __version__

_USAGE = 2  # as argparse reports a wrong command line
_INTERRUPTED = 130  # as shells report SIGINT
_BROKEN_PIPE = 141  # as shells report SIGPIPE


# In the order of the help text.
VERBS: dict[str, Verb] = {
    "serve": serve,
    "generate": generate,
    "chat": chat,
    "plan": plan,
    "doctor": doctor,
    "warmup": warmup,
    "clean": clean,
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage of a verb can fill a screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs; `args.verb` names the chosen one."""
    parser: argparse.ArgumentParser = Parser(
        prog="ellm-serve", description="Serves Qwen3-family language models from CPU servers."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True)
    for verb in VERBS.values():
        verb.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        near = nearest_flag(unknown[0])
        hint = f"; did you mean {near}?" if near else ""
        parser.error(f"{args.verb} does not know {' '.join(unknown)}{hint}")
    # The start's own lines: kernels from cache or compiled, weights, slots and their memory.
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("ellm_serve").setLevel(logging.INFO)
    try:
        _check_isa()
        code = VERBS[args.verb].run(args)
        sys.stdout.flush()
        return code
    except EllmError as error:
        print(f"ellm-serve: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (head, less) has left; the interpreter's own flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except OSError as error:
        # A full disk or a closed stream; whatever the interpreter still wants to flush is lost.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"ellm-serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def _check_isa() -> None:
    """Every verb uses the kernels, and they can be imported only for a variant that runs here."""
    from ellm_kernels import isa

    try:
        isa.active()
    except isa.UnsupportedIsa as error:
        raise ConfigError(str(error)) from None
