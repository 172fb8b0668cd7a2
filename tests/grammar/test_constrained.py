"""Whatever the model says, an answer that ends is of the form that was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ellm_serve.engine.engine import Engine
from ellm_serve.errors import InvalidRequest
from ellm_serve.grammar.compiler import GrammarCompiler
from ellm_serve.request import FinishReason, Grammar, GrammarKind, SamplingParams
from tests.engine.doubles import HashExecutor, Prefix, ScriptedExecutor
from tests.grammar.forms import (
    EOS,
    PROMPT,
    VOCAB,
    AnyModel,
    answers,
    bounds,
    submit,
    text,
    tokenizer,
)

CHOICES = ["positive", "negative", "neutral", "pos", 'with "quotes"\nand lines', "é 😀"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def of(kind: GrammarKind, content: object = None) -> Grammar:
    is_text = kind in (GrammarKind.REGEX, GrammarKind.GRAMMAR)
    return Grammar(kind, str(content) if is_text else json.dumps(content))


def whole_regex(regex: str) -> Callable[[str], object]:
    return re.compile(regex).fullmatch


FORMS: dict[str, tuple[Grammar, Callable[[str], object]]] = {
    "choice": (of(GrammarKind.CHOICE, CHOICES), lambda answer: answer in CHOICES),
    "digits": (of(GrammarKind.REGEX, r"\d{3}-[a-f]+"), whole_regex(r"\d{3}-[a-f]+")),
    "anchored": (of(GrammarKind.REGEX, r"^(ab?|c\/d)+$"), whole_regex(r"(ab?|c\/d)+")),
    "free": (of(GrammarKind.REGEX, r'(.|\n)*"'), whole_regex(r'(.|\n)*"')),
    "empty": (of(GrammarKind.REGEX, r"a?"), whole_regex(r"a?")),
    "quantifiers": (of(GrammarKind.REGEX, r"(a+)+b"), whole_regex(r"a+b")),
    "schema": (
        of(GrammarKind.JSON_SCHEMA, SCHEMA),
        lambda a: set(json.loads(a)) == {"name", "age"},
    ),
    "object": (of(GrammarKind.JSON_OBJECT), lambda a: isinstance(json.loads(a), dict)),
    "lark": (of(GrammarKind.GRAMMAR, 'start: "x" | "(" start ")"'), whole_regex(r"\(*x\)*")),
    "gbnf": (of(GrammarKind.GRAMMAR, 'root ::= "yes" | "no" [0-9]+'), whole_regex("yes|no[0-9]+")),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_every_kind(
    compiler: GrammarCompiler, engine: Engine, name: str, temperature: float
) -> None:
    """Greedy and by chance; most answers end before the limit, and all those are right."""
    grammar, is_right = FORMS[name]
    compiled = compiler.compile(grammar)
    results = answers(engine, compiled, 6, temperature=temperature)
    ended = [answer for answer, finish in results if finish is FinishReason.STOP]
    assert all(finish in (FinishReason.STOP, FinishReason.LENGTH) for _, finish in results)
    assert len(ended) >= 1 or temperature == 50.0
    assert all(is_right(answer) for answer in ended)


def test_sequences_of_one_grammar_are_apart(compiler: GrammarCompiler, engine: Engine) -> None:
    """n > 1: each has its own state, and gets what it gets alone."""
    compiled = compiler.compile(of(GrammarKind.JSON_SCHEMA, SCHEMA))
    sampling = SamplingParams(max_tokens=100, logprobs=1)
    consumers = [submit(engine, compiled, f"m{i}", replace(sampling, seed=i)) for i in range(4)]
    together = [consumer.wait() for consumer in consumers]
    assert len({text(consumer) for consumer in together}) > 1
    for i, consumer in enumerate(together):
        again = submit(engine, compiled, f"a{i}", replace(sampling, seed=i)).wait()
        assert again.outcome == consumer.outcome


def test_a_cut_answer_is_the_start_of_a_right_one(
    compiler: GrammarCompiler, engine: Engine
) -> None:
    """The limit counts as ever."""
    compiled = compiler.compile(of(GrammarKind.REGEX, r"(abc)*d"))
    for answer, finish in answers(engine, compiled, max_tokens=3):
        assert finish is FinishReason.LENGTH or answer.endswith("d")
        assert ("abc" * 100).startswith(answer.rstrip("d"))


def test_the_end_is_forced(compiler: GrammarCompiler) -> None:
    """Where nothing else is possible, whatever the model and the other settings would like."""
    word = tokenizer().encode(" never")[0]
    compiled = compiler.compile(of(GrammarKind.CHOICE, ["yes"]))
    with Engine(ScriptedExecutor(bounds(), lambda prefix: word), eos_token_ids=[EOS]) as engine:
        for i, changes in enumerate(
            [
                {},
                {"min_tokens": 50},
                {"ignore_eos": True},
                {"allowed_token_ids": tuple(range(VOCAB - 10))},
                {"bad_words": ((EOS,),)},
                {"logit_bias": ((EOS, -100.0),)},
                {"temperature": 1.0, "top_k": 1},
            ]
        ):
            sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 60, **changes})  # type: ignore[arg-type]
            consumer = submit(engine, compiled, f"r{i}", sampling).wait()
            assert text(consumer) == "yes"
            assert consumer.last.finish_reason is FinishReason.STOP
            assert consumer.last.stop_token_id == EOS


def test_no_end_before_the_grammar_allows_it(compiler: GrammarCompiler) -> None:
    """A model that always wants to stop; where it may, it does, unless min_tokens forbids."""
    compiled = compiler.compile(of(GrammarKind.REGEX, "ab*"))
    with Engine(ScriptedExecutor(bounds(), lambda prefix: EOS), eos_token_ids=[EOS]) as engine:
        greedy = SamplingParams(temperature=0.0, max_tokens=40)
        assert text(submit(engine, compiled, "a", greedy).wait()) == "a"
        longer = submit(engine, compiled, "b", replace(greedy, min_tokens=6)).wait()
        assert longer.last.usage.num_output_tokens == 7
        assert re.fullmatch("ab+", text(longer))
        # End ids mean nothing here, though the answer could end.
        ignoring = submit(engine, compiled, "c", replace(greedy, ignore_eos=True)).wait()
        assert ignoring.last.finish_reason is FinishReason.LENGTH


def test_stop_tokens_end_a_complete_answer(compiler: GrammarCompiler) -> None:
    """Of those that are no text; one that is text ends where the grammar allows the text."""
    compiled = compiler.compile(of(GrammarKind.REGEX, "ab*"))
    control, letter = 4087, tokenizer().encode("b")[0]
    with Engine(ScriptedExecutor(bounds(), lambda prefix: control), eos_token_ids=[EOS]) as engine:
        greedy = SamplingParams(temperature=0.0, stop_token_ids=(control,))
        stopped = submit(engine, compiled, "a", greedy).wait()
        assert (text(stopped), stopped.last.stop_token_id) == ("a", control)
    with Engine(ScriptedExecutor(bounds(), lambda prefix: letter), eos_token_ids=[EOS]) as engine:
        greedy = SamplingParams(temperature=0.0, stop_token_ids=(letter,))
        stopped = submit(engine, compiled, "a", greedy).wait()
        assert (text(stopped), stopped.last.stop_token_id) == ("a", letter)


def test_a_grammar_needs_an_end(compiler: GrammarCompiler) -> None:
    """Without any token that ends an answer it could never be complete."""
    compiled = compiler.compile(of(GrammarKind.CHOICE, ["yes"]))
    with Engine(AnyModel(bounds()), eos_token_ids=[]) as engine:
        with pytest.raises(InvalidRequest):
            submit(engine, compiled, "a", SamplingParams())
        ended = submit(engine, compiled, "b", SamplingParams(stop_token_ids=(4088,))).wait()
        assert (text(ended), ended.last.stop_token_id) == ("yes", 4088)


def test_control_tokens_and_padding_are_no_text(compiler: GrammarCompiler, engine: Engine) -> None:
    """A grammar that allows every text allows no token that is none."""
    compiled = compiler.compile(of(GrammarKind.REGEX, r"(?s:.*)"))
    mask = np.zeros(VOCAB // 32 + 1, np.uint32)
    assert compiled.constraint([EOS]).fill(mask) is False
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    ids = set(allowed.tolist())
    assert EOS in ids and VOCAB not in ids
    assert not (tokenizer().control_ids - {EOS}) & ids
    assert not {t for t in range(VOCAB) if not tokenizer().token_bytes(t)} & ids
    assert len(ids) > 3500


def test_logprobs_are_those_of_the_model(compiler: GrammarCompiler) -> None:
    """Raw: the token that the model wanted is still first, though it was not possible."""
    wanted = tokenizer().encode(" never")[0]
    compiled = compiler.compile(of(GrammarKind.CHOICE, ["a"]))
    with Engine(ScriptedExecutor(bounds(), lambda prefix: wanted), eos_token_ids=[EOS]) as engine:
        sampling = SamplingParams(temperature=0.0, logprobs=1)
        _, _, _, entries = submit(engine, compiled, "a", sampling).wait().outcome
    assert [entry.top[0][0] for entry in entries] == [wanted, wanted]
    assert all(entry.logprob < -40 for entry in entries)


def test_neighbours_without_a_grammar_are_untouched(compiler: GrammarCompiler) -> None:
    """Free and constrained rows in one step."""
    compiled = compiler.compile(of(GrammarKind.JSON_OBJECT))
    sampling = SamplingParams(max_tokens=60, seed=3, logprobs=2)
    with Engine(HashExecutor(bounds()), eos_token_ids=[EOS]) as engine:
        free = submit(engine, None, "free", sampling).wait().outcome
    with Engine(HashExecutor(bounds()), eos_token_ids=[EOS]) as engine:
        neighbours = [submit(engine, compiled, f"r{i}", sampling) for i in range(3)]
        assert submit(engine, None, "free", sampling).wait().outcome == free
        assert all(consumer.wait() for consumer in neighbours)


def test_what_leaves_no_token_ends_that_row_alone(compiler: GrammarCompiler) -> None:
    """Settings that exclude each other, and a grammar that runs into nothing."""
    yes = compiler.compile(of(GrammarKind.CHOICE, ["yes"]))
    # What has to come behind `b` never ends, and so never begins.
    trap = compiler.compile(of(GrammarKind.GRAMMAR, 'start: "a" | "b" x\nx: x'))
    letter = tokenizer().encode("b")[0]
    with Engine(ScriptedExecutor(bounds(), lambda prefix: letter), eos_token_ids=[EOS]) as engine:
        greedy = SamplingParams(temperature=0.0, max_tokens=100)
        running = submit(engine, None, "other", greedy)
        none = submit(engine, yes, "a", replace(greedy, allowed_token_ids=(letter,))).wait()
        assert none.last.finish_reason is FinishReason.ERROR
        assert "leaves no token" in (none.last.error or "")
        trapped = submit(engine, trap, "b", greedy).wait()
        assert trapped.last.finish_reason is FinishReason.ERROR
        assert "no token is left" in (trapped.last.error or "")
        assert not trap.failed
        assert text(submit(engine, yes, "c", greedy).wait()) == "yes"
        assert running.wait().last.finish_reason is FinishReason.LENGTH


def test_a_grammar_out_of_fuel_ends_its_rows_and_is_compiled_again(
    compiler: GrammarCompiler,
) -> None:
    """It costs more and more with each letter; the engine and all others go on."""
    lark = "start: A\nA: ~/(.*a.{300}b.*)/ & ~/(.*c.{300}d.*)/"
    grammar = of(GrammarKind.GRAMMAR, lark)
    compiled = compiler.compile(grammar)
    letters = [tokenizer().encode(letter)[0] for letter in "ac"]

    def script(prefix: Prefix) -> int:
        return letters[hash(prefix) % 2]

    with Engine(ScriptedExecutor(bounds(), script), eos_token_ids=[EOS]) as engine:
        greedy = SamplingParams(temperature=0.0, max_tokens=400)
        failed = submit(engine, compiled, "a", greedy).wait()
        assert failed.last.finish_reason is FinishReason.ERROR
        assert "too many expressions" in (failed.last.error or "")
        assert compiled.failed and compiler.compile(grammar) is not compiled
        other = compiler.compile(of(GrammarKind.CHOICE, ["yes"]))
        assert text(submit(engine, other, "b", greedy).wait()) == "yes"


def test_a_grammar_that_costs_more_and_more_ends_its_row(compiler: GrammarCompiler) -> None:
    """Each letter of an ambiguous grammar takes longer than the one before, with no bound."""
    compiled = compiler.compile(of(GrammarKind.GRAMMAR, 'start: start start | "a" | '))
    letter = tokenizer().encode("a")[0]
    room = bounds(sequence_length=2048)
    with Engine(ScriptedExecutor(room, lambda prefix: letter), eos_token_ids=[EOS]) as engine:
        greedy = SamplingParams(temperature=0.0, max_tokens=2000)
        failed = submit(engine, compiled, "a", greedy).wait()
        assert failed.last.finish_reason is FinishReason.ERROR
        assert "too much work" in (failed.last.error or "")
        assert not compiled.failed
        assert submit(engine, compiled, "b", replace(greedy, max_tokens=9)).wait().token_ids


def test_the_grammar_starts_behind_a_token(compiler: GrammarCompiler) -> None:
    """Thoughts are free, but no end comes before their own end."""
    think_end = 4095
    thought = tokenizer().encode("hm")
    compiled = compiler.compile(of(GrammarKind.CHOICE, ["yes"]))

    def script(prefix: Prefix) -> int:
        count = len(prefix) - len(PROMPT)
        return EOS if count == 0 else thought[0] if count < 4 else think_end

    with Engine(ScriptedExecutor(bounds(), script), eos_token_ids=[EOS]) as engine:
        greedy = SamplingParams(temperature=0.0)
        consumer = submit(engine, compiled, "a", greedy, grammar_after=think_end).wait()
    assert consumer.token_ids[1:5] == [thought[0]] * 3 + [think_end]
    assert EOS not in consumer.token_ids
    assert tokenizer().decode(consumer.token_ids[5:]) == "yes"


def test_a_row_that_gave_up_its_memory_goes_on(compiler: GrammarCompiler) -> None:
    """The state of the grammar is kept while the tokens are computed again."""
    compiled = compiler.compile(of(GrammarKind.REGEX, "[a-z]{400}"))
    sampling = SamplingParams(max_tokens=300)
    executor = AnyModel(bounds())
    executor.capacity = 200
    with Engine(executor, eos_token_ids=[EOS]) as engine:
        consumers = [
            submit(engine, compiled, f"r{seed}", replace(sampling, seed=seed)) for seed in range(4)
        ]
        texts = [text(consumer.wait()) for consumer in consumers]
        assert engine.stats().num_requeued > 0
    assert all(re.fullmatch("[a-z]{400}", answer) for answer in texts)
