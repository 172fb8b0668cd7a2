"""Templates that would compute for ever, or build texts without end, stop by themselves."""

from __future__ import annotations

import pytest

from ellm_serve.errors import InvalidRequest
from ellm_serve.text import ChatEncoder, ChatTemplate, RenderLimits, Tokenizer
from ellm_serve.text.chat_template import Conversation
from tests.text.conversations import user

MILLION = "('b' * 10 ** 6)"


def _often(body: str) -> str:
    return "{% for i in range(10 ** 5) %}" + body + "{% endfor %}"


def _growing(start: str, step: str, end: str = "") -> str:
    """Sets `n.v` to `step` of itself many times."""
    loop = "{% for i in range(70) %}{% set n.v = " + step + " %}{% endfor %}"
    return "{% set n = namespace(v=" + start + ") %}" + loop + end


BOMBS = {
    # Time
    "loops": _often(_often("")),
    "filtered": _often("{% for j in range(10 ** 5) if false %}{% endfor %}"),
    "block": "{% set x %}" + _often(_often("a")) + "{% endset %}",
    "macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "loop call": "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "range": "{{ range(10 ** 9) | list }}",
    "statements": "{% for i in [1] * 10 ** 6 %}" + "{% set x = i %}" * 30 + "{% endfor %}",
    "conditions": "{% for i in [1] * 10 ** 6 if i > 1 and i > 2 or i > 3 %}{% endfor %}",
    # Growth
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": _growing("3", "n.v * n.v"),
    "repeat": "{{ 'a' * 10 ** 11 }}",
    "repeat list": "{{ [1] * 10 ** 11 }}",
    "doubling": _growing("'a'", "n.v ~ n.v"),
    "adding": _growing("'a'", "n.v + n.v"),
    "adding lists": _growing("[1]", "n.v + n.v"),
    "nested lists": _growing("[1]", "[n.v, n.v]", "{{ n.v }}"),
    "nested json": _growing("[1]", "[n.v, n.v]", "{{ n.v | tojson }}"),
    "nested text": _growing("[1]", "[n.v, n.v]", "{{ n.v ~ '' }}"),
    "nested equal": _growing("[1]", "[n.v, n.v]", "{{ n.v == [n.v] }}"),
    # Single calls
    "center": "{{ 'a' | center(10 ** 11) }}",
    "ljust": "{{ 'a'.ljust(10 ** 11) }}",
    "indent": "{{ 'a' | indent(10 ** 11) }}",
    "indent json": "{{ messages | tojson(indent=10 ** 10) }}",
    "replace": f"{{{{ {MILLION} | replace('b', {MILLION}) }}}}",
    "replace method": f"{{{{ {MILLION}.replace('', {MILLION}) }}}}",
    "join": f"{{{{ range(99999) | join({MILLION}) }}}}",
    "join method": f"{{{{ {MILLION}.join(range(99999) | map('string')) }}}}",
    "join long": f"{{{{ ([{MILLION}] * 10 ** 5) | join }}}}",
    "percent": "{{ '%99999999999d' % 1 }}",
    "percent name": "{{ '%(n)99999999999d' % {'n': 1} }}",
    "percent star": "{{ '%*d' | format(10 ** 11, 1) }}",
    "format": "{{ '{:99999999999}'.format(1) }}",
    "format field": "{{ '{:{}}'.format(1, 10 ** 11) }}",
    "round": "{{ 1.5 | round(10 ** 9, 'floor') }}",
    "slices": "{{ [1] | slice(10 ** 11) | list }}",
    "date": "{{ strftime_now('%99999999999Y') }}",
    "translate": f"{{{{ 'aaaa'.translate({{97: {MILLION}}}) }}}}",
    "sum": "{{ [[1]] | sum(start=[]) }}",
    # Output
    "long output": _often("{{ 'a' * 10 ** 5 }}"),
    "literal output": _often("a" * 1000),
}

LIMIT_MESSAGES = (
    "runs too long|too much text|chat templates may|longer than|too deeply|Range too big|unsafe"
)


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_stop(name: str) -> None:
    """A few characters of template had kept a server busy for hours, or taken all its memory."""
    limits = RenderLimits(max_chars=1_000_000, time_limit_s=0.2)
    template = ChatTemplate(BOMBS[name])
    with pytest.raises(InvalidRequest, match=LIMIT_MESSAGES):
        template.render(Conversation([user("hi")]), limits=limits)


def test_bomb_within_chat_prompt(tokenizer: Tokenizer) -> None:
    """The limits reach the template through the encoder."""
    limits = RenderLimits(max_chars=10)
    encoder = ChatEncoder(tokenizer, ChatTemplate("{{ messages[0].content }}"), limits)
    assert encoder.encode_chat([user("a" * 10)]).text == "a" * 10
    with pytest.raises(InvalidRequest, match="10 characters"):
        encoder.encode_chat([user("a" * 11)])


def test_limits_leave_room_for_long_conversations() -> None:
    """Hundreds of thousands of tokens in thousands of messages are what this server is for."""
    source = (
        "{% macro show(m) %}{{ '<' + m.role + '>' + m.content ~ m.content | trim }}{% endmacro %}"
        "{% for m in messages %}{{ show(m) }}{{ m | tojson }}{% endfor %}"
    )
    conversation = Conversation([user("text " * 40)] * 2000)
    assert len(ChatTemplate(source).render(conversation)) > 1_000_000
