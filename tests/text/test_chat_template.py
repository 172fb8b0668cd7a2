"""Where templates come from, what they may use, and how they fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ellm_serve.errors import InvalidRequest, ModelError
from ellm_serve.text import ChatEncoder, ChatTemplate, Tokenizer
from ellm_serve.text.chat_template import Conversation
from tests.text.conversations import user
from tests.text.tiny_tokenizer import write_tiny_tokenizer


def _render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(Conversation([user("hi")], variables=variables))


def _message(source: str, **variables: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        _render(source, **variables)
    assert caught.value.status == 400
    return caught.value.message


def _write_config(path: Path, template: object) -> None:
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def _from_dir(path: Path, tools: list[Any] | None = None) -> str:
    template = ChatTemplate.from_dir(path)
    assert template is not None
    return template.render(Conversation([user("hi")], tools=tools))


def test_sources(tmp_path: Path) -> None:
    """The file beside the model goes before the configuration, as in transformers."""
    assert ChatTemplate.from_dir(tmp_path) is None
    _write_config(tmp_path, "from config")
    assert _from_dir(tmp_path) == "from config"
    variants = {"default": "usual", "tool_use": "with tools", "rag": "{% broken"}
    _write_config(tmp_path, [{"name": k, "template": v} for k, v in variants.items()])
    assert _from_dir(tmp_path) == "usual"
    assert _from_dir(tmp_path, tools=[{}]) == "with tools"
    (tmp_path / "chat_template.jinja").write_text("from file é", encoding="utf-8")
    assert _from_dir(tmp_path) == "from file é"


@pytest.mark.parametrize("template", ["{% if %}", "{{ x | nofilter }}", [{"name": "default"}], 7])
def test_broken_template_of_a_model(tmp_path: Path, template: object) -> None:
    """Noticed when the server starts, not with the first request."""
    _write_config(tmp_path, template)
    with pytest.raises(ModelError):
        ChatTemplate.from_dir(tmp_path)


def test_model_without_template(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        ChatEncoder.from_dir(write_tiny_tokenizer(tmp_path))


def test_model_directory(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    encoder = ChatEncoder.from_dir(write_tiny_tokenizer(tmp_path, source))
    prompt = encoder.encode_chat([user("hi")])
    assert prompt.text == "hi<|im_end|>"
    assert prompt.token_ids[-1] == encoder.tokenizer.eos_token_id


def test_template_of_a_request(tokenizer: Tokenizer) -> None:
    encoder = ChatEncoder(tokenizer, ChatTemplate("model's"))
    assert encoder.encode_chat([user("hi")], template=ChatTemplate("own")).text == "own"


def test_own_message_of_the_template() -> None:
    """A template that wants other roles says so; the client must read it, with status 400."""
    assert "Roles must alternate" in _message("{{ raise_exception('Roles must alternate') }}")
    assert "Roles" in _message(
        "{% macro f() %}{{ raise_exception('Roles') }}{% endmacro %}{{ f() }}"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.at_all }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ messages | join(1, 2, 3) }}",
        "{{ messages[0].content * 'x' }}",
        "{% include 'other' %}",
        "{{ none.x.y }}",
        "{{ undefined_function() }}",
        "{{ [1] | sum(start='a') }}",
        "{{ '{' .format() }}",
        "{{ '%d' | format('x') }}",
        "{{ 'x'.encode() }}",
    ],
)
def test_faults_are_the_requests(source: str) -> None:
    """Never a bare Python or Jinja error: those would be a 500."""
    assert _message(source).startswith("Chat template error")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'].x }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ ''|attr('__class__') }}{{ (''|attr('__class__')).x }}",
        "{{ [''] | map(attribute='__class__') | map(attribute='x') | list }}",
        "{{ '{0.__class__}'.format('') }}{{ messages.append(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ strftime_now.__closure__.x }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('touch marker') }}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_sandbox(source: str) -> None:
    """Templates come with downloaded models; they must not get at Python."""
    _message(source)


def test_python_files_of_a_model_are_not_run(tmp_path: Path) -> None:
    """`auto_map` names code in the model directory; loading it is how models take over servers."""
    write_tiny_tokenizer(tmp_path, "x")
    marker = tmp_path / "marker"
    code = f"open({str(marker)!r}, 'w').close()"
    for name in ("tokenization_own.py", "configuration_own.py", "__init__.py"):
        (tmp_path / name).write_text(code)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    config["tokenizer_class"] = "OwnTokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    before = set(sys.modules)
    ChatEncoder.from_dir(tmp_path).encode_chat([user("hi")])
    assert not marker.exists()
    assert not {name for name in set(sys.modules) - before if "own" in name}


def test_json_is_written_as_by_transformers() -> None:
    """No HTML escapes, no sorting: the form the model was trained on."""
    value = {"b": "<é&'>", "a": [1, None, True]}
    assert _render("{{ v | tojson }}", v=value) == '{"b": "<é&\'>", "a": [1, null, true]}'
    assert _render("{{ v | tojson(ensure_ascii=true) }}", v="é🙂") == '"\\u00e9\\ud83d\\ude42"'
    assert _render("{{ v | tojson(indent=1) }}", v=[1]) == "[\n 1\n]"
    sorted_text = _render("{{ v | tojson(separators=(',', ':'), sort_keys=true) }}", v=value)
    assert sorted_text == '{"a":[1,null,true],"b":"<é&\'>"}'


def test_extras() -> None:
    assert (
        _render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )
    assert (
        _render("{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x is defined }}") == "aFalse"
    )
    assert len(_render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert _render("{{ 'a-b'.split('-') | last }}{{ 'ab'[::-1] }}{{ '%s!' % 'x' }}") == "bbax!"
    assert _render("{{ ', '.join(['a', 'b']) }}{{ 'a' * 3 }}{{ 2 ** 8 }}") == "a, baaa256"


def test_rendering_twice_gives_the_same() -> None:
    """A prompt must not depend on the prompts before it."""
    template = ChatTemplate(
        "{% set n = namespace(i=0) %}"
        "{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}"
    )
    conversation = Conversation([user("a"), user("b")])
    assert [template.render(conversation) for _ in range(2)] == ["2", "2"]
