"""What a service is made of: its names, its defaults, its limits."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ellm_serve.errors import ConfigError, InvalidRequest, ModelError
from ellm_serve.metrics import Metrics
from ellm_serve.protocol.sampling import SamplingDefaults
from ellm_serve.serve.naming import (
    engine_id,
    fingerprint,
    is_loggable,
    response_id,
    session_key,
)
from ellm_serve.serve.service import Service, sampling_defaults
from tests.serve.scripted import IM_END, MODEL_DIR, harness, run, serve_config, tokenizer

FROM_MODEL = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)


def defaults(model_dir: Path = MODEL_DIR, **changes: Any) -> SamplingDefaults:
    return sampling_defaults(model_dir, serve_config(**changes))


def test_defaults_come_from_the_model() -> None:
    """Unless they are switched off; single ones can be set over them."""
    assert defaults() == FROM_MODEL
    assert defaults(generation_config="vllm") == SamplingDefaults()
    over = {"temperature": 0.1, "presence_penalty": 0.5, "top_k": None}
    assert defaults(override_generation_config=over) == SamplingDefaults(
        temperature=0.1, top_p=0.8, repetition_penalty=1.05, presence_penalty=0.5
    )
    with pytest.raises(ConfigError, match="did you mean temperature"):
        defaults(override_generation_config={"temperatur": 1})


def test_a_bound_of_the_output(tmp_path: Path) -> None:
    """The model's own is a default; that of whoever runs the server holds for everybody."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    found = [
        defaults(tmp_path),
        defaults(generation_config=str(tmp_path)),
        defaults(override_generation_config={"max_new_tokens": 7}),
    ]
    bounds = [(one.max_tokens, one.max_tokens_cap) for one in found]
    assert bounds == [(7, None), (7, 7), (7, 7)]
    with pytest.raises(ConfigError, match=r"no generation_config\.json"):
        defaults(generation_config=str(tmp_path / "elsewhere"))


def test_defaults_hold_for_requests() -> None:
    """A cap cuts what was asked for."""
    with harness(override_generation_config={"max_new_tokens": 3}) as served:
        served.say("Hello there", IM_END)
        answer = run(served.chat(max_tokens=100))
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 3


def test_models_have_a_card_for_each_name() -> None:
    """And none is called by a name that is not there."""
    with harness() as served:
        cards = served.service.models().data
        assert [card.id for card in cards] == ["qwen3-coder", "alias2"]
        assert {card.max_model_len for card in cards} == {2048}
        served.say("Hi", IM_END)
        assert run(served.complete(model="alias2")).model == "qwen3-coder"


def test_a_model_without_template(tmp_path: Path) -> None:
    """Completes text and takes no messages."""
    shutil.copytree(MODEL_DIR, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    with harness(model_dir=tmp_path) as served:
        served.say("Hi", IM_END)
        assert run(served.complete()).choices[0].text == "Hi"
        with pytest.raises(InvalidRequest, match="no chat template"):
            run(served.chat())


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot read"), (b"{% if %}", "not valid"), (b"\xff", "utf-8")],
)
def test_a_template_that_cannot_be_used(tmp_path: Path, content: bytes | None, reason: str) -> None:
    """Is a mistake in the configuration."""
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=reason), harness(chat_template=str(file)):
        pass


def test_a_directory_without_tokenizer(tmp_path: Path) -> None:
    """Is named."""
    with harness() as served, pytest.raises(ModelError, match=r"tokenizer\.json"):
        Service.create(served.engine, tmp_path, served.config, Metrics("m", process=False))


def test_the_longest_token_bounds_a_prompt() -> None:
    """In characters, since no prompt of more can fit."""
    longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
    with harness() as served:
        assert served.service._backend.limits.max_chars_per_token == longest


# --- names ---------------------------------------------------------------------------------------


def test_names_of_answers() -> None:
    """The header's, then the body's, then one of ours."""
    assert response_id("cmpl", "head", "body") == "cmpl-head"
    assert response_id("cmpl", None, "body") == "cmpl-body"
    assert response_id("cmpl", None, None) != response_id("cmpl", None, None)
    assert engine_id("cmpl-a", 0) != engine_id("cmpl-a", 0)


@pytest.mark.parametrize(
    ("sources", "key"),
    [
        (("body", "head", {"session_id": "extra"}), "body"),
        ((None, "head", {"session_id": "extra"}), "head"),
        ((None, None, {"session_id": "extra"}), "extra"),
        (("", "", {"session_id": ""}), None),
        ((None, None, {"session_id": 7}), None),
        ((None, None, None), None),
    ],
)
def test_names_of_sessions(
    sources: tuple[str | None, str | None, dict[str, object] | None], key: str | None
) -> None:
    """The first source that has one; what is no text does not count."""
    assert session_key(*sources) == key


def test_what_may_be_logged() -> None:
    """Nothing that could forge a line or hide in one."""
    assert is_loggable("conversation-1")
    assert not any(map(is_loggable, ("a b", "a\nb", "é", "a\x1b")))


def test_fingerprint() -> None:
    """Changes with the engine's set-up, and not with keys."""
    first = fingerprint(serve_config())
    assert first == fingerprint(serve_config(api_keys=("secret",)))
    assert first != fingerprint(serve_config(batch_size=5))


def test_one_id_twice_at_once() -> None:
    """Clients may do that; both get an answer."""
    with harness() as served:
        served.say("Hi", IM_END)
        served.script.gate.clear()

        async def scene() -> list[str]:
            tasks = [asyncio.create_task(served.chat(request_id="same")) for _ in range(2)]
            await asyncio.sleep(0.01)
            served.script.gate.set()
            return [(await task).id for task in tasks]

        assert run(scene()) == ["chatcmpl-same"] * 2
