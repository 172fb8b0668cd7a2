"""The process that tries grammars out, as seen from the server: started, asked, replaced."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from ellm_serve.closing import Closing
from ellm_serve.errors import EngineError
from ellm_serve.grammar.matching import Vocabulary
from ellm_serve.grammar.probe import frame, grammar_message, read_frame, vocabulary_message
from ellm_serve.grammar.source import GrammarError
from ellm_serve.request import Grammar

logger = logging.getLogger(__name__)

_START_S = 120.0
# The process has ended when its output has; how it did is known a moment later.
_END_S = 10.0
# Far more than CPU time on any machine that is not stopped altogether.
_WALL_FACTOR = 60.0
_TOO_COMPLEX = "the grammar is too complex to be compiled: it takes too much time or memory"
# How the process ends when its time is up, and when its stack is full.
_BLAMED = (signal.SIGPROF, signal.SIGSEGV, signal.SIGBUS)
_MODULE = "ellm_serve.grammar.probe"


class Sandbox(Closing):
    """Starts its process when it is needed, and again after a grammar has killed it.

    For one thread at a time.

    Args:
        cpu_s: CPU time for one grammar.
        more_bytes: address space for grammars, all that they leave behind included.
    """

    def __init__(self, vocabulary: Vocabulary, cpu_s: float, more_bytes: int) -> None:
        self._hello = frame([cpu_s, more_bytes, vocabulary_message(vocabulary)])
        self._wall_s = cpu_s * _WALL_FACTOR
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: Grammar) -> float:
        """The CPU seconds that the grammar took.

        Raises:
            GrammarError: it cannot be used.
            EngineError: there is no process to try it in.
        """
        message = frame(grammar_message(grammar))
        answer = self._ask(message)
        if answer is None:
            answer = self._ask(message)
        if answer is None:
            raise GrammarError(_TOO_COMPLEX)
        error, seconds = answer
        if error is not None:
            raise GrammarError(error)
        return seconds

    def start(self) -> None:
        """Starts the process ahead of the first grammar; it needs about a second."""
        self._running()

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:
                pass

    def _ask(self, message: bytes) -> tuple[str | None, float] | None:
        """None: the process is gone, and the grammar need not be the reason."""
        process = self._running()
        try:
            return _ask(process, message, self._wall_s)
        except (TimeoutError, EOFError) as error:
            code = None if isinstance(error, TimeoutError) else process.wait(_END_S)
            self.close()
            if code is None or -code in _BLAMED:
                logger.info("A grammar has ended the process it was tried in.")
                raise GrammarError(_TOO_COMPLEX) from None
            # Killed by somebody, or out of memory, which earlier grammars may have used up.
            return None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            # An interrupt of the terminal is not for this process; it ends with its input.
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )
        try:
            _ask(self._process, self._hello, _START_S)
        except (TimeoutError, EOFError):
            self.close()
            raise EngineError("The process that compiles grammars does not start.") from None
        return self._process


def _ask(
    process: subprocess.Popen[bytes], message: bytes, timeout_s: float
) -> tuple[str | None, float]:
    """Sends a message and waits for the answer.

    Raises:
        EOFError: the process has ended.
        TimeoutError: it does not answer.
    """
    assert process.stdin is not None
    deadline = time.monotonic() + timeout_s
    try:
        # The process reads all of it before it does anything, so this cannot block for long.
        rest = memoryview(message)
        while rest:
            rest = rest[process.stdin.write(rest) :]
        error, seconds = read_frame(_reader(process, deadline))
    except BrokenPipeError:
        raise EOFError from None
    return error, seconds


def _reader(process: subprocess.Popen[bytes], deadline: float) -> Callable[[int], bytes]:
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)

    def read(size: int) -> bytes:
        data = b""
        while len(data) < size:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poller.poll(left_s * 1000):
                raise TimeoutError
            piece = os.read(descriptor, size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    return read
