"""Conversations for the built-in model, in the form its chat template gives them.

Questions about documented definitions are answered with their docstrings or their code; small talk
and requests for tool calls are made up here (Apache-2.0). Every choice comes from a generator
seeded by the epoch: the order of the draws is part of the result.
"""

import functools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]
Render = Callable[[list[Message], list[dict[str, Any]]], str]


@dataclass(frozen=True, slots=True)
class Definition:
    """A documented function or class: what the dialogues talk about."""

    name: str  # qualified, such as textwrap.dedent
    kind: str  # "function", "method", "class" or "module"
    signature: str
    doc: str
    code: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Errand:
    """A request that one tool call answers."""

    tool: str
    description: str
    arguments: dict[str, Any]
    question: str
    result: str

    @property
    def schema(self) -> dict[str, Any]:
        kinds = {
            k: "integer" if isinstance(v, int) else "string" for k, v in self.arguments.items()
        }
        properties = {key: {"type": kind} for key, kind in kinds.items()}
        parameters = {
            "type": "object",
            "properties": properties,
            "required": list(self.arguments),
        }
        function = {"name": self.tool, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


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
    (("How are you?", "How do you do?"),
     "I am running well, thank you. What would you like to know?"),
)  # fmt: skip
WORDS = (
    "red", "green", "blue", "river", "stone", "paper", "light", "summer", "winter", "apple",
    "orange", "lemon", "north", "south", "house", "garden", "music", "silver", "copper", "window",
    "forest", "bread", "mountain", "island", "letter", "number", "table", "bridge",
)  # fmt: skip
CITIES = (
    "Paris", "London", "Berlin", "Rome", "Madrid", "Tokyo", "Oslo", "Vienna", "Lisbon", "Dublin",
    "Cairo", "Delhi", "Lima", "Boston", "Chicago", "Seoul", "Sydney", "Toronto", "Prague",
    "Warsaw", "Athens", "Geneva", "Munich", "Kyoto", "Nairobi", "Helsinki",
)  # fmt: skip


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _exchange(question: str, answer: str) -> list[Message]:
    return [_message("user", question), _message("assistant", answer)]


def _everyday_errand(rng: random.Random) -> Errand:
    city, word, path = rng.choice(CITIES), rng.choice(WORDS), f"{rng.choice(WORDS)}.txt"
    a, b = rng.randrange(100), rng.randrange(100)
    weather = f"{rng.randrange(-5, 35)} degrees, {rng.choice(('sunny', 'rain', 'snow', 'cloudy'))}"
    return rng.choice((
        Errand(
            "get_weather", "Get the weather of a city", {"city": city},
            rng.choice(("What is the weather in {}?", "How is the weather in {} today?",
                        "Tell me the weather in {}.", "weather {}")).format(city),
            weather,
        ),
        Errand(
            "read_file", "Read a text file", {"path": path},
            rng.choice(("Read the file {}.", "What is in {}?", "Show me {}.")).format(path),
            word,
        ),
        Errand(
            "search", "Search the documentation", {"query": word},
            rng.choice(("Search for {}.", "Find {}.", "Look up {}.")).format(word),
            f"3 pages on {word}",
        ),
        Errand(
            "add", "Add two numbers", {"a": a, "b": b},
            rng.choice(("What is {} + {}?", "Add {} and {}.", "Compute {} plus {}.")).format(a, b),
            str(a + b),
        ),
        Errand(
            "get_time", "Get the local time of a city", {"city": city},
            rng.choice(("What time is it in {}?", "Tell me the time in {}.")).format(city),
            f"{a % 24:02}:{b % 60:02}",
        ),
    ))  # fmt: skip


def _library_errand(rng: random.Random, known: Definition) -> Errand:
    name = known.name.rpartition(".")[2]
    arguments: dict[str, Any] = {
        parameter: rng.choice(WORDS) if rng.random() < 0.6 else rng.randrange(1000)
        for parameter in known.parameters
    }
    listed = " and ".join(f"{key} = {json.dumps(value)}" for key, value in arguments.items())
    request = rng.choice(("Call {} with {}.", "Use {} with {}.", "Run {} with {}."))
    description = known.doc.split("\n")[0][:80]
    return Errand(name, description, arguments, request.format(name, listed), rng.choice(WORDS))


def _errand(rng: random.Random, known: list[Definition]) -> Errand:
    if rng.random() < 0.5:
        return _everyday_errand(rng)
    return _library_errand(rng, rng.choice(known))


def _tool_dialogue(rng: random.Random, known: list[Definition], render: Render) -> str:
    errand = _errand(rng, known)
    tools = {errand.tool: errand.schema}
    for other in (_errand(rng, known) for _ in range(rng.randrange(3))):
        tools.setdefault(other.tool, other.schema)
    listed = [tools[key] for key in sorted(tools, key=lambda _: rng.random())]
    function = {"name": errand.tool, "arguments": errand.arguments}
    messages: list[Message] = [
        {"role": "user", "content": errand.question},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": errand.result},
        {"role": "assistant", "content": f"The answer of {errand.tool} is: {errand.result}"},
    ]
    if rng.random() < 0.4:
        messages.insert(0, _message("system", rng.choice(SYSTEM)))
    return render(messages, listed)


def _turns(rng: random.Random, known: Definition) -> list[Message]:
    phrases: tuple[str, ...]
    owner, _, short = known.name.rpartition(".")
    words = {"name": known.name, "kind": known.kind, "short": short, "owner": owner or "Python"}
    draw = rng.random()
    if known.code and len(known.code) < 1500 and draw < 0.25:
        phrases, answer = CODE, f"```python\n{known.code}\n```"
    elif known.signature and draw < 0.35:
        phrases, answer = ARGUMENTS, f"`{known.signature}`\n\n{known.doc}"
    else:
        phrases, answer = EXPLAIN, known.doc
    return _exchange(rng.choice(phrases).format(**words), answer)


def _library_dialogue(rng: random.Random, known: list[Definition], render: Render) -> str:
    messages = [message for definition in known for message in _turns(rng, definition)]
    if rng.random() < 0.1:
        questions, answer = rng.choice(SMALL_TALK)
        messages = _exchange(rng.choice(questions), answer) + messages
    if rng.random() < 0.2:
        messages.insert(0, _message("system", rng.choice(SYSTEM)))
    return render(messages, [])


def dialogues(known: list[Definition], epoch: int, render: Render) -> list[str]:
    """One epoch's conversations: every definition once, small talk, and tool calls."""
    rng = random.Random(f"dialogues {epoch}")
    order = rng.sample(known, len(known))
    callable_ones = [d for d in known if d.kind == "function" and 1 <= len(d.parameters) <= 3]
    texts, start = [], 0
    while start < len(order):
        stop = start + rng.choice((1, 1, 1, 2, 3))
        texts.append(_library_dialogue(rng, order[start:stop], render))
        start = stop
    for questions, answer in SMALL_TALK * 5:
        texts.append(render(_exchange(rng.choice(questions), answer), []))
    texts += [_tool_dialogue(rng, callable_ones, render) for _ in range(len(known) // 12)]
    return texts


def load_render(template: Path) -> Render:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    compiled = environment.from_string(template.read_text())

    def render(messages: list[Message], tools: list[dict[str, Any]]) -> str:
        return compiled.render(messages=messages, tools=tools, add_generation_prompt=False)

    return render
