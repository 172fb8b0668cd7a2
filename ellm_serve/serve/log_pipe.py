"""Log lines of a replica on the terminal of the command that started it.

Ray would prefix each line with a process name and mix in its own. A named pipe in a private
directory carries only ours: lines shorter than a page are never torn, and a reader that is gone or
slow costs lines, not time.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from pathlib import Path
from typing import TextIO

from ellm_serve.closing import Closing

_MAX_LINE_BYTES = 4096  # PIPE_BUF: longer writes may mix with those of another process


class PipeReader(Closing):
    """Copies lines from the pipe at `path` to a stream, in a thread."""

    def __init__(self, stream: TextIO) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ellm-serve-")
        self.path = Path(self._directory.name) / "log"
        os.mkfifo(self.path, 0o600)
        # Also open for writing, so that the end of one replica is not the end of the file.
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self._stream = stream
        self._thread = threading.Thread(target=self._copy, name="ellm-log", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        with open(self._descriptor, encoding="utf-8", errors="replace", closefd=False) as pipe:
            for line in pipe:
                if line == "\n":
                    return
                self._stream.write(line)
                self._stream.flush()

    def close(self) -> None:
        """Waits until everything written so far is copied; twice is fine."""
        if self._thread.is_alive():
            os.write(self._descriptor, b"\n")
            self._thread.join()
            os.close(self._descriptor)
            self._directory.cleanup()


class PipeHandler(logging.Handler):
    """Writes records to a `PipeReader`'s pipe."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if nobody reads."""
        super().__init__()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def emit(self, record: logging.LogRecord) -> None:
        """Line by line; an empty one would end the reader."""
        for line in filter(None, self.format(record).splitlines()):
            data = line.encode("utf-8", "replace")[: _MAX_LINE_BYTES - 1]
            try:
                os.write(self._descriptor, data + b"\n")
            except OSError:
                # The reader is gone or slow: the line is lost, what it is about goes on.
                return
