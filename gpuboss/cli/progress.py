"""How `gpuboss run` speaks while it waits: one line that is written over on a terminal, plain lines elsewhere.

Called by `gpuboss.cli.supervise`. Everything goes to standard error: standard output is the command's.
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

__all__ = ["Progress"]

_PREFIX = "gpuboss: "
_PLAIN_EVERY_S = 30.0
"""Between two plain lines, at least, unless our place in the queue has changed."""
_ERASE = "\r\x1b[K"


class Progress(logging.Handler):
    """Says things; also shows warnings that the library logs, in the same voice."""

    def __init__(
        self,
        *,
        quiet: bool,
        in_foreground: Callable[[], bool],
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`in_foreground`: whether the terminal is ours to draw on at this moment."""
        super().__init__(logging.ERROR if quiet else logging.WARNING)
        self.setFormatter(logging.Formatter("%(message)s"))
        self.told_to_wait = False
        """Whether anybody was shown that we wait."""
        self._stream = sys.stderr if stream is None else stream
        self._quiet = quiet
        self._in_foreground = in_foreground
        self._clock = clock
        self._drawn = False
        """Whether an unfinished line stands on the terminal."""
        self._told = ""
        self._told_s = float("-inf")

    def waiting(self, text: str, *, place: int | None) -> None:
        """Show why we wait, as it is now; `place` is our position in the queue."""
        if self._quiet:
            return
        self.told_to_wait = True
        line = f"waiting: {text}"
        if self._stream.isatty() and self._in_foreground():
            width = shutil.get_terminal_size().columns
            shown = _PREFIX + line
            self._write(_ERASE + (shown if len(shown) < width else shown[: width - 4] + "..."))
            self._drawn = True
            return
        now_s = self._clock()
        mark = f"{place}"
        if mark != self._told or now_s - self._told_s >= _PLAIN_EVERY_S:
            self._told, self._told_s = mark, now_s
            self.say(line)

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self.insist(text)

    def insist(self, text: str) -> None:
        """A line that stays, also where nothing else is said."""
        self.clear()
        self._write(f"{_PREFIX}{text}\n")

    def clear(self) -> None:
        """Take away the unfinished line."""
        if self._drawn:
            self._drawn = False
            self._write(_ERASE)

    def emit(self, record: logging.LogRecord) -> None:
        """A record of the library's log."""
        self.insist(self.format(record))

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # hung up, or nobody reads any more: the command goes on
            return
