"""Imports point down, and every third-party package stays where it belongs.

Read from the syntax trees, so late imports inside functions count as well.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SERVE = ROOT / "ellm_serve"
KERNELS = ROOT / "kernels/ellm_kernels"
MODULES = sorted([*SERVE.rglob("*.py"), *KERNELS.rglob("*.py")])

# From the bottom up; units on one line do not know each other.
LAYERS = (
    ("ellm_kernels",),
    ("closing", "errors", "version"),
    ("config", "request", "metrics"),
    ("protocol", "text", "model"),
    ("grammar",),
    ("graph",),
    ("engine",),
    ("cluster",),
    ("startup",),
    ("serve", "llm", "batch"),
    ("cli",),
    ("ellm_serve",),  # the package's own __init__ and __main__
)
RANK = {unit: rank for rank, units in enumerate(LAYERS) for unit in units}

# Units that may import a package.
ALLOWED = {
    "ellm_kernels": {"model", "graph", "engine", "cluster", "startup", "cli"},
    "numba": {"ellm_kernels"},
    "llvmlite": {"ellm_kernels"},
    "numpy": {"ellm_kernels", "model", "grammar", "graph", "engine", "cluster", "startup"},
    "pydantic": {"config", "protocol"},
    "yaml": {"config"},
    "llguidance": {"grammar"},
    "tokenizers": {"text"},
    "jinja2": {"text"},
    "huggingface_hub": {"model"},
    "tqdm": {"model"},
    "ray": {"cluster", "serve", "batch"},
    "fastapi": {"serve"},
    "starlette": {"serve"},
    "prometheus_client": {"metrics"},
}
# Where the name to install differs from the name to import.
DISTRIBUTIONS = {"yaml": "pyyaml", "prometheus_client": "prometheus-client"}


def unit_of(path: Path) -> str:
    """The unit that a file belongs to: a package or module right below `ellm_serve`."""
    if path.is_relative_to(KERNELS):
        return "ellm_kernels"
    first = path.relative_to(SERVE).parts[0].removesuffix(".py")
    return "ellm_serve" if first.startswith("__") else first


def imports_of(source: str) -> Iterator[str]:
    """Dotted names of everything that is imported."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            module = node.module or ""
            # `from ellm_serve import llm` imports a unit, not a name.
            yield from (
                f"{module}.{alias.name}" if module == "ellm_serve" else module
                for alias in node.names
            )


def violations(unit: str, source: str) -> list[str]:
    """What a module of this unit imports and must not."""
    found = []
    for name in imports_of(source):
        package, _, rest = name.partition(".")
        if package == "ellm_serve":
            target = rest.partition(".")[0]
            if target != unit and RANK[target] >= RANK[unit]:
                found.append(f"{unit} must not import {name}")
        elif package == unit or package in sys.stdlib_module_names:
            continue
        elif unit not in ALLOWED.get(package, set()):
            found.append(f"{unit} must not import {name}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports(path: Path) -> None:
    """No upward import, no import of a sibling, no package in a place where it has no business."""
    assert violations(unit_of(path), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("unit", "source"),
    [
        ("engine", "from ellm_serve.cluster.memory import Memory"),
        ("engine", "def f():\n    import ellm_serve.llm"),
        ("text", "from ellm_serve.model.config import ModelConfig"),
        ("model", "from ellm_serve import text"),
        ("graph", "import numba"),
        ("request", "import numpy as np"),
        ("cli", "from numpy.typing import NDArray"),
        ("ellm_kernels", "from ellm_serve.errors import EngineError"),
        ("engine", "import ray"),
        ("model", "import requests"),
    ],
)
def test_the_test_notices(unit: str, source: str) -> None:
    """Each rule really catches what it forbids."""
    assert len(violations(unit, source)) == 1


@pytest.mark.parametrize(
    ("unit", "source"),
    [
        ("cluster", "from ellm_serve.engine.executor import Executor\nimport os.path"),
        ("cli", "from ellm_kernels.jit import compile_all\nfrom ellm_serve.cli import plan"),
        ("request", "from ellm_serve.errors import InvalidRequest"),
        ("ellm_kernels", "from ellm_kernels import isa\nimport numba.extending"),
    ],
)
def test_the_test_allows(unit: str, source: str) -> None:
    """Imports that point down are none of its business."""
    assert violations(unit, source) == []


def test_every_package_is_declared() -> None:
    """What is imported stands in pyproject.toml, even if another dependency brings it along."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    declared = {re.split(r"[\[<>=~! ]", entry)[0].lower() for group in groups for entry in group}
    imported = {
        name.partition(".")[0]
        for path in MODULES
        for name in imports_of(path.read_text(encoding="utf-8"))
    }
    third_party = imported - set(sys.stdlib_module_names) - {"ellm_serve", "ellm_kernels"}
    assert {DISTRIBUTIONS.get(name, name) for name in third_party} <= declared


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.py")), ids=lambda path: path.name)
def test_one_door_to_numba(path: Path) -> None:
    """Only `jit` compiles: options, signatures and the cache are decided in one place."""
    names = {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name | ast.Attribute)
    }
    used = names & {"njit", "jit", "vectorize", "guvectorize", "prange"}
    assert used <= ({"njit"} if path.name == "jit.py" else set())
