"""The reasoning stage: what is thought and what is said, and what the prompt says about it."""

from __future__ import annotations

import pytest

from ellm_serve.text import ChatEncoder
from ellm_serve.text.reasoning import ReasoningStage, Split, starts_in_reasoning

OPENING = "<function="
CALL = "<tool_call>\n<function=f>\n</function>\n</tool_call>"


def split(text: str, starts: bool | None, opening: str | None = OPENING) -> Split:
    """The whole text divided; whatever the pieces, the result is the same."""
    results = set()
    for width in range(1, len(text) + 2):
        stage = ReasoningStage(starts, opening)
        parts = [stage.push(text[i : i + width]) for i in range(0, len(text), width)]
        parts.append(stage.finish())
        reasoning = "".join(part.reasoning for part in parts)
        content = "".join(part.content for part in parts)
        results.add(Split(reasoning, content, parts[-1].call))
        assert not any(part.call for part in parts[:-1])
    (only,) = results
    return only


@pytest.mark.parametrize("starts", [True, None])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\na\n</think>\n\nb", Split("\na\n", "\n\nb")),
        ("\n<think>a</think>b</think>c", Split("a", "b</think>c")),
        ("<think>a<think>b</think>", Split("a<think>b")),
        ("<think></think>", Split()),
        ("<think>never ends </thi", Split("never ends </thi")),
        ("<think>the `</think>` tag</think>b", Split("the `</think>` tag", "b")),
        ("<think>so `x`</think>b", Split("so `x`", "b")),
        ("<think>`</think>", Split("`")),
        ("<think>a < b <= c</think>", Split("a < b <= c")),
    ],
)
def test_thoughts(starts: bool | None, text: str, expected: Split) -> None:
    assert split(text, starts) == expected


@pytest.mark.parametrize(
    ("text", "inside", "unknown"),
    [
        ("a</think>b", Split("a", "b"), Split("", "a</think>b")),
        ("no thought", Split("no thought"), Split("", "no thought")),
        ("<thin", Split("<thin"), Split("", "<thin")),
        (" \n", Split(" \n"), Split("", " \n")),
        (" " * 100 + "<think>", Split(" " * 100 + "<think>"), Split("", " " * 100 + "<think>")),
        ("", Split(), Split()),
    ],
)
def test_what_the_prompt_says_counts(text: str, inside: Split, unknown: Split) -> None:
    """A model that never thinks is not silenced; a thought that was cut is no answer."""
    assert split(text, True) == inside
    assert split(text, None) == unknown
    assert split(text, False) == Split("", text)


def test_without_thinking_all_is_content() -> None:
    assert split("<think>a</think>b", False) == Split("", "<think>a</think>b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # the thought ends: the call was only thought about
        (f"a {CALL} b</think>c", Split(f"a {CALL} b", "c")),
        (f"a {CALL} `</think>` b</think>c", Split(f"a {CALL} `</think>` b", "c")),
        # it never does
        (f"a {CALL} b", Split("a ", "", f"{CALL} b")),
        ("a <tool_call>\n<function=f>", Split("a ", "", "<tool_call>\n<function=f>")),
        # only a mention
        ("a <tool_call> b", Split("a <tool_call> b")),
        ("a <tool_call>\n<func", Split("a <tool_call>\n<func")),
    ],
)
def test_calls_in_thoughts(text: str, expected: Split) -> None:
    assert split(text, True) == expected


def test_without_tools_a_call_is_part_of_the_thought() -> None:
    assert split(f"a {CALL}", True, None) == Split(f"a {CALL}")


def test_only_what_may_be_a_tag_is_held() -> None:
    stage = ReasoningStage(True, OPENING)
    assert stage.push("<think>so ") == Split("so ")
    assert stage.push("a < b") == Split("a < b")
    assert stage.push("</thi") == Split()
    assert stage.push("s") == Split("</this")
    assert stage.push("</think>") == Split()
    assert not stage.in_reasoning
    assert stage.push("x") == Split(content="x")


def test_in_reasoning() -> None:
    assert ReasoningStage(True, None).in_reasoning
    assert not ReasoningStage(False, None).in_reasoning
    stage = ReasoningStage(None, None)
    assert not stage.in_reasoning
    stage.push("<think>")
    assert stage.in_reasoning


@pytest.mark.parametrize(
    ("prompt", "starts"),
    [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", None),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n<think>\na</think>\nb", False),
        ("<|im_start|>assistant\n<think>a</think><think>", True),
        ("<|im_start|>assistant\na<think>b</think>c<|im_end|>\n<|im_start|>assistant\n", None),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", None),
        ("", None),
    ],
)
def test_what_prompts_say(prompt: str, starts: bool | None) -> None:
    assert starts_in_reasoning(prompt) is starts


def test_prompts_of_a_template(encoder: ChatEncoder) -> None:
    messages = [{"role": "user", "content": "</think>"}]
    assert starts_in_reasoning(encoder.encode_chat(messages).text) is None
    off = encoder.encode_chat(messages, variables={"enable_thinking": False})
    assert starts_in_reasoning(off.text) is False
    thinking = [*messages, {"role": "assistant", "content": "<think>\nhm"}]
    continued = encoder.encode_chat(
        thinking, add_generation_prompt=False, continue_final_message=True
    )
    assert starts_in_reasoning(continued.text) is True
