"""A service whose model says what a test wants: the real engine over a scripted executor.

Tokenizer and chat template are those of `golden/tokenizer`: 2,013 tokens, byte-level, ChatML.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ellm_serve.config import ServeConfig
from ellm_serve.engine.engine import Engine
from ellm_serve.engine.executor import Span
from ellm_serve.metrics import Metrics
from ellm_serve.protocol.validation import CHAT, COMPLETION
from ellm_serve.serve.context import RequestContext
from ellm_serve.serve.service import Service
from ellm_serve.text.tokenizer import Tokenizer
from tests.engine.doubles import Prefix, ScriptedExecutor, limits

MODEL_DIR = Path(__file__).parent / "golden/tokenizer"
NAMES = ("qwen3-coder", "alias2")
SEQUENCE_LENGTH = 2048
VOCAB_SIZE = 2048
IM_END, END_OF_TEXT = 2000, 2001
# What is said once a script has come to its end.
FILLER = 39

_Result = TypeVar("_Result")
tokenizer = Tokenizer.from_dir(MODEL_DIR)


class Script:
    """What the model says: one text of ids for whatever prompt comes, from its first token on.

    Attributes:
        gate: while it is closed, the executor does not start a step.
        fail: raised by the next step.
        pause_s: how long a decode step takes.
        answers: by the first token of a prompt, what is said to that prompt instead.
    """

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.fail: Exception | None = None
        self.pause_s = 0.0
        self.answers: dict[int, list[int]] = {}
        self.say(token_ids)

    def say(self, token_ids: Sequence[int]) -> None:
        """For the requests to come, until it is called again."""
        self._token_ids = tuple(token_ids)
        self._prompts: dict[int, int] = {}

    def before(self, kind: str, spans: Sequence[Span]) -> None:
        """Takes note of where prompts end; the executor calls it before each step."""
        assert self.gate.wait(60), "nobody opened the gate"
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        if kind == "decode" and self.pause_s:
            time.sleep(self.pause_s)
        if kind == "prefill":
            for span in spans:
                self._prompts[span.slot] = span.stop

    def next(self, prefix: Prefix) -> int:
        """The token behind a prefix."""
        token_ids = self.answers.get(prefix[0], self._token_ids)
        starts = [stop for stop in self._prompts.values() if stop <= len(prefix)]
        position = len(prefix) - max(starts, default=len(prefix))
        return token_ids[position] if position < len(token_ids) else FILLER


@dataclass
class Harness:
    """A service and what a test can do about it."""

    service: Service
    engine: Engine
    executor: ScriptedExecutor
    script: Script
    metrics: Metrics
    config: ServeConfig
    contexts: list[RequestContext] = field(default_factory=list)

    def say(self, text: str, *ends: int) -> list[int]:
        """Has the model say a text and then these ids; returns all the ids."""
        token_ids = [*tokenizer.encode(text), *ends]
        self.script.say(token_ids)
        return token_ids

    def context(self, **fields: Any) -> RequestContext:
        """A new request's."""
        self.contexts.append(RequestContext(**fields))
        return self.contexts[-1]

    def complete(
        self, context: RequestContext | None = None, **body: Any
    ) -> Coroutine[Any, Any, Any]:
        """/v1/completions; refusals of the body's form are raised at once."""
        request = COMPLETION.validate_python({"prompt": "Hi", "temperature": 0.0} | body)
        return self.service.complete(request, context or self.context())

    def chat(self, context: RequestContext | None = None, **body: Any) -> Coroutine[Any, Any, Any]:
        """/v1/chat/completions."""
        messages = [{"role": "user", "content": "hi"}]
        request = CHAT.validate_python({"messages": messages, "temperature": 0.0} | body)
        return self.service.chat(request, context or self.context())


def serve_config(**changes: Any) -> ServeConfig:
    """What the recorded server was set up like."""
    values = {
        "model": "qwen3-coder",
        "served_model_name": NAMES,
        "sequence_length": SEQUENCE_LENGTH,
        "batch_size": 4,
        "workers": "threads",
        "access_log": "off",
    }
    return ServeConfig.from_values(values | changes)


@contextmanager
def harness(
    *, num_slots: int = 4, model_dir: Path = MODEL_DIR, **changes: Any
) -> Iterator[Harness]:
    """A running service; `changes` to its configuration."""
    config = serve_config(**changes)
    script = Script()
    bounds = limits(
        num_slots=num_slots,
        sequence_length=SEQUENCE_LENGTH,
        max_decode_rows=num_slots,
        prefill_block=SEQUENCE_LENGTH,
        max_logit_rows=32,
        vocab_size=VOCAB_SIZE,
    )
    executor = ScriptedExecutor(bounds, script.next, before=script.before)
    metrics = Metrics(config.names[0], SEQUENCE_LENGTH, process=False)
    with (
        Engine(
            executor,
            eos_token_ids=[IM_END, END_OF_TEXT],
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
        ) as engine,
        Service.create(engine, model_dir, config, metrics) as service,
    ):
        yield Harness(service, engine, executor, script, metrics, config)
        script.gate.set()


def run(work: Coroutine[Any, Any, _Result], timeout_s: float = 60) -> _Result:
    """Runs a coroutine in a loop of its own; fails rather than hang."""
    return asyncio.run(asyncio.wait_for(work, timeout_s))


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something another thread does."""
    while not condition():
        await asyncio.sleep(0.002)
