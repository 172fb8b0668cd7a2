"""Text for the built-in model: the standard library's sources and what its docstrings say.

Everything comes from the running interpreter (PSF licence), but for the phrases that
`builtin_dialogues` puts around it (Apache-2.0). A file is held out by the hash of its path; nothing
of a held-out file, neither its code nor its docstrings, reaches the tokenizer or the training
stream. Two runs on one Python version see the same text in the same order.
"""

import ast
import builtins
import functools
import hashlib
import inspect
import itertools
import math
import random
import re
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from benchmarks.builtin_dialogues import Definition, dialogues, load_render

SEPARATOR = "<|endoftext|>"
SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "idlelib", "site-packages", "lib2to3", "encodings", "pydoc_data")
    + ("__pycache__", "_bundled")
)
SKIPPED_FILES = re.compile(r"_sysconfigdata.*|entities\.py|__phello__.*|lextab\.py")
HELDOUT_SHARE = 20  # one file in twenty
HELDOUT_BYTES = 40_000
COMPILED: tuple[ModuleType | type, ...] = (builtins, math, itertools, functools, time)
COMPILED += (str, list, dict, set, tuple, bytes, int, float)
# What people ask about first; asked about this often in each epoch.
FAMILIAR = frozenset(
    ("bisect", "builtins", "collections", "contextlib", "copy", "dataclasses", "dict", "fnmatch")
    + ("functools", "glob", "heapq", "itertools", "json", "list", "math", "os", "posixpath")
    + ("pprint", "random", "str", "string", "textwrap", "asyncio", "logging", "argparse")
)
FAMILIAR_REPEATS = 16


@dataclass(frozen=True, slots=True)
class Source:
    path: str  # relative to the library folder, with forward slashes
    text: str

    @property
    def is_heldout(self) -> bool:
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:4], "big") % HELDOUT_SHARE == 0

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def read_sources() -> list[Source]:
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.isdisjoint(parts) and not SKIPPED_FILES.fullmatch(path.name):
            text = path.read_text(encoding="utf-8", errors="replace")
            if len(text) > 200 and "\ufffd" not in text:
                sources.append(Source("/".join(parts), text))
    return sources


def heldout_sample(sources: list[Source]) -> str:
    """The opening of every held-out file, equally long, about 40 KB in all."""
    heldout = [source.text for source in sources if source.is_heldout]
    pieces: list[str] = []
    for done, text in enumerate(heldout):
        share = (HELDOUT_BYTES - sum(map(len, pieces))) // (len(heldout) - done)
        pieces.append(text if len(text) <= share else text[: text.rfind("\n", 0, share) + 1])
    return "\n".join(pieces)


def _paragraphs(doc: str, limit: int = 600) -> str:
    """The first paragraphs of a docstring, unwrapped, up to `limit` characters."""
    kept: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        lines = paragraph.splitlines()
        is_prose = not any(line.startswith((" ", ">>>", "-", "*", "+")) for line in lines)
        kept.append(" ".join(lines) if is_prose else paragraph)
        if sum(map(len, kept)) > 60 or len(kept) == 2:
            break
    return "\n\n".join(kept)[:limit].rstrip()


def _walk(body: list[ast.stmt], prefix: str, kind: str) -> Iterator[tuple[str, str, ast.AST]]:
    for node in body:
        match node:
            case ast.ClassDef(name=name) if not name.startswith("_"):
                yield f"{prefix}.{name}", "class", node
                yield from _walk(node.body, f"{prefix}.{name}", "method")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if not name.startswith("_"):
                    yield f"{prefix}.{name}", kind, node


def definitions(source: Source) -> list[Definition]:
    tree = ast.parse(source.text)
    found = []
    if doc := ast.get_docstring(tree):
        found.append(Definition(source.module, "module", "", _paragraphs(doc), ""))
    for name, kind, node in _walk(tree.body, source.module, "function"):
        assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        doc = ast.get_docstring(node)
        if not doc or len(doc) < 12 or doc.startswith(">>>"):
            continue
        code = inspect.cleandoc(
            "\n" + (ast.get_source_segment(source.text, node, padded=True) or "")
        )
        signature, parameters = "", tuple[str, ...]()
        if not isinstance(node, ast.ClassDef):
            signature = f"{node.name}({ast.unparse(node.args)})"
            parameters = tuple(a.arg for a in node.args.args if a.arg not in ("self", "cls"))
        found.append(Definition(name, kind, signature, _paragraphs(doc), code, parameters))
    return found


def compiled_definitions() -> list[Definition]:
    """Documentation of what is written in C and so has no Python source."""
    found = []
    for owner in COMPILED:
        prefix = "" if owner is builtins else f"{owner.__name__}."
        for name, item in sorted(vars(owner).items()):
            doc = getattr(item, "__doc__", None)
            if name.startswith("_") or not callable(item) or not doc or isinstance(item, str):
                continue
            kind = "class" if isinstance(item, type) else "function"
            found.append(Definition(prefix + name, kind, "", _paragraphs(doc), ""))
    return found


def _familiar(known: list[Definition]) -> list[Definition]:
    """Functions and modules of `FAMILIAR`, not what is deep inside of them."""
    found = []
    for definition in known:
        module, _, rest = definition.name.partition(".")
        is_builtin = not rest and definition.kind != "module"
        if ("builtins" if is_builtin else module) in FAMILIAR and rest.count(".") == 0:
            name = definition.name.replace("posixpath", "os.path")
            found.append(replace(definition, name=name))
    return found


class Corpus:
    """Everything that may be trained on, epoch by epoch."""

    def __init__(self, sources: list[Source], template: Path) -> None:
        self.training = [source for source in sources if not source.is_heldout]
        self.known = [d for source in self.training for d in definitions(source)]
        self.known += compiled_definitions()
        self.familiar = _familiar(self.known)
        self.render = load_render(template)

    def documents(self, epoch: int) -> list[str]:
        """Files and, between them, dialogues in handfuls, all in shuffled order."""
        texts = dialogues(self.known, epoch, self.render)
        for repeat in range(FAMILIAR_REPEATS):
            texts += dialogues(self.familiar, 1000 * (epoch + 1) + repeat, self.render)
        random.Random(f"handfuls {epoch}").shuffle(texts)
        handfuls = [SEPARATOR.join(texts[i : i + 8]) for i in range(0, len(texts), 8)]
        mixed = [source.text for source in self.training] + handfuls
        random.Random(f"documents {epoch}").shuffle(mixed)
        return mixed
