"""`ellm-serve warmup`: compiles all kernels into the cache, so that no start has to."""

from __future__ import annotations

import argparse

from ellm_serve.cli.verb import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Declares the verb."""
    subparsers.add_parser(
        "warmup",
        help="compile all kernels into the cache",
        description="Compiles all kernels into the cache ($ELLM_CACHE_DIR, else"
        " ~/.cache/ellm-serve). Run it when building an image; a start then takes no compiling.",
    )


def run(args: argparse.Namespace) -> int:
    """Compiles."""
    from ellm_kernels import load_entries
    from ellm_kernels.jit import compile_all

    load_entries()
    print(compile_all())
    return 0
