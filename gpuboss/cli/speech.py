"""The standard streams of a command, whatever its caller made of them: closed, full, hung up, or in ASCII.

Called by the package's `main` first and last, and by every command that has something to say to people. Light, for
`run` forks its command before anything heavy is loaded.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

__all__ = ["complain", "drop_unwritten", "escaped", "explain", "prepare", "printable"]

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def prepare() -> None:
    """See that there are three streams, so that no file of ours gets their numbers, and that they take every character.

    What was closed reads and writes nothing, here and in a command that is executed.
    """
    for handle, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(handle)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(handle, mode, 1, "utf-8", "replace", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # as standard error does of itself


def complain(text: str) -> None:
    """A line on standard error. Where that cannot be written, the exit code has to do."""
    with contextlib.suppress(OSError):
        print(f"gpuboss: {text}", file=sys.stderr)


def explain(error: OSError) -> str:
    """An error of the system that nobody foresaw, in one line."""
    if error.errno == errno.EMFILE:
        return f"too many open files: this process may have {os.sysconf('SC_OPEN_MAX')}; raise that with ulimit -n"
    if error.errno in _OF_OUTPUT and error.filename is None:
        return f"the output cannot be written: {error.strerror}"
    return str(error)


def drop_unwritten() -> None:
    """Drop what cannot be written: the interpreter would try again at its end, and change the exit code."""
    for handle, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), handle)


def printable(text: str) -> str:
    """A name that a stranger chose, fit for a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def escaped(text: str) -> str:
    """The same where every character counts: `\\x1b`, `\\n`."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
