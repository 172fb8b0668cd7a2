"""`ellm-serve clean`: frees shared memory that no running engine owns."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from ellm_serve.cli.verb import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Declares the verb."""
    parser = subparsers.add_parser(
        "clean",
        help="free shared memory that no engine owns",
        description="Removes shared memory that no running engine owns. Packed weights kept for a"
        " faster start stay, unless --all is given.",
    )
    parser.add_argument("--all", action="store_true", help="also what is kept for a faster start")
    parser.add_argument(
        "--shm-dir", type=Path, default=Path("/dev/shm"), help="where segments are (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Removes, and says what went and what stayed."""
    from ellm_serve.cluster.claims import list_groups, remove_unclaimed

    before = sum(group.bytes for group in list_groups(directory=args.shm_dir))
    removed = remove_unclaimed(keep_persistent=not args.all, directory=args.shm_dir)
    for path in removed:
        print(f"removed {path}")
    left = list_groups(directory=args.shm_dir)
    freed = max(0, before - sum(group.bytes for group in left))
    print(f"{freed / 1e6:.0f} MB freed" if removed else "nothing to remove")
    for name, text in group_lines(args.shm_dir):
        print(f"left: {name}, {text}")
    return 0


def group_lines(directory: Path) -> Iterable[tuple[str, str]]:
    """Name and state of every group that is there."""
    from ellm_serve.cluster.claims import list_groups

    for group in list_groups(directory=directory):
        if group.claimed:
            state = "in use"
        elif group.persistent:
            state = "kept for a faster start (ellm-serve clean --all removes it)"
        else:
            state = "owned by nobody (ellm-serve clean removes it)"
        yield f"ellm-{group.group_id}", f"{group.bytes / 1e6:.0f} MB, {state}"
