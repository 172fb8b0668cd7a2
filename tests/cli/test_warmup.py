"""`ellm-serve warmup` leaves nothing to compile."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ellm_kernels import jit, load_entries
from ellm_serve.cli import main


def test_prints_the_report(capsys: pytest.CaptureFixture[str], compiled_kernels: None) -> None:
    """Hits, misses, seconds and the directory."""
    assert main(["warmup"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("kernels: ")
    assert str(jit.cache_dir()) in out


def test_all_entry_modules_are_known() -> None:
    """A module with an entry that nobody lists would be compiled at a user's first request."""
    load_entries()
    known = {dispatcher.py_func.__module__ for dispatcher, _ in jit._entries}
    for path in Path(jit.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        decorators = [
            decorator.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            for decorator in node.decorator_list
            if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name)
        ]
        if "entry" in decorators:
            assert f"ellm_kernels.{path.stem}" in known
