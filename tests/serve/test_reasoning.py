"""Thoughts: told apart from answers, by what the prompt and the text say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ellm_serve.errors import InvalidRequest
from tests.serve.cuttings import cut
from tests.serve.frames import Told, read
from tests.serve.scripted import IM_END, Harness, harness, run
from tests.serve.test_tools import FIRST, HERMES, TOOLS, calls_in, message_of

# Thinks unless told otherwise, and says so in the prompt.
THINKING = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}<think>
{% else %}<think>

</think>

{% endif %}{%- endif -%}"""
THOUGHT = "\nHe said hi, 世界.\n"
ANSWER = "\n\nHello."


@pytest.fixture(scope="module")
def served() -> Iterator[Harness]:
    """The prompt does not say anything about thoughts."""
    with harness(reasoning_parser="qwen3", tool_call_parser="hermes") as scripted:
        yield scripted


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """The prompt opens a thought, or closes it; the parser is found by the template."""
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    template.write_text(THINKING)
    with harness(chat_template=str(template), tool_call_parser="hermes") as scripted:
        yield scripted


def whole(served: Harness, **body: Any) -> Any:
    return run(served.chat(**body))


def streamed(served: Harness, **body: Any) -> Told:
    async def ask() -> Told:
        return await read(await served.chat(stream=True, **body))

    return run(ask())


def num_reasoning(response: Any) -> int | None:
    return response.usage.completion_tokens_details.reasoning_tokens  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(8))
def test_streamed_is_whole(served: Harness, seed: int) -> None:
    """Nothing is trimmed, and the tags are gone, however they are cut."""
    served.script.say([*cut(f"<think>{THOUGHT}</think>{ANSWER}", seed), IM_END])
    message = whole(served).choices[0].message
    assert (message.reasoning, message.content) == (THOUGHT, ANSWER)
    told = message_of(streamed(served))
    assert (told["reasoning"], told["content"]) == (THOUGHT, ANSWER)


@pytest.mark.parametrize("seed", range(4))
def test_the_prompt_opens_the_thought(opened: Harness, seed: int) -> None:
    opened.script.say([*cut(f"{THOUGHT}</think>{ANSWER}", seed), IM_END])
    message = whole(opened).choices[0].message
    assert (message.reasoning, message.content) == (THOUGHT, ANSWER)


@pytest.mark.parametrize(
    "body",
    [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}],
)
def test_thinking_turned_off(opened: Harness, body: dict[str, Any]) -> None:
    """All is content, the mention of a tag as well."""
    text = "Hello. </think> is a tag."
    opened.say(text, IM_END)
    response = whole(opened, **body)
    message = response.choices[0].message
    assert (message.reasoning, message.content) == (None, text)
    assert num_reasoning(response) == 0


def test_a_model_that_does_not_think(served: Harness) -> None:
    """Is not silenced by a parser for thoughts."""
    served.say("Hello.", IM_END)
    response = whole(served)
    message = response.choices[0].message
    assert (message.reasoning, message.content) == (None, "Hello.")
    assert num_reasoning(response) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_thought(served: Harness, stream: bool) -> None:
    """Is no answer: content is null."""
    served.say("<think>" + "so " * 30, IM_END)
    if stream:
        told = streamed(served, max_tokens=10)
        message, ends = message_of(told), told.ends()
    else:
        (choice,) = whole(served, max_tokens=10).choices
        message, ends = choice.message.model_dump(), [(0, choice.finish_reason, None)]
    assert message["content"] is None and message["reasoning"].startswith("so so")
    assert ends == [(0, "length", None)]


@pytest.mark.parametrize("text", ["", f"<think>{THOUGHT}</think>"])
def test_no_content(served: Harness, text: str) -> None:
    """An empty answer has empty content, and a thought alone has none."""
    served.script.say([*cut(text, 0), IM_END])
    assert whole(served).choices[0].message.content == (None if text else "")


