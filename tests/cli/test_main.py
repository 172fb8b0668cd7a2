"""The command line ends with a code and one line, never with a traceback."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ellm_serve.cli import main
from ellm_serve.cli.main import VERBS
from ellm_serve.cli.verb import Subparsers
from ellm_serve.version import __version__

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m ellm_serve` in a process of its own."""
    paths = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    return subprocess.run(
        [sys.executable, "-m", "ellm_serve", *arguments], text=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": paths} | environment, timeout=120, check=False,
    )  # fmt: skip


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Name and version."""
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"ellm-serve {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["fly"], ["plan", "--bathc", "3"], ["doctor", "x"]])
def test_unknown_verb_or_flag(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """argparse's own message and code 2."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A verb in the table is one that the parser knows."""
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    assert f"ellm-serve {verb}" in capsys.readouterr().out


def test_help_loads_no_kernels() -> None:
    """`--help` must not wait for Numba."""
    code = (
        "import sys, contextlib\n"
        "from ellm_serve.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "assert 'numba' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    paths = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, timeout=120,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_start_up_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The message of the exception, and nothing else."""
    assert main(["plan", "--model", "/no/such/model", "--offline"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ellm-serve: '/no/such/model' is neither a directory nor")
    assert captured.err.count("\n") == 1


def test_unsupported_isa_is_one_line() -> None:
    """Never an illegal instruction, and no traceback from an import."""
    done = run("warmup", ELLM_ISA="mmx")
    assert done.returncode == 1
    assert done.stderr.startswith("ellm-serve: ELLM_ISA=mmx is unknown; known: avx512")
    assert done.stderr.count("\n") == 1


def test_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """130, as shells report an interrupted program."""

    doctor = VERBS["doctor"]

    class Interrupted:
        def add_parser(self, subparsers: Subparsers) -> None:
            doctor.add_parser(subparsers)

        def run(self, args: argparse.Namespace) -> int:
            raise KeyboardInterrupt

    monkeypatch.setitem(VERBS, "doctor", Interrupted())
    assert main(["doctor"]) == 130


def test_reader_that_leaves(tmp_path: Path) -> None:
    """`ellm-serve plan | head` ends without a complaint."""
    paths = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "ellm_serve", "doctor", "--no-probe"], stdout=writer,
        stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}, timeout=120, check=False,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == b""
