"""The controlling terminal, and whose turn it is to use it.

Called by `gpuboss.cli.supervise`. A terminal has one foreground process group: that group reads from it and is
interrupted by Ctrl-C, the others are stopped when they try to read. `gpuboss run` starts its command in a group of its
own, so it must hand the foreground over, take it back when the command has ended or is suspended, and never touch it
when it is a background job itself.
"""

from __future__ import annotations

import contextlib
import os
import signal

__all__ = ["Terminal"]


class Terminal:
    """This process's controlling terminal; `open` finds it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._given: int | None = None
        """The group that we put into the foreground and that has it as far as we know."""
        # Who changes the foreground from the background is stopped, unless it does not care for this signal.
        self._before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)

    @classmethod
    def open(cls) -> Terminal | None:
        """The controlling terminal; None when there is none."""
        try:
            return cls(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
        except OSError:
            return None

    @property
    def is_ours(self) -> bool:
        """Whether our own process group is in the foreground."""
        return self._foreground() == os.getpgrp()

    @property
    def is_given(self) -> bool:
        """Whether the command's group has the foreground from us."""
        return self._given is not None

    def give(self, group: int) -> bool:
        """Put a process group into the foreground in our place; False where it is not ours to give."""
        if not self.is_ours:
            return False
        try:
            os.tcsetpgrp(self._handle, group)
        except OSError:  # the group has ended, or the terminal is gone
            return False
        self._given = group
        return True

    def take(self) -> None:
        """Take back what was given, unless somebody else has it now: a shell that made a background job of us."""
        given, self._given = self._given, None
        holder = self._foreground()
        if given is None or holder is None or (holder != given and _lives(holder)):
            return
        with contextlib.suppress(OSError):  # hung up meanwhile
            os.tcsetpgrp(self._handle, os.getpgrp())

    def close(self) -> None:
        """Take back what was given, and leave the terminal alone."""
        self.take()
        os.close(self._handle)
        signal.signal(signal.SIGTTOU, self._before)

    def _foreground(self) -> int | None:
        try:
            return os.tcgetpgrp(self._handle)
        except OSError:  # hung up
            return None


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
