"""Conversations in the form that templates take, for comparing renderings; none quotes a control
token where it would not count. Each is `(messages, arguments of the rendering)`."""

from __future__ import annotations

from typing import Any

Case = tuple[list[dict[str, Any]], dict[str, Any]]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": " Tells the weather <now> & later.\n",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {
                    "type": "string",
                    "description": 'Größe\'s "city"',
                    "enum": ["Köln", "北京"],
                },
                "items": {"type": "array", "items": {"$ref": "#/defs/day"}},
                "type": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "content": content}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


_ASK = [user("What's the weather in Köln & 北京?")]
_CALLED = [*_ASK, assistant("", tool_calls=[call("weather", city="Köln", days=[1, {"n": None}])])]
_ANSWERED = [*_CALLED, tool('{"sky": "grey"}')]
_THOUGHT = "<think>\nIt rains <there>.\n</think>\n\nGrey."

_PLAIN: list[list[dict[str, Any]]] = [
    [user("Hi")],
    [user("")],
    [user("  spaces \n\n and\ttabs  ")],
    [user("> quoted <b>html</b> & 'more' \"quotes\" <")],
    [user("emoji 🙂 and e\u0301 decomposed, \u00a0 no-break")],
    [system("Be brief."), user("Hi")],
    [system("Be brief.\n"), user("Hi"), assistant("Hello!"), user("Bye")],
    [user("Hi"), assistant("Hello!")],
    [user("Hi"), assistant("Hello!"), user("More"), assistant("Well"), user("Last one")],
    [user("Hi"), assistant(_THOUGHT), user("And then?")],
    [user("Hi"), assistant(_THOUGHT)],
    [user("Hi"), assistant("Said", reasoning_content="Thought\nin lines\n")],
    [user("Hi"), assistant("\n\nSaid", reasoning_content="")],
    [user("Hi"), assistant("stray </think> mark"), user("ok")],
    [system("One"), user("Hi"), assistant("Hello"), system("Two"), user("Go on")],
    [user("line 1\nline 2\r\n\nline 4")],
]
_CALLS: list[list[dict[str, Any]]] = [
    _CALLED,
    _ANSWERED,
    [*_ANSWERED, assistant("It is grey.")],
    [*_ANSWERED, assistant("It is grey."), user("Thanks")],
    [*_CALLED, tool("one"), tool("two"), tool("")],
    [*_ASK, assistant("Let me look.", tool_calls=[call("clock"), call("weather", city="Köln")])],
    [*_ASK, assistant(_THOUGHT, tool_calls=[call("clock")]), tool("12:00")],
    [system("Sys"), *_ANSWERED],
    [*_ASK, assistant("", tool_calls=[call("weather", ok=True, n=1.5, s="a\nb", z=None, l=[])])],
]

CASES: list[Case] = [
    *((messages, {}) for messages in _PLAIN),
    *((messages, {"tools": TOOLS}) for messages in _CALLS),
    *((messages, {}) for messages in _CALLS),
    *((messages, {"enable_thinking": False}) for messages in _PLAIN[:3]),
    *((messages, {"add_generation_prompt": False}) for messages in [*_PLAIN[7:13], _CALLS[2]]),
    ([user("Hi")], {"tools": [CLOCK]}),
    ([system("Sys"), user("Hi")], {"tools": [WEATHER]}),
]
CONTINUED: list[list[dict[str, Any]]] = [
    [user("Capital of France?"), assistant("The capital is")],
    [user("Capital of France?"), assistant("The capital is  ")],
    [user("Capital of France?"), assistant("<think>\nHm\n</think>\n\nThe capital")],
    [user("Capital of France?"), assistant("\n")],
    [system("Sys"), user("a"), assistant("b"), user("c"), assistant("Trailing blanks \n")],
]
