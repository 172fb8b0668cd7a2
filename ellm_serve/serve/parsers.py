"""Parsers: how the answers of a model are to be read, by configuration or by its template."""

from __future__ import annotations

from dataclasses import dataclass

from ellm_serve.config import ServeConfig
from ellm_serve.text.reasoning import THINK, THINK_END
from ellm_serve.text.tokenizer import Tokenizer
from ellm_serve.text.tool_calls import DialectName, choose_dialect

# Templates that open thoughts, or can switch them off, speak of one of these.
_THINKING = (THINK, "enable_thinking")


@dataclass(frozen=True, slots=True)
class Parsers:
    """What is told apart in the answers of one model.

    dialect: how it writes tool calls, None if it does not. reasoning: whether it thinks aloud.
    think_ids: the tokens that open and close a thought, where each is one token.
    think_is_special: they are special tokens, which are left out of the text unless asked for.
    """

    dialect: DialectName | None = None
    reasoning: bool = False
    think_ids: tuple[int | None, int | None] = (None, None)
    think_is_special: bool = False

    @classmethod
    def of(cls, config: ServeConfig, template_source: str, tokenizer: Tokenizer) -> Parsers:
        """Those of the configuration; "auto" goes by the chat template."""
        think_ids = tokenizer.token_to_id(THINK), tokenizer.token_to_id(THINK_END)
        return cls(
            _dialect(config, template_source),
            _reasoning(config, template_source),
            think_ids,
            any(token is not None and tokenizer.is_special(token) for token in think_ids),
        )


def _dialect(config: ServeConfig, template_source: str) -> DialectName | None:
    match config.tool_call_parser:
        case "auto":
            return choose_dialect(template_source)
        case "none":
            return None
        case name:
            return name


def _reasoning(config: ServeConfig, template_source: str) -> bool:
    if config.reasoning_parser != "auto":
        return config.reasoning_parser == "qwen3"
    return any(word in template_source for word in _THINKING)
