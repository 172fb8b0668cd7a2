"""Tries grammars out in a process of its own, which a bad one may kill.

A grammar of a client can recurse until the stack overflows, or compile for minutes, so each one is
compiled here first. Its CPU time, address space and stack are less than the server's own, so what
passes here is safe there. Speaks frames on its standard input and output: 8 bytes of length, JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from llguidance import LLTokenizer

from ellm_serve.grammar.matching import Vocabulary, new_matcher, new_tokenizer, try_out
from ellm_serve.grammar.source import GrammarError
from ellm_serve.request import Grammar, GrammarKind

_LENGTH_BYTES = 8
_STACK_BYTES = 1 << 20
# Steps of the engine that run at the same time come first.
_NICENESS = 5


def read_frame(read: Callable[[int], bytes]) -> Any:
    """The next message. `read` gives as many bytes as it is asked for."""
    length = int.from_bytes(read(_LENGTH_BYTES), "little")
    return json.loads(read(length))


def frame(message: object) -> bytes:
    """A message as it is sent."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def vocabulary_message(vocabulary: Vocabulary) -> object:
    """A vocabulary for JSON: one character for each byte."""
    tokens = [token.decode("latin-1") for token in vocabulary.tokens]
    return [tokens, sorted(vocabulary.control_ids)]


def grammar_message(grammar: Grammar) -> object:
    """A grammar for JSON."""
    return [grammar.kind.value, grammar.text, grammar.whitespace, grammar.lenient]


def _read(size: int) -> bytes:
    data = sys.stdin.buffer.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _verdict(tokenizer: LLTokenizer, end_token: int, grammar: Grammar) -> str | None:
    """What is wrong with a grammar; None if it is fine."""
    try:
        try_out(new_matcher(tokenizer, grammar), end_token)
    except GrammarError as error:
        return str(error)
    return None


def _serve() -> None:
    os.nice(_NICENESS)
    cpu_s, more_bytes, (tokens, control_ids) = read_frame(_read)
    vocabulary = Vocabulary(tuple(t.encode("latin-1") for t in tokens), frozenset(control_ids))
    tokenizer = new_tokenizer(vocabulary)
    limit = _address_space() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer: list[object] = [None, 0.0]
    while True:
        sys.stdout.buffer.write(frame(answer))
        sys.stdout.buffer.flush()
        kind, text, whitespace, lenient = read_frame(_read)
        start = time.process_time()
        # Ends this process if it is still busy by then.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        grammar = Grammar(GrammarKind(kind), text, whitespace, lenient)
        error = _verdict(tokenizer, vocabulary.end_token, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = [error, time.process_time() - start]


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _main() -> None:
    with suppress(EOFError):
        _serve()


if __name__ == "__main__":
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_main)
    thread.start()
    thread.join()
