"""What the whole and the streamed form of a chat answer have in common."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ellm_serve.protocol.common import PromptLogprobs
from ellm_serve.request import TokenLogprobs
from ellm_serve.serve.backend import Backend
from ellm_serve.serve.chat_events import ChatRun
from ellm_serve.serve.conversation import text_of
from ellm_serve.serve.logprobs import TokenNames, chat_logprobs, prompt_logprobs


class ChatView:
    """One run as its request wants to see it.

    Attributes:
        role: of the answers. echo: the end of the conversation, if it is to be shown before them.
        wants_ids: token ids are shown.
        aliases_reasoning: thoughts are given under their older name as well.
    """

    def __init__(self, backend: Backend, run: ChatRun) -> None:
        request, conversation = run.request, run.conversation
        self.backend = backend
        self.run = run
        self.created = int(time.time())
        self.usage = run.usage_report
        final = conversation.messages[-1]
        opens = conversation.add_generation_prompt
        self.role = backend.config.response_role if opens else str(final["role"])
        self.echo = text_of(final) if request.echo and final["role"] == self.role else ""
        self.prompt_ids = list(run.prompt.token_ids) if request.return_token_ids else None
        self.prompt_text = run.prompt.text if request.return_prompt_text else None
        self.wants_ids = bool(request.return_token_ids) and not run.hides_tokens
        self.aliases_reasoning = backend.config.reasoning_content_alias
        self._num_top = request.top_logprobs or 0
        self._wants_logprobs = bool(request.logprobs) and not run.hides_tokens
        self._names = TokenNames(backend.tokenizer, bool(request.return_tokens_as_token_ids))

    def logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, object] | None:
        """Those of some tokens of the answer, if they are wanted."""
        if not self._wants_logprobs:
            return None
        return chat_logprobs(self._names, entries, self._num_top)

    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Those of the prompt, if they are wanted."""
        answer = self.run.answers[0]
        if answer.request.sampling.prompt_logprobs is None:
            return None
        return prompt_logprobs(self._names, answer.prompt_logprobs)
