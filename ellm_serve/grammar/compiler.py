"""GrammarCompiler: from a client's grammar to one the engine can follow, or to a clear refusal."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLTokenizer

from ellm_serve.closing import Closing
from ellm_serve.errors import InvalidRequest, Overloaded
from ellm_serve.grammar.constraint import CompiledGrammar
from ellm_serve.grammar.matching import Vocabulary, new_matcher, new_tokenizer
from ellm_serve.grammar.sandbox import Sandbox
from ellm_serve.grammar.source import GrammarError
from ellm_serve.request import Grammar, GrammarKind
from ellm_serve.text.tokenizer import Tokenizer

_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds on what clients may ask for.

    A grammar may have so many characters and take so much CPU time and address space to compile.
    Kept are so many, and together no more than took `max_cached_s` to compile: memory goes with
    time. `max_wait_s`: how long a request waits for its turn.
    """

    max_chars: int = 1 << 20
    max_regex_chars: int = 1 << 16
    cpu_s: float = 2.0
    more_bytes: int = 1 << 28
    max_cached: int = 128
    max_cached_s: float = 8.0
    max_wait_s: float = 30.0


@dataclass(slots=True)
class _Entry:
    """A compiled grammar, or why there is none."""

    grammar: CompiledGrammar | None
    error: str
    seconds: float


class GrammarCompiler(Closing):
    """Compiles grammars for one vocabulary; any thread may ask, one at a time is served.

    Each new grammar is tried out in a process of its own first (`grammar.probe`). Nothing is
    started before the first one comes, unless `start` is called.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        control_ids: frozenset[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        """tokens: the bytes of each id of the model's vocabulary, empty if it has no token.

        control_ids: tokens that stand for no text (`<|im_end|>`, `<tool_call>`).
        """
        self._vocabulary = Vocabulary(tuple(tokens), control_ids)
        self._limits = limits or GrammarLimits()
        self._sandbox = Sandbox(self._vocabulary, self._limits.cpu_s, self._limits.more_bytes)
        self._tokenizer: LLTokenizer | None = None
        self._working = threading.Lock()
        # Guarded by the second lock, so that nobody who only looks has to wait for work.
        self._looking = threading.Lock()
        self._cache: OrderedDict[Grammar, _Entry] = OrderedDict()

    @classmethod
    def for_model(
        cls, tokenizer: Tokenizer, vocab_size: int, limits: GrammarLimits | None = None
    ) -> GrammarCompiler:
        """For a model's tokenizer; `vocab_size` is the number of its logits."""
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        return cls(tokens, tokenizer.control_ids, limits)

    def start(self) -> None:
        """Does ahead of the first request what need not wait for it: about a second of work."""
        with self._working:
            self._prepared()
            self._sandbox.start()

    def close(self) -> None:
        """Ends the process. The compiler must not be used afterwards."""
        with self._working:
            self._sandbox.close()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar for `Engine.submit`. Takes milliseconds to seconds: not for an event loop.

        Raises:
            InvalidRequest: it is wrong, too large or too complex.
            Overloaded: too many others are waiting to be compiled.
        """
        self._check_size(grammar)
        entry = self._cached(grammar)
        if entry is None:
            if not self._working.acquire(timeout=self._limits.max_wait_s):
                raise Overloaded("Too many grammars are waiting to be compiled.", _RETRY_S)
            try:
                entry = self._cached(grammar) or self._compile(grammar)
            finally:
                self._working.release()
        if entry.grammar is None:
            raise InvalidRequest(f"Grammar error: {entry.error}", grammar.field)
        return entry.grammar

    def _check_size(self, grammar: Grammar) -> None:
        is_regex = grammar.kind is GrammarKind.REGEX
        limit = self._limits.max_regex_chars if is_regex else self._limits.max_chars
        size = len(grammar.text) + len(grammar.whitespace or "")
        if size > limit:
            raise InvalidRequest(
                f"Grammar error: it has {size} characters; at most {limit} are allowed.",
                grammar.field,
            )

    def _compile(self, grammar: Grammar) -> _Entry:
        try:
            seconds = self._sandbox.check(grammar)
            matcher = new_matcher(self._prepared(), grammar)
        except GrammarError as error:
            entry = _Entry(None, str(error), 0.0)
        else:
            entry = _Entry(CompiledGrammar(matcher, self._vocabulary.end_token), "", seconds)
        with self._looking:
            self._cache[grammar] = entry
            self._evict()
        return entry

    def _prepared(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = new_tokenizer(self._vocabulary)
        return self._tokenizer

    def _cached(self, grammar: Grammar) -> _Entry | None:
        with self._looking:
            entry = self._cache.get(grammar)
            if entry is None or (entry.grammar is not None and entry.grammar.failed):
                return None
            self._cache.move_to_end(grammar)
            return entry

    def _evict(self) -> None:
        """Drops what was used least recently, but never the newest."""
        seconds = sum(entry.seconds for entry in self._cache.values())
        while len(self._cache) > 1 and (
            len(self._cache) > self._limits.max_cached or seconds > self._limits.max_cached_s
        ):
            _, entry = self._cache.popitem(last=False)
            seconds -= entry.seconds
