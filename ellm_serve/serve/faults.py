"""Logs mistakes of ours without what they were made on."""

from __future__ import annotations

import logging
import traceback


def log_fault(logger: logging.Logger, what: str, error: BaseException) -> None:
    """Kind and place of an unexpected error.

    Not its message: that may quote a prompt, and so may those of the errors behind it.
    """
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s: %s\n%s", what, type(error).__name__, frames.rstrip())
