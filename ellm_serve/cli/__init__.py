"""The command line: one module per verb, each with `add_parser` and `run`."""

from ellm_serve.cli.main import main

__all__ = ["main"]
