"""Refusals are quick, clear and name the field; nothing a client sends harms the process."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from ellm_serve.errors import InvalidRequest, Overloaded
from ellm_serve.grammar.compiler import GrammarCompiler, GrammarLimits
from ellm_serve.request import Grammar, GrammarKind
from tests.grammar.forms import VOCAB, tokenizer


def nested(levels: int) -> str:
    """A schema of objects within objects, as text: no parser has seen it."""
    return '{"properties": {"a": ' * levels + "{}" + "}}" * levels


def chain(length: int) -> str:
    """References that no limit on nesting sees."""
    defs: dict[str, object] = {
        f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(length)
    }
    return json.dumps({"$defs": {**defs, f"a{length}": {}}, "$ref": "#/$defs/a0"})


def rules(length: int) -> str:
    """A grammar of rules within rules."""
    lines = [f'r{i}: "a" r{i + 1}' for i in range(length)]
    return "\n".join(["start: r0", *lines, f'r{length}: "a"'])


SCHEMA, REGEX, CHOICE, GRAMMAR = (
    GrammarKind.JSON_SCHEMA,
    GrammarKind.REGEX,
    GrammarKind.CHOICE,
    GrammarKind.GRAMMAR,
)
REFUSED = {
    "type": (SCHEMA, '{"type": "foo"}', "Invalid type: foo"),
    "keyword": (SCHEMA, '{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
    "pattern": (SCHEMA, '{"type": "string", "pattern": "[unclosed"}', "unclosed character class"),
    "lookahead": (SCHEMA, '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
    "reference": (SCHEMA, '{"$ref": "#/$defs/nowhere"}', "does not exist"),
    "remote": (SCHEMA, '{"$ref": "http://127.0.0.1:1/x"}', "http://127.0.0.1:1/x"),
    "endless": (SCHEMA, '{"$ref": "#"}', "matches no text"),
    "false": (SCHEMA, "false", "must be an object"),
    "no JSON": (SCHEMA, "{", "not valid JSON"),
    "deep": (SCHEMA, nested(40), "more than 64 levels"),
    "deeper": (SCHEMA, nested(10_000), "more than 64 levels"),
    "references": (SCHEMA, chain(5000), "too complex"),
    "multiples": (SCHEMA, '{"type": "integer", "multipleOf": 15999971}', "too complex"),
    "huge": (SCHEMA, json.dumps({"enum": ["x" * 5_000_000]}), "at most 1048576"),
    "many": (
        SCHEMA,
        json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(25_000)}}),
        "too large",
    ),
    "regex": (REGEX, "(", "unclosed group"),
    "long regex": (REGEX, "a" * 100_000, "at most 65536"),
    "nothing": (REGEX, r"[^\x00-\x{10FFFF}]", "matches no text"),
    "no choice": (CHOICE, "[]", "must not be empty"),
    "no strings": (CHOICE, "[1]", "list of strings"),
    "unknown rule": (GRAMMAR, "start: foo", 'unknown name: "foo"'),
    "no rule": (GRAMMAR, "", "'root' rule"),
    "rules": (GRAMMAR, rules(3000), "too complex"),
    "parentheses": (GRAMMAR, "start: " + "(" * 100_000, "too deeply nested"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_refused(compiler: GrammarCompiler, name: str) -> None:
    """With the reason, in a few seconds even on a busy machine, and the next one is compiled."""
    kind, text, reason = REFUSED[name]
    start = time.monotonic()
    with pytest.raises(InvalidRequest) as refusal:
        compiler.compile(Grammar(kind, text, field="response_format"))
    assert refusal.value.message.startswith("Grammar error: ")
    assert reason in refusal.value.message
    assert refusal.value.param == "response_format"
    assert len(refusal.value.message) < 1100
    assert "%llguidance" not in refusal.value.message
    assert time.monotonic() - start < 60
    compiler.compile(Grammar(SCHEMA, json.dumps({"type": "object", "title": name})))


def test_a_bad_regex_is_told_in_vllms_words(compiler: GrammarCompiler) -> None:
    """Recorded from a real vLLM."""
    with pytest.raises(InvalidRequest) as refusal:
        compiler.compile(Grammar(REGEX, "("))
    assert refusal.value.message == (
        'Grammar error: at 1(8): invalid regex "(" (in regex): regex parse error:\n    (\n    ^\n'
        "error: unclosed group\n   1 | start: /(/\n              ^"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "maximum": 99999999999},
        {"type": "string", "pattern": "(a+)+$"},
        {"type": "string", "minLength": 1_000_000},
        {"type": "array", "items": {"type": "object"}, "minItems": 100_000},
        {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"},
        {"enum": [f"value {i}" for i in range(10_000)]},
        {},
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_what_looks_dangerous_and_is_not(compiler: GrammarCompiler, schema: object) -> None:
    """Large numbers, nested quantifiers and recursion are no reason to refuse."""
    compiler.compile(Grammar(SCHEMA, json.dumps(schema)))


def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    """The field does not count; the text and the options do."""
    first = compiler.compile(Grammar(REGEX, "abc", field="a"))
    assert compiler.compile(Grammar(REGEX, "abc", field="b")) is first
    assert compiler.compile(Grammar(REGEX, "abd")) is not first
    one = compiler.compile(Grammar(SCHEMA, "{}"))
    assert compiler.compile(Grammar(SCHEMA, "{}", whitespace="")) is not one


def test_a_failed_grammar_is_compiled_again(compiler: GrammarCompiler) -> None:
    """What it has learnt on the way is spoilt."""
    first = compiler.compile(Grammar(REGEX, "failing"))
    first.failed = True
    second = compiler.compile(Grammar(REGEX, "failing"))
    assert second is not first and not second.failed
    assert compiler.compile(Grammar(REGEX, "failing")) is second


def test_the_cache_is_bounded() -> None:
    """By number, least recently used first, and by the time that compiling took."""
    regexes = [Grammar(REGEX, text) for text in ("a", "b", "c")]
    with make(max_cached=2) as compiler:
        a, b = (compiler.compile(regex) for regex in regexes[:2])
        assert compiler.compile(regexes[0]) is a
        compiler.compile(regexes[2])
        assert compiler.compile(regexes[0]) is a
        assert compiler.compile(regexes[1]) is not b
    with make(max_cached_s=0.0) as compiler:
        a = compiler.compile(regexes[0])
        assert compiler.compile(regexes[0]) is a
        compiler.compile(regexes[1])
        assert compiler.compile(regexes[0]) is not a


def test_time_is_bounded() -> None:
    """A schema that needs seconds is given up after the CPU time that it may take."""
    slow = Grammar(SCHEMA, '{"type": "integer", "multipleOf": 99991}')
    with make(cpu_s=0.05) as compiler, pytest.raises(InvalidRequest, match="too much time"):
        compiler.compile(slow)
    with make(cpu_s=30.0) as compiler:
        compiler.compile(slow)


def test_memory_is_bounded() -> None:
    """Also where time is not."""
    large = Grammar(SCHEMA, '{"type": "integer", "multipleOf": 499979}')
    with (
        make(cpu_s=60.0, more_bytes=1 << 26) as compiler,
        pytest.raises(InvalidRequest, match="too much time or memory"),
    ):
        compiler.compile(large)


def test_nobody_waits_for_ever() -> None:
    """While one grammar is compiled, another request is told to come back later."""
    slow = Grammar(SCHEMA, '{"type": "integer", "multipleOf": 15999971}')
    with make(cpu_s=3.0, max_wait_s=0.05) as compiler:
        compiler.compile(Grammar(REGEX, "known"))
        refused = threading.Event()

        def compile_slow() -> None:
            with pytest.raises(InvalidRequest):
                compiler.compile(slow)
            refused.set()

        thread = threading.Thread(target=compile_slow)
        thread.start()
        overloaded = False
        while not refused.is_set() and not overloaded:
            try:
                compiler.compile(Grammar(REGEX, f"new {time.monotonic()}"))
            except Overloaded as error:
                assert error.retry_after_s > 0
                overloaded = True
                compiler.compile(Grammar(REGEX, "known"))  # what is known needs no turn
        thread.join()
        assert overloaded and refused.is_set()


def test_the_process_may_die_at_any_time() -> None:
    """A new one takes its place; none is left behind in the end."""
    with make() as compiler:
        compiler.start()
        first = child(compiler)
        os.kill(first, signal.SIGKILL)
        compiler.compile(Grammar(REGEX, "a"))
        second = child(compiler)
        assert second != first
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def make(**limits: float) -> GrammarCompiler:
    return GrammarCompiler.for_model(tokenizer(), VOCAB, GrammarLimits(**limits))  # type: ignore[arg-type]


def child(compiler: GrammarCompiler) -> int:
    process = compiler._sandbox._process
    assert process is not None
    return process.pid
