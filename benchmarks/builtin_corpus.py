"""Text for the built-in model: the standard library's sources and dialogues derived from them.

Everything comes from the running interpreter (PSF licence) or from the short phrases in this file
(Apache-2.0). A file is held out by the hash of its path; nothing of a held-out file, neither its
code nor its docstrings, reaches the tokenizer or the training stream. All choices are drawn from
generators seeded by the epoch, so two runs on one Python version see the same text in the same order.
"""

import ast
import builtins
import functools
import hashlib
import inspect
import itertools
import json
import math
import random
import re
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]
Render = Callable[[list[Message], list[dict[str, Any]]], str]

SEPARATOR = "<|endoftext|>"
SKIPPED_FOLDERS = frozenset(
    "test tests idlelib site-packages lib2to3 encodings pydoc_data __pycache__ _bundled".split()
)
SKIPPED_FILES = re.compile(r"_sysconfigdata.*|entities\.py|__phello__.*|lextab\.py")
HELDOUT_SHARE = 20  # one file in twenty
HELDOUT_BYTES = 40_000
COMPILED: tuple[ModuleType, ...] = (builtins, math, itertools, functools, time)
COMPILED_CLASSES: tuple[type, ...] = (str, list, dict, set, tuple, bytes, int, float)


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


@dataclass(frozen=True, slots=True)
class Definition:
    """A documented function or class: what the dialogues talk about."""

    name: str  # qualified, such as textwrap.dedent
    kind: str  # "function", "method", "class" or "module"
    signature: str
    doc: str
    code: str
    parameters: tuple[str, ...] = ()


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
    heldout = [source for source in sources if source.is_heldout]
    share = HELDOUT_BYTES // len(heldout)
    pieces = []
    for left, source in zip(range(len(heldout), 0, -1), heldout, strict=True):
        share = (HELDOUT_BYTES - sum(map(len, pieces))) // left
        cut = source.text[:share]
        pieces.append(cut if cut == source.text else cut[: cut.rfind("\n") + 1])
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
        if not doc or len(doc) < 12:
            continue
        code = inspect.cleandoc("\n" + (ast.get_source_segment(source.text, node, padded=True) or ""))
        signature, parameters = "", ()
        if not isinstance(node, ast.ClassDef):
            signature = f"{node.name}({ast.unparse(node.args)})"
            parameters = tuple(a.arg for a in node.args.args if a.arg not in ("self", "cls"))
        found.append(Definition(name, kind, signature, _paragraphs(doc), code, parameters))
    return found


def compiled_definitions() -> list[Definition]:
    """Documentation of what is written in C and so has no Python source."""
    found = []
    for owner in (*COMPILED, *COMPILED_CLASSES):
        prefix = "" if owner is builtins else f"{owner.__name__}."
        for name, item in sorted(vars(owner).items()):
            doc = getattr(item, "__doc__", None)
            if name.startswith("_") or not callable(item) or not doc or isinstance(item, str):
                continue
            kind = "class" if isinstance(item, type) else "function"
            found.append(Definition(prefix + name, kind, "", _paragraphs(doc), ""))
    return found


# ---- dialogues

EXPLAIN = (
    "What does {name} do?", "Explain {name}.", "What is {name}?", "What is {name} for?",
    "Describe the {kind} {name}.", "Tell me about {name}.", "How would you describe {name}?",
    "What does the {kind} {short} in {owner} do?", "what does {name} do", "What does {short} do?",
)  # fmt: skip
CODE = (
    "Write the {kind} {name}.", "Show me the code of {name}.", "How is {name} implemented?",
    "Write the {kind} {short} of {owner}.", "Give me the Python code of {name}.",
)  # fmt: skip
ARGUMENTS = ("What arguments does {name} take?", "How do I call {name}?", "Signature of {name}?")
SYSTEM = ("You are a helpful assistant.", "You are a Python assistant.", "Answer briefly.")
ABOUT = (
    "I am the small language model built into ellm-serve. I was trained on the sources of "
    "Python's standard library. Ask me what a module or a function does."
)
SMALL_TALK = (
    (("Hello", "Hello!", "Hi", "Hi there!", "Hey", "Good morning"),
     "Hello! Ask me about Python's standard library, for example: What does textwrap.dedent do?"),
    (("Who are you?", "What are you?", "What is your name?", "Introduce yourself."), ABOUT),
    (("What can you do?", "Help", "How can you help me?", "What do you know?"),
     "I can say what the modules and functions of Python's standard library do, show their code, "
     "and call functions you describe to me. I am very small, so check what I say."),
    (("Thanks", "Thank you!", "Thanks a lot", "Great, thanks"), "You are welcome!"),
    (("Bye", "Goodbye", "See you later"), "Goodbye!"),
    (("How are you?", "How do you do?"), "I am running well, thank you. What would you like to know?"),
)  # fmt: skip
WORDS = (
    "red green blue river stone paper light summer winter apple orange lemon north south house "
    "garden music silver copper window forest bread mountain island letter number table bridge"
).split()
CITIES = (
    "Paris London Berlin Rome Madrid Tokyo Oslo Vienna Lisbon Dublin Cairo Delhi Lima Boston "
    "Chicago Seoul Sydney Toronto Prague Warsaw Athens Geneva Munich Kyoto Nairobi Helsinki"
).split()


