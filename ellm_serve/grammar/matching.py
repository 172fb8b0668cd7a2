"""The library's objects: a tokenizer as it needs one, and grammars compiled within limits.

The sequence's end is a token of its own behind the vocabulary: whether the answer may end is then
one more bit of a mask, whatever tokens end this or that request.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ellm_serve.grammar.source import GrammarError, lark_source, plain_error
from ellm_serve.request import Grammar

# Work for one mask. Less for regexes than the library's own numbers, which allow 0.7 s; more for
# rules: an object with 800 optional properties needs it, and takes 5 ms.
_LIMITS = LLParserLimits(
    max_items_in_row=20_000,
    step_lexer_fuel=50_000,
    step_max_items=500_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)
# How far a grammar is tried out, and how long one token may take, in CPU seconds.
_TRIAL_TOKENS = 24
_MAX_TOKEN_S = 0.1

_TOO_COMPLEX = "the grammar is too complex to be followed"
# The library's word for a state from which no token leads on.
_DEAD_END = "NoExtensionBias"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Bytes of each token by id, none where the model has an id without a token.

    `control_ids` never stand for text; a grammar can only name them.
    """

    tokens: tuple[bytes, ...]
    control_ids: frozenset[int]

    @property
    def end_token(self) -> int:
        """The id that stands for the end of the answer."""
        return len(self.tokens)


class _Tokens:
    """A vocabulary as the library reads it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end_token
        self.tokens = [*vocabulary.tokens, b"<end>"]
        self.special_token_ids = [*vocabulary.control_ids, vocabulary.end_token]

    def __call__(self, text: object) -> list[int]:
        """The tokens of a text; never wanted, because nothing is forced."""
        return []


def new_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Takes some 0.4 s for 150,000 tokens."""
    return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)))


def new_matcher(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """The grammar at its start. The library gives the interpreter free while it compiles.

    Raises:
        GrammarError: it cannot be compiled.
    """
    matcher = LLMatcher(tokenizer, lark_source(grammar), log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise GrammarError(plain_error(matcher.get_error(), grammar.kind))
    return matcher


def try_out(matcher: LLMatcher, end_token: int) -> None:
    """Follows the grammar for some tokens.

    Raises:
        GrammarError: it matches nothing, or following it needs too much work.
    """
    matcher = matcher.deep_copy()
    generator = random.Random(0)
    for step in range(_TRIAL_TOKENS):
        start = time.thread_time()
        token = _any_token(matcher.compute_bitmask(), end_token, generator)
        if not matcher.is_error() and token is not None:
            matcher.consume_token(token)
        seconds = time.thread_time() - start
        if matcher.is_error() and is_dead_end(matcher):
            if step == 0:
                raise GrammarError("the grammar matches no text at all")
            return
        if matcher.is_error():
            raise GrammarError(f"{_TOO_COMPLEX} ({failure(matcher)})")
        if seconds > _MAX_TOKEN_S:
            raise GrammarError(f"{_TOO_COMPLEX} (one token takes {seconds:.2f} s)")
        if token is None:
            return


def failure(matcher: LLMatcher) -> str:
    """Why a matcher is in error; what it says in more lines is about its own state."""
    return matcher.get_error().partition("\n")[0].replace("<non-verbose/>", "")


def is_dead_end(matcher: LLMatcher) -> bool:
    """Whether it only has no token left; that harms no other sequence of the same grammar."""
    return failure(matcher) == _DEAD_END


def _any_token(mask: bytes, end_token: int, generator: random.Random) -> int | None:
    """One of the tokens whose bits are set, but not the end."""
    bits = bytearray(mask)
    bits[end_token >> 3] &= ~(1 << (end_token & 7))
    start = generator.randrange(len(bits))
    rotated = bits[start:] + bits[:start]
    skipped = len(rotated) - len(rotated.lstrip(b"\0"))
    if skipped == len(rotated):
        return None
    byte = (start + skipped) % len(bits)
    return byte * 8 + generator.choice([bit for bit in range(8) if bits[byte] >> bit & 1])