def test_how_many_tokens_are_thoughts(served: Harness) -> None:
    """Without the tags and what follows; also at the end of a stream."""
    thought, answer = cut(THOUGHT, 0), cut(ANSWER, 0)
    open_id, close_id = cut("<think>", 0)[0], cut("</think>", 0)[0]
    served.script.say([open_id, *thought, close_id, *answer, IM_END])
    response = whole(served)
    assert num_reasoning(response) == len(thought)
    told = streamed(served, stream_options={"include_usage": True})
    usage = told.chunks[-1]["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(thought)}


def test_no_count_without_a_parser() -> None:
    with harness() as served:
        served.say("<think>x</think>y", IM_END)
        response = whole(served)
        assert response.usage.completion_tokens_details is None
        assert response.choices[0].message.content == "<think>x</think>y"


def test_thoughts_may_be_left_out(served: Harness) -> None:
    """Ids and log-probabilities too, as they would tell them; the count stays."""
    served.script.say([*cut(f"<think>{THOUGHT}</think>{ANSWER}", 0), IM_END])
    body = {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    response = whole(served, **body)
    (choice,) = response.choices
    assert (choice.message.reasoning, choice.message.content) == (None, ANSWER)
    assert choice.logprobs is None and choice.token_ids is None
    assert num_reasoning(response) == len(cut(THOUGHT, 0))
    told = streamed(served, **body)
    assert told.text() == ANSWER
    assert all(one["delta"].keys() <= {"role", "content"} for one in told.choices)
    assert all(not one["logprobs"] and not one.get("token_ids") for one in told.choices)


@pytest.mark.parametrize("seed", range(6))
def test_calls_behind_a_thought(served: Harness, seed: int) -> None:
    """A call that is only thought about is not made."""
    thought = f"\nI could say {HERMES[14:]}\n"
    text = f"<think>{thought}</think>\n\n{HERMES[14:]}"
    served.script.say([*cut(text, seed), IM_END])
    (choice,) = whole(served, tools=TOOLS).choices
    assert choice.message.reasoning == thought and choice.message.content is None
    assert calls_in(choice.message)[0] == FIRST and len(choice.message.tool_calls) == 2
    assert choice.finish_reason == "tool_calls"
    message = message_of(streamed(served, tools=TOOLS))
    assert message["reasoning"] == thought and message["content"] is None
    assert len(message["tool_calls"]) == 2


def test_stop_strings_do_not_count_in_thoughts(served: Harness) -> None:
    """And what is held back for them does not tear tags."""
    served.script.say([*cut("<think>Hello.</think>xb, Hello. there", 0), IM_END])
    for stop, content in ((["b,c"], "xb, Hello. there"), (["Hello."], "xb, ")):
        (choice,) = whole(served, stop=stop).choices
        assert (choice.message.reasoning, choice.message.content) == ("Hello.", content)
        assert streamed(served, stop=stop).text() == content


def test_the_older_name(opened: Harness) -> None:
    """Is given as well if the server is set up so."""
    with harness(reasoning_parser="qwen3", reasoning_content_alias=True) as served:
        served.say("<think>a</think>b", IM_END)
        served.script.say([*cut("<think>a</think>b", 0), IM_END])
        message = whole(served).choices[0].message.model_dump()
        assert (message["reasoning"], message["reasoning_content"]) == ("a", "a")
        deltas = [one["delta"] for one in streamed(served).choices]
        assert {"reasoning": "a", "reasoning_content": "a"} in deltas
    opened.say("a", IM_END)
    assert "reasoning_content" not in whole(opened).choices[0].message.model_dump()


def test_a_continued_answer(opened: Harness) -> None:
    """What the given start of the answer says about thoughts counts."""
    opened.say("rest", IM_END)
    for given, field in (("<think>\na", "reasoning"), ("<think>\na</think>\nb", "content")):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": given}]
        body = {"continue_final_message": True, "add_generation_prompt": False}
        opened.say("rest", IM_END)
        message = whole(opened, messages=messages, **body).choices[0].message.model_dump()
        assert message[field] == "rest"


# --- with a form ---------------------------------------------------------------------------------


def test_a_form_holds_behind_the_thought(opened: Harness) -> None:
    """The model thinks what it likes."""
    opened.script.say([*cut('Hm, {no}.</think>{"a": 1}', 0), IM_END])
    message = whole(opened, response_format={"type": "json_object"}).choices[0].message
    assert (message.reasoning, message.content) == ("Hm, {no}.", '{"a": 1}')
    opened.script.say([*cut('{"a": 1}', 0), IM_END])
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    message = whole(opened, response_format={"type": "json_object"}, **off).choices[0].message
    assert (message.reasoning, message.content) == (None, '{"a": 1}')


def test_a_form_without_the_end_of_a_thought(served: Harness) -> None:
    """What comes before the form never was the answer."""
    served.say("Hello, I do not think.")
    body = {"response_format": {"type": "json_object"}, "max_tokens": 6}
    (choice,) = whole(served, **body).choices
    assert choice.message.content is None and choice.message.reasoning.startswith("Hello")
    assert choice.finish_reason == "length"


def test_a_form_needs_a_token_for_the_end(tmp_path: Path) -> None:
    """Else it is not known where the form begins."""
    template = tmp_path / "thinking.jinja"
    template.write_text(THINKING)
    with harness(chat_template=str(template)) as served:
        backend = served.service._backend
        backend.parsers = type(backend.parsers)(reasoning=True)
        with pytest.raises(InvalidRequest, match="thinking turned off"):
            whole(served, response_format={"type": "json_object"})
