"""Lines of one process on the terminal of another, and no harm when nobody reads."""

from __future__ import annotations

import io
import logging
from pathlib import Path

from ellm_serve.serve.log_pipe import PipeHandler, PipeReader


def logger(path: Path) -> logging.Logger:
    """One that no other test knows."""
    made = logging.Logger("test")
    made.addHandler(PipeHandler(path))
    return made


def test_lines_arrive_in_order() -> None:
    """From two writers, of whom one comes later; text of several lines stays readable."""
    stream = io.StringIO()
    with PipeReader(stream) as reader:
        logger(reader.path).info("one")
        logger(reader.path).warning("two\n\n  lines ä")
        path = reader.path
    assert stream.getvalue() == "one\ntwo\n  lines ä\n"
    assert not path.parent.exists()


def test_long_lines_are_cut() -> None:
    """What is written in one piece is never torn."""
    stream = io.StringIO()
    with PipeReader(stream) as reader:
        logger(reader.path).info("x" * 100_000)
    assert stream.getvalue() == "x" * 4095 + "\n"


def test_a_reader_that_is_gone() -> None:
    """The service goes on without a terminal."""
    with PipeReader(io.StringIO()) as reader:
        lines = logger(reader.path)
    for _ in range(1000):
        lines.info("x" * 1000)


def test_closing_twice() -> None:
    """Fine."""
    reader = PipeReader(io.StringIO())
    reader.close()
    reader.close()
