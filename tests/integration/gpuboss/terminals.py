"""A terminal of the test's own, with a program on it as its session's leader."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Screen:
    """What somebody at the terminal sees and types."""

    def __init__(self, words: list[str], environment: dict[str, str], cwd: Path) -> None:
        self._master, slave = os.openpty()
        self.seen = ""
        """Everything that was shown."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment | {"TERM": "xterm", "COLUMNS": "200", "PS1": "$ "},
            cwd=cwd,
            start_new_session=True,
        )
        os.close(slave)

    def type(self, text: str) -> None:
        """Type something; `\\x03` is Ctrl-C, `\\x1a` Ctrl-Z."""
        os.write(self._master, text.encode())

    def wait_for(self, text: str, *, nudge: str = "", timeout_s: float = 20.0) -> str:
        """Return when the text is shown; what was shown up to its end. What comes later must be shown later.

        `nudge` is typed whenever nothing is shown for a while: a shell tells of its jobs at the next prompt.
        """
        deadline_s = time.monotonic() + timeout_s
        while text not in self.seen:
            if nudge and not select.select([self._master], [], [], 0.2)[0]:
                self.type(nudge)
            self._read(deadline_s, text)
        place = self.seen.index(text) + len(text)
        shown, self.seen = self.seen[:place], self.seen[place:]
        return shown

    def ended(self, *, timeout_s: float = 20.0) -> int:
        """Read to the end of the program; its return code as `subprocess` has it."""
        deadline_s = time.monotonic() + timeout_s
        with contextlib.suppress(EOFError):
            while True:
                self._read(deadline_s, "the end")
        return self.process.wait(max(0.1, deadline_s - time.monotonic()))

    def close(self) -> None:
        """Hang up."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self, deadline_s: float, what: str) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([self._master], [], [], left_s)[0]:
            raise AssertionError(f"waited in vain for {what!r}; the terminal shows {self.seen!r}")
        try:
            read = os.read(self._master, 1 << 16)
        except OSError as error:  # everybody has left the terminal
            raise EOFError(f"the program ended before {what!r}; the terminal shows {self.seen!r}") from error
        if not read:
            raise EOFError(f"the program ended before {what!r}; the terminal shows {self.seen!r}")
        self.seen += read.decode(errors="replace")


@contextlib.contextmanager
def screen(words: list[str], environment: dict[str, str], cwd: Path) -> Iterator[Screen]:
    """A program on a terminal."""
    shown = Screen(words, environment, cwd)
    try:
        yield shown
    finally:
        shown.close()