def _everyday_call(rng: random.Random) -> tuple[str, str, dict[str, Any], str, str]:
    """(tool name, description, arguments, question, result) of a made-up everyday request."""
    city, word, path = rng.choice(CITIES), rng.choice(WORDS), f"{rng.choice(WORDS)}.txt"
    a, b = rng.randrange(100), rng.randrange(100)
    weather = f"{rng.randrange(-5, 35)} degrees, {rng.choice(('sunny', 'rain', 'snow', 'cloudy'))}"
    return rng.choice((
        ("get_weather", "Get the weather of a city", {"city": city},
         rng.choice(("What is the weather in {}?", "How is the weather in {} today?",
                     "Tell me the weather in {}.", "weather {}")).format(city), weather),
        ("read_file", "Read a text file", {"path": path},
         rng.choice(("Read the file {}.", "What is in {}?", "Show me {}.")).format(path), word),
        ("search", "Search the documentation", {"query": word},
         rng.choice(("Search for {}.", "Find {}.", "Look up {}.")).format(word), f"3 pages on {word}"),
        ("add", "Add two numbers", {"a": a, "b": b},
         rng.choice(("What is {} + {}?", "Add {} and {}.", "Compute {} plus {}.")).format(a, b),
         str(a + b)),
        ("get_time", "Get the local time of a city", {"city": city},
         rng.choice(("What time is it in {}?", "Tell me the time in {}.")).format(city),
         f"{a % 24:02}:{b % 60:02}"),
    ))  # fmt: skip


def _library_call(rng: random.Random, known: Definition) -> tuple[str, str, dict[str, Any], str, str]:
    name = known.name.rpartition(".")[2]
    arguments: dict[str, Any] = {
        parameter: rng.choice(WORDS) if rng.random() < 0.6 else rng.randrange(1000)
        for parameter in known.parameters
    }
    listed = " and ".join(f"{key} = {json.dumps(value)}" for key, value in arguments.items())
    verb = rng.choice(("Call {} with {}.", "Use {} with {}.", "Run {} with {}."))
    return name, known.doc.split("\n")[0][:80], arguments, verb.format(name, listed), rng.choice(WORDS)


def _schema(name: str, description: str, arguments: dict[str, Any]) -> dict[str, Any]:
    kinds = {key: "integer" if isinstance(v, int) else "string" for key, v in arguments.items()}
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _tool_dialogue(rng: random.Random, known: list[Definition], render: Render) -> str:
    def draw() -> tuple[str, str, dict[str, Any], str, str]:
        return _everyday_call(rng) if rng.random() < 0.5 else _library_call(rng, rng.choice(known))

    name, description, arguments, question, result = draw()
    tools = {name: _schema(name, description, arguments)}
    for other in (draw() for _ in range(rng.randrange(3))):
        tools.setdefault(other[0], _schema(*other[:3]))
    listed = [tools[key] for key in sorted(tools, key=lambda _: rng.random())]
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": f"The answer of {name} is: {result}"},
    ]
    if rng.random() < 0.4:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM)})
    return render(messages, listed)


def _turns(rng: random.Random, known: Definition) -> list[Message]:
    owner, _, short = known.name.rpartition(".")
    words = {"name": known.name, "kind": known.kind, "short": short, "owner": owner or "Python"}
    draw = rng.random()
    if known.code and len(known.code) < 1500 and draw < 0.25:
        phrases, answer = CODE, f"```python\n{known.code}\n```"
    elif known.signature and draw < 0.35:
        phrases, answer = ARGUMENTS, f"`{known.signature}`\n\n{known.doc}"
    else:
        phrases, answer = EXPLAIN, known.doc
    question = rng.choice(phrases).format(**words)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def dialogues(known: list[Definition], epoch: int, render: Render) -> list[str]:
    """One epoch's conversations: every definition once, small talk, and tool calls."""
    rng = random.Random(f"dialogues {epoch}")
    order = rng.sample(known, len(known))
    callable_ones = [d for d in known if d.kind == "function" and 1 <= len(d.parameters) <= 3]
    texts, start = [], 0
    while start < len(order):
        stop = start + rng.choice((1, 1, 1, 2, 3))
        messages = [m for d in order[start:stop] for m in _turns(rng, d)]
        if rng.random() < 0.1:
            questions, answer = rng.choice(SMALL_TALK)
            messages[:0] = [
                {"role": "user", "content": rng.choice(questions)},
                {"role": "assistant", "content": answer},
            ]
        if rng.random() < 0.2:
            messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM)})
        texts.append(render(messages, []))
        start = stop
    for questions, answer in SMALL_TALK * 5:
        turn = [{"role": "user", "content": rng.choice(questions)}]
        texts.append(render([*turn, {"role": "assistant", "content": answer}], []))
    texts += [_tool_dialogue(rng, callable_ones, render) for _ in range(len(known) // 12)]
    return texts


def load_render(template: Path) -> Render:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    compiled = environment.from_string(template.read_text())

    def render(messages: list[Message], tools: list[dict[str, Any]]) -> str:
        return compiled.render(messages=messages, tools=tools, add_generation_prompt=False)

    return render


def documents(sources: list[Source], known: list[Definition], epoch: int, render: Render) -> list[str]:
    """One epoch of training documents in shuffled order, dialogues in handfuls between the files."""
    texts = dialogues(known, epoch, render)
    random.Random(f"handfuls {epoch}").shuffle(texts)
    handfuls = [SEPARATOR.join(texts[i : i + 8]) for i in range(0, len(texts), 8)]
    mixed = [source.text for source in sources if not source.is_heldout] + handfuls
    random.Random(f"documents {epoch}").shuffle(mixed)
    return mixed
