"""Parts of a test as other users of this host.

By forks, and not by other interpreters: those users may not be able to reach the interpreter's files, nor ours. So
everything that such a part needs is imported and read before.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import gpuboss.beats
import gpuboss.devices.amd
import gpuboss.devices.apple
import gpuboss.devices.cpu
import gpuboss.devices.nvml
import gpuboss.devices.sim
import gpuboss.keeper
import gpuboss.node_watch
import gpuboss.probing
import gpuboss.store  # noqa: F401
from gpuboss import errors, keeper_start
from gpuboss.scripts import Script, source
from gpuboss.server import find_server

__all__ = ["Somebody", "why_not"]

for _script in Script:
    source(_script)

Say = Callable[[object], None]
"""Tells the test something that JSON can hold."""


def why_not() -> str:
    """Why there cannot be several users here; empty where there can."""
    if os.geteuid() != 0:
        return "only root can be two users"
    server = find_server().resolve()
    if not all(folder.stat().st_mode & 0o001 for folder in server.parents):
        return f"other users cannot reach {server}"
    return ""


class Somebody:
    """One process of a user, doing one thing; `ask` hears what it says, line by line."""

    def __init__(
        self,
        uid: int,
        what: Callable[[Say], Coroutine[Any, Any, None]],
        *,
        groups: tuple[int, ...] = (),
        umask: int = 0o022,
    ) -> None:
        reader, writer = os.pipe()
        goes_on, go_on = os.pipe()
        with warnings.catch_warnings():
            # Newer Pythons warn of forks beside threads; this child takes no lock that a thread could hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:  # nothing of the test run may happen in here, whatever goes wrong
            try:
                os.close(reader)
                os.close(go_on)
                _become(uid, groups, umask)
                _do(what, writer, goes_on)
            except BaseException:
                os.write(writer, json.dumps({"failed": traceback.format_exc()}).encode() + b"\n")
            finally:
                os._exit(0)
        os.close(writer)
        os.close(goes_on)
        self._reader, self._go_on = reader, go_on
        self._pending = b""
        self._lives = True

    def says(self, *, within_s: float = 30.0) -> Any:
        """The next thing it says; AssertionError with what went wrong in there."""
        deadline_s = time.monotonic() + within_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._reader], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"nothing was said within {within_s:g} s"
            data = os.read(self._reader, 1 << 16)
            assert data, "it ended without a word"
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        found = json.loads(line)
        assert not (isinstance(found, dict) and "failed" in found), found["failed"]
        return found

    def proceed(self) -> None:
        """Let it go on behind its `await go()`."""
        os.write(self._go_on, b"x")

    def kill(self) -> None:
        """kill -9; harmless when it has ended."""
        if self._lives:
            self._lives = False
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._reader)
            os.close(self._go_on)


go: Callable[[], Coroutine[Any, Any, None]]
"""In a part: wait until the test says `proceed`."""


def _become(uid: int, groups: tuple[int, ...], umask: int) -> None:
    os.setsid()
    os.setgroups(groups)
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.umask(umask)
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "GPUBOSS_STATE_DIR", "GPUBOSS_DEVICES", "GPUBOSS_URL"):
        os.environ.pop(name, None)
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
    # The interpreter may be out of this user's reach; whoever needs a keeper finds one of this test's.
    keeper_start.KeeperStarter.start = lambda self: None  # type: ignore[method-assign]


def _do(what: Callable[[Say], Coroutine[Any, Any, None]], writer: int, goes_on: int) -> None:
    global go

    async def wait() -> None:
        await asyncio.to_thread(os.read, goes_on, 1)

    go = wait

    def say(something: object) -> None:
        os.write(writer, json.dumps(something).encode() + b"\n")

    async def run() -> None:
        try:
            await what(say)
        except errors.GpubossError as error:
            say([type(error).__name__, error.message])

    asyncio.run(run())
