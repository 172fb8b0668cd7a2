"""What a verb's module offers, and the type of what it is added to."""

from __future__ import annotations

import argparse
from typing import Protocol, TypeAlias

# What `add_subparsers` returns.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Verb(Protocol):
    """`add_parser` adds a parser of the verb's name, `run` returns the exit code."""

    def add_parser(self, subparsers: Subparsers) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...
