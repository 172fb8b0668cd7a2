"""ChatForm: how the answers to one chat request are to be read, and what form they must have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ellm_serve.config import ServeConfig
from ellm_serve.errors import InvalidRequest
from ellm_serve.grammar.tools import tools_grammar
from ellm_serve.protocol.chat import ChatCompletionRequest
from ellm_serve.request import Grammar
from ellm_serve.serve.backend import TextRules, text_rules
from ellm_serve.serve.chat_output import ChatOutput, OutputRules
from ellm_serve.serve.grammars import calls_or_json
from ellm_serve.serve.naming import tool_call_id
from ellm_serve.serve.parsers import Parsers
from ellm_serve.text.output_parser import OutputParser
from ellm_serve.text.tokenizer import Tokenizer
from ellm_serve.text.tool_calls import create_dialect


def check_tool_choice(
    request: ChatCompletionRequest, parsers: Parsers, config: ServeConfig
) -> None:
    """Refuses a choice of tools that this server cannot serve.

    Raises:
        InvalidRequest: calls could not be read, or a model may not choose by itself.
    """
    choice = request.chosen_tools
    if choice == "none":
        return
    if choice != "auto" and parsers.dialect is None:
        shown = "named" if request.named_tool is not None else choice
        raise InvalidRequest(f'tool_choice="{shown}" requires --tool-call-parser to be set')
    if choice == "auto" and (parsers.dialect is None or not config.enable_auto_tool_choice):
        raise InvalidRequest(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        )
    if choice != "auto" and request.structured_outputs is not None:
        raise InvalidRequest(
            "You can only either use constraints for structured outputs or tools, not both."
        )


class ChatForm:
    """What is told apart in the answers to a request, and what of it is shown.

    starts_in_reasoning: see `text.reasoning`; what the end of the prompt says.
    """

    def __init__(
        self, request: ChatCompletionRequest, parsers: Parsers, starts_in_reasoning: bool | None
    ) -> None:
        choice = request.chosen_tools
        self._request = request
        self._parsers = parsers
        self._tools = request.tool_dicts() or []
        # What has a form of its own is not searched for calls that may not be made.
        is_read = bool(self._tools) and not (choice == "none" and request.has_form)
        self._dialect = parsers.dialect if is_read else None
        self._demands_call = choice not in ("none", "auto")
        self._thinks = parsers.reasoning and starts_in_reasoning is not False
        # A form holds from behind the thought on, so all before is a thought, marked as one or not.
        has_form = self._demands_call or request.has_form
        self._starts = True if has_form and self._thinks else starts_in_reasoning
        self.hides_reasoning = self._thinks and not request.include_reasoning

    def text_rules(self) -> TextRules:
        """The rules for `Backend.start`."""
        plain = text_rules(self._request)
        tags_are_special = self._parsers.reasoning and self._parsers.think_is_special
        return TextRules(
            () if self._parses else plain.stop,
            plain.skip_special and self._dialect is None and not tags_are_special,
            self._output,
        )

    def grammar(self, tokenizer: Tokenizer) -> Callable[[], Grammar] | None:
        """What writes down the grammar of the answers, if there is one.

        A tool that must be called comes before a form for text that then is not written. Where the
        model may choose, it chooses between calls and the form of `response_format`.
        """
        request, dialect = self._request, self._dialect
        if dialect is not None and self._demands_call:
            tools = [tool for tool in self._tools if request.named_tool in (None, _name_of(tool))]
            return lambda: tools_grammar(tools, dialect, tokenizer, parallel=not self._single_call)
        if not request.has_form:
            return None
        if dialect is None or request.structured_outputs is not None:
            return request.grammar
        return lambda: calls_or_json(
            self._tools, dialect, tokenizer, request.grammar(), parallel=not self._single_call
        )

    def grammar_after(self) -> int | None:
        """The token from behind which on the grammar holds: the end of a thought.

        Raises:
            InvalidRequest: the model thinks, but has no such token.
        """
        if not self._thinks:
            return None
        end = self._parsers.think_ids[1]
        if end is None:
            raise InvalidRequest("The form of an answer can be set only with thinking turned off.")
        return end

    @property
    def _single_call(self) -> bool:
        return self._request.parallel_tool_calls is False or self._request.named_tool is not None

    @property
    def _parses(self) -> bool:
        return self._dialect is not None or self._parsers.reasoning

    def _output(self) -> ChatOutput:
        if not self._parses:
            return ChatOutput(None, OutputRules())
        request = self._request
        parser = OutputParser(
            create_dialect(self._dialect, self._tools, tool_call_id),
            reasoning=self._parsers.reasoning,
            starts_in_reasoning=self._starts,
        )
        rules = OutputRules(
            stop=request.stop_strings,
            include_stop=request.include_stop_str_in_output,
            min_tokens=request.min_tokens,
            hide_calls=request.chosen_tools == "none",
            only_calls=self._demands_call,
            single_call=self._single_call,
            hide_reasoning=self.hides_reasoning,
            think_ids=self._parsers.think_ids,
        )
        return ChatOutput(parser, rules)


def _name_of(tool: Mapping[str, Any]) -> object:
    return tool["function"]["name"]
