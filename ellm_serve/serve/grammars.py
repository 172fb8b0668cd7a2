"""Grammars: compiles what requests demand of their answers, without holding up the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ellm_serve.closing import Closing
from ellm_serve.errors import InvalidRequest
from ellm_serve.grammar.compiler import GrammarCompiler
from ellm_serve.grammar.constraint import CompiledGrammar
from ellm_serve.grammar.source import json_rule
from ellm_serve.grammar.tools import tools_grammar
from ellm_serve.request import Grammar, GrammarKind
from ellm_serve.text.tokenizer import Tokenizer
from ellm_serve.text.tool_calls import DialectName

# One compiles, the others find theirs compiled already or wait; threads of their own, so that
# nobody's prompt waits with them.
_NUM_THREADS = 4


class Grammars(Closing):
    """The grammars of one model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._compiler = GrammarCompiler.for_model(tokenizer, vocab_size)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")

    def start(self) -> None:
        """Does ahead of the first request what can be done then: about a second of work."""
        self._compiler.start()

    def close(self) -> None:
        """Ends what was started; may be called more than once."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._compiler.close()

    async def compile(self, write: Callable[[], Grammar]) -> CompiledGrammar:
        """The grammar that `write` writes down; both take place in a thread.

        Raises:
            InvalidRequest: it is wrong, too large or too complex.
            Overloaded: too many others are waiting for theirs.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: self._compiler.compile(write()))


def calls_or_json(
    tools: Sequence[Mapping[str, object]],
    dialect: DialectName,
    tokenizer: Tokenizer,
    answer: Grammar,
    *,
    parallel: bool,
) -> Grammar:
    """Calls of the tools, or else JSON: what a client expects that sends both.

    Raises:
        InvalidRequest: a tool or the schema cannot be used.
    """
    calls = tools_grammar(tools, dialect, tokenizer, parallel=parallel)
    schema = {"type": "object"}
    try:
        if answer.kind is GrammarKind.JSON_SCHEMA:
            schema = json.loads(answer.text)
        rule = json_rule(schema, answer.whitespace, lenient=answer.lenient)
    except RecursionError:
        raise InvalidRequest("The JSON schema is nested too deeply.", answer.field) from None
    text = calls.text.replace("start: ", "start: calls | answer\ncalls: ", 1)
    return Grammar(GrammarKind.LARK, f"{text}\nanswer: {rule}", field=answer.field)
