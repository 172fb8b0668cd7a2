"""The kernel cache is never stale, never half-written, and never the reason that a start fails.

Every case runs in processes of its own, on a copy of the Numba door with one small entry beside it,
so that nothing is compiled but a line of arithmetic.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ellm_kernels import jit

HELPER = """
from ellm_kernels.jit import kernel

@kernel
def factor():
    return {factor}
"""
ENTRY = """
from ellm_kernels.helper import factor
from ellm_kernels.jit import entry

@entry("int64(int64)")
def scale(x):
    return x * factor()
"""
SCRIPT = """
import json
from ellm_kernels import jit, small
report = jit.compile_all()
print(json.dumps({
    "hits": report.hits, "misses": report.misses, "rebuilt": report.rebuilt,
    "directory": str(report.directory), "result": small.scale(10), "text": str(report),
}))
"""


class Sandbox:
    """A copy of the package in a directory of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root / "cache"
        package = root / "ellm_kernels"
        package.mkdir()
        source = Path(jit.__file__).parent
        for name in ("isa.py", "jit.py"):
            shutil.copy(source / name, package)
        (package / "__init__.py").touch()
        (package / "small.py").write_text(ENTRY, encoding="utf-8")
        self.edit_helper(3)

    def edit_helper(self, factor: int) -> None:
        """Changes a function that the entry calls and that lies in another file."""
        path = self.root / "ellm_kernels/helper.py"
        path.write_text(HELPER.format(factor=factor), encoding="utf-8")

    def start(self, **environment: str) -> subprocess.Popen[str]:
        """A process that compiles and reports."""
        variables = {
            "PYTHONPATH": str(self.root), "ELLM_CACHE_DIR": str(self.cache),
            "TMPDIR": str(self.root), "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env=inherited | variables | environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, **environment: str) -> dict[str, Any]:
        return finish(self.start(**environment))

    def files(self, pattern: str) -> list[Path]:
        return sorted(self.cache.glob(pattern))


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    report: dict[str, Any] = json.loads(output)
    return report


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def test_second_start_loads(sandbox: Sandbox) -> None:
    """Compiled once; the report says so."""
    first, second = sandbox.run(), sandbox.run()
    assert (first["hits"], first["misses"], first["result"]) == (0, 1, 30)
    assert (second["hits"], second["misses"], second["result"]) == (1, 0, 30)
    assert "1 from cache, 0 compiled" in second["text"]


def test_edited_helper_is_noticed(sandbox: Sandbox) -> None:
    """Numba looks at the entry's own file only: without the hash the old result came back."""
    before = sandbox.run()
    sandbox.edit_helper(5)
    after = sandbox.run()
    assert (before["result"], after["result"]) == (30, 50)
    assert before["directory"] != after["directory"]


def test_forced_variant_has_its_own_directory(sandbox: Sandbox) -> None:
    """Code for one instruction set must not be loaded where another was asked for."""
    best, generic = sandbox.run(), sandbox.run(ELLM_ISA="generic")
    assert generic["misses"] == 1
    assert Path(generic["directory"]).name.startswith("kernels-generic-")
    assert best["directory"] != generic["directory"]


@pytest.mark.parametrize("pattern", ["**/*.nbi", "**/*.nbc"])
@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_corrupt_entry_is_rebuilt(sandbox: Sandbox, pattern: str, content: bytes | None) -> None:
    """A process killed while writing leaves a truncated index or object file."""
    sandbox.run()
    (path,) = sandbox.files(pattern)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    mended = sandbox.run()
    assert mended["result"] == 30
    assert mended["misses"] >= 1
    assert sandbox.run()["hits"] == 1


def test_many_processes_compile_once(sandbox: Sandbox) -> None:
    """One compiles under the lock, the others wait and load; none fails."""
    reports = [finish(process) for process in [sandbox.start() for _ in range(4)]]
    assert [report["result"] for report in reports] == [30] * 4
    assert sorted(report["misses"] for report in reports) == [0, 0, 0, 1]


def test_unwritable_directory_falls_back(sandbox: Sandbox) -> None:
    """A read-only home must not keep an engine from starting; it only costs time."""
    sandbox.cache.write_text("a file where the directory should be", encoding="utf-8")
    report = sandbox.run()
    assert report["result"] == 30
    directory = Path(report["directory"])
    assert directory.parent == sandbox.root
    assert directory.name.startswith("ellm-kernels-")


def test_cache_directory_follows_xdg(sandbox: Sandbox) -> None:
    """Without ELLM_CACHE_DIR the user's cache directory is used."""
    report = sandbox.run(ELLM_CACHE_DIR="", XDG_CACHE_HOME=str(sandbox.root / "xdg"))
    assert Path(report["directory"]).parent == sandbox.root / "xdg/ellm-serve"
