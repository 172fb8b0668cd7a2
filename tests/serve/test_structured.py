"""Answers with a form: the model says what it likes, and the answer has the form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from ellm_serve.errors import InvalidRequest
from tests.serve.cuttings import cut
from tests.serve.frames import read
from tests.serve.scripted import IM_END, Harness, harness, run
from tests.serve.test_tools import HERMES, TOOLS, calls_in

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def served() -> Iterator[Harness]:
    with harness(tool_call_parser="hermes") as scripted:
        yield scripted


def chat(served: Harness, **body: Any) -> Any:
    return run(served.chat(**{"max_tokens": 200} | body))


@pytest.mark.parametrize(
    "outputs",
    [
        {"json": SCHEMA},
        {"json": json.dumps(SCHEMA)},
        {"json": SCHEMA, "disable_any_whitespace": True},
        {"regex": "[ab]{3}c"},
        {"choice": ["alpha", "beta"]},
        {"grammar": 'start: "x" /[0-9]/ "y"'},
        {"grammar": 'root ::= "x" [0-9] "y"'},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_has_the_form(served: Harness, outputs: dict[str, Any], stream: bool) -> None:
    """Of chats and of completions."""
    served.say("Sure! Here you are:", IM_END)
    body = {"structured_outputs": outputs, "max_tokens": 200}
    texts = []
    for ask in (served.chat, served.complete):
        answer = run(ask(**body)) if not stream else None
        if answer is None:

            async def told() -> str:
                return (await read(await ask(stream=True, **body))).text()  # noqa: B023

            texts.append(run(told()))
        else:
            (choice,) = answer.choices
            texts.append(getattr(choice, "text", None) or choice.message.content)
    for text in texts:
        check(outputs, text)


def check(outputs: dict[str, Any], text: str) -> None:
    if "json" in outputs:
        jsonschema.validate(json.loads(text), SCHEMA)
        assert not (outputs.get("disable_any_whitespace") and " " in text)
    elif "regex" in outputs:
        assert len(text) == 4 and text[-1] == "c" and set(text[:3]) <= {"a", "b"}
    elif "choice" in outputs:
        assert text in ("alpha", "beta")
    else:
        assert len(text) == 3 and text[0] == "x" and text[2] == "y" and text[1].isdigit()


def test_what_fits_is_said_as_it_was_meant(served: Harness) -> None:
    """A model that keeps to the form is not disturbed; log-probabilities are its own."""
    text = '{"name": "b", "age": 7}'
    served.script.say([*cut(text, 0), IM_END])
    (choice,) = chat(served, response_format=FORMAT, logprobs=True).choices
    assert choice.message.content == text and choice.finish_reason == "stop"
    assert len(choice.logprobs.content) == len(cut(text, 0)) + 1


def test_many_answers(served: Harness) -> None:
    """Each follows the form by itself."""
    served.say("Sure!", IM_END)
    response = chat(served, response_format=FORMAT, n=3, temperature=1.0)
    for choice in response.choices:
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_json_or_calls(served: Harness) -> None:
    """With tools of its choice, the model makes calls or says JSON, and nothing else."""
    body = {"response_format": FORMAT, "tools": TOOLS}
    text = '{"name": "b", "age": 7}'
    served.script.say([*cut(text, 0), IM_END])
    assert chat(served, **body).choices[0].message.content == text
    served.script.say([*cut(HERMES[HERMES.index("<tool_call>") :], 0), IM_END])
    (choice,) = chat(served, **body).choices
    assert [name for name, _ in calls_in(choice.message)] == ["get_weather", "noargs"]
    served.say("Sure! I will", IM_END)
    (choice,) = chat(served, **body).choices
    if choice.finish_reason == "stop":
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_a_form_is_not_searched_for_calls(served: Harness) -> None:
    """Text of the form that spells one stays, as no call may be made."""
    text = json.dumps('<tool_call>\n{"name": "noargs", "arguments": {}}\n</tool_call>')
    served.script.say([*cut(text, 1), IM_END])
    body = {"tools": TOOLS, "tool_choice": "none", "structured_outputs": {"json": {}}}
    assert chat(served, **body).choices[0].message.content == text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, None),
        ({"structured_outputs": {"json": "{"}}, None),
        ({"structured_outputs": {"choice": []}}, None),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "nonsense"}},
                }
            },
            "response_format",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_forms_are_refused(
    served: Harness, body: dict[str, Any], param: str | None, stream: bool
) -> None:
    """Before a stream begins, and without an entry in the queue."""
    with pytest.raises(InvalidRequest) as caught:
        chat(served, stream=stream, **body)
    assert caught.value.param == param
    assert caught.value.message.startswith("Grammar error: ")


def test_a_large_schema_does_not_hold_up_the_loop(served: Harness) -> None:
    """It is written down and compiled elsewhere: the loop turns meanwhile."""
    properties = {f"field_{i}": {"type": "string", "maxLength": 9} for i in range(3000)}
    schema = {"type": "object", "properties": properties}
    outputs = {"json": schema}
    served.say("x", IM_END)

    async def ask() -> int:
        turns = 0
        answer = asyncio.ensure_future(served.chat(structured_outputs=outputs, max_tokens=1))
        while not answer.done():
            await asyncio.sleep(0)
            turns += 1
        await asyncio.wait({answer})
        return turns

    assert run(ask()) > 50
