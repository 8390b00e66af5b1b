"""A client's connection to its host's keeper, which is started when there is none and started again when it dies.

Called by `gpuboss.client`; the other end is `gpuboss.door`, which says what goes over the wire. The connection is also
how the keeper learns at once that a client is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpuboss import errors
from gpuboss.devices import Device
from gpuboss.door import PROTOCOL
from gpuboss.host_lock import user_name, whose
from gpuboss.identity import ProcessIdentity
from gpuboss.keeper_start import KeeperStarter
from gpuboss.settings import LedgerSettings, Timings
from gpuboss.state_dir import StateDir
from gpuboss.wire import Wire, device_from_wire, process_to_wire

__all__ = ["KeeperLink", "Welcome"]

_OPEN_S = 20.0
"""How long a keeper may take to come up, its devices and store included."""
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05
_SLOWEST_RETRY_S = 2.0
_DENIED_S = 1.0
"""How long a keeper's socket may be closed to us: for an instant it is, while the keeper makes it."""
_LONGEST_LINE = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the keeper tells whom it lets in."""

    pid: int
    """The keeper's process."""
    store_url: str = field(repr=False)
    """With its password, if it has one."""
    node: str
    """This host's name in the store."""
    devices: tuple[Device, ...]
    timings: Timings


class KeeperLink:
    """One client's connection; `open` it once, and it is held up until `close`."""

    def __init__(self, state: StateDir, settings: LedgerSettings, name: str) -> None:
        self.on_epoch: Callable[[], None] = _nothing
        """Called whenever the store has begun a new life, and when a lost connection is back."""
        self.welcome: Welcome
        """The last one; set by `open`."""
        self._state = state
        self._settings = settings
        self._name = name
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count(1)
        self._sweeps: dict[int, asyncio.Future[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._denied_since_s: float | None = None

    async def open(self) -> None:
        """Connect, with a keeper started if need be.

        Raises the keeper's refusal: LedgerConflict, DeviceError, StoreUnfit, StoreUnavailable. StateDirError: the
        keeper is another user's, and not for us.
        """
        await self._connect()
        self._task = asyncio.create_task(self._hold(), name=f"keeper-link {self._name}")

    async def sweep(self) -> None:
        """Have the keeper look for deaths and changed readings; returns when it has, or when its connection is lost."""
        if self._writer is None:
            return
        number = next(self._numbers)
        swept = self._sweeps[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(json.dumps({"op": "sweep", "n": number}).encode() + b"\n")
            await swept
        finally:
            del self._sweeps[number]

    def fileno(self) -> int:
        """The connection's descriptor; -1 while there is none. A forked child has to let go of its copy."""
        connection = None if self._writer is None else self._writer.get_extra_info("socket")
        return -1 if connection is None else int(connection.fileno())

    async def close(self) -> None:
        """Leave; the keeper stays as long as others need it."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await self._drop()

    async def _hold(self) -> None:
        """Hear the keeper; when it is gone, come back to the next one."""
        pause_s = 0.0
        while True:
            await self._listen()
            await self._drop()
            _log.warning("the keeper of %s (process %d) is gone; starting it again", self._state.root, self.welcome.pid)
            while self._writer is None:
                await asyncio.sleep(pause_s)
                try:
                    await self._connect()
                    pause_s = 0.0
                except errors.GpubossError as error:
                    pause_s = min(max(2 * pause_s, 0.1), _SLOWEST_RETRY_S)
                    _log.error("no keeper for %s, trying again: %s", self._state.root, error)
            self.on_epoch()

    async def _listen(self) -> None:
        """Until the connection is lost."""
        assert self._reader is not None
        with contextlib.suppress(OSError):
            while (message := await _receive(self._reader)) is not None:
                if message["op"] == "epoch":
                    self.on_epoch()
                elif message["op"] == "swept" and message["n"] in self._sweeps:
                    self._sweeps[message["n"]].set_result(None)

    async def _connect(self) -> None:
        starter = KeeperStarter(self._state, self._settings)
        deadline_s = time.monotonic() + _OPEN_S
        pause_s = _FIRST_PAUSE_S
        try:
            while True:
                answer = await self._knock(deadline_s)
                if answer is not None:
                    break
                if time.monotonic() > deadline_s:
                    raise errors.StoreUnavailable(
                        f"the keeper did not come up within {_OPEN_S:g} s: see {starter.log_path}"
                    )
                if self._denied_since_s is None:
                    starter.start()
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        finally:
            starter.close()
        self.welcome = Welcome(
            pid=answer["pid"],
            store_url=answer["store_url"],
            node=answer["node"],
            devices=tuple(map(device_from_wire, answer["devices"])),
            timings=Timings(**answer["timings"]),
        )

    async def _knock(self, deadline_s: float) -> Wire | None:
        """The welcome; None when nobody opens, or the keeper is about to leave. Raises its refusal."""
        try:
            reader, writer = await asyncio.open_unix_connection(
                str(self._state.socket_path("keeper")), limit=_LONGEST_LINE
            )
        except PermissionError as error:
            self._bear_denial(error)
            return None
        except OSError:
            self._denied_since_s = None
            return None
        self._denied_since_s = None
        welcome: Wire | None = None
        try:
            process = process_to_wire(ProcessIdentity.current())
            hello = {"op": "hello", "protocol": PROTOCOL, "name": self._name, "process": process}
            writer.write(json.dumps(hello | {"settings": self._settings.to_wire()}).encode() + b"\n")
            async with asyncio.timeout(max(1.0, deadline_s - time.monotonic())):
                answer = await _receive(reader)
            if answer is not None and answer["op"] == "refused":
                raise _refusal(answer)
            if answer is not None and answer["op"] == "welcome":
                self._reader, self._writer, welcome = reader, writer, answer
        except (OSError, TimeoutError):
            return None
        finally:
            if welcome is None:
                await _close(writer)
        return welcome

    def _bear_denial(self, error: OSError) -> None:
        """StateDirError once the keeper's socket has been closed to us for longer than the keeper takes to make it."""
        self._denied_since_s = self._denied_since_s or time.monotonic()
        path = self._state.socket_path("keeper")
        if time.monotonic() - self._denied_since_s > _DENIED_S and path.exists():
            raise errors.StateDirError(
                f"the keeper's socket {path} is not open to {user_name(os.geteuid())} "
                f"({error.strerror}; {whose(path)}): share a directory (a group's, mode 2770) "
                "or set GPUBOSS_STATE_DIR to one of your own"
            ) from error

    async def _drop(self) -> None:
        self._reader = None
        writer, self._writer = self._writer, None
        for swept in self._sweeps.values():
            if not swept.done():
                swept.set_result(None)
        if writer is not None:
            await _close(writer)


def _nothing() -> None:
    """Before anybody listens."""


async def _receive(reader: asyncio.StreamReader) -> Wire | None:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        return None
    message: dict[str, Any] = json.loads(line)
    return message


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _refusal(answer: Wire) -> errors.GpubossError:
    """The keeper's error as one of ours: those whose message is all they hold."""
    told: type[errors.GpubossError] = {
        kind.__name__: kind
        for kind in (
            errors.LedgerConflict,
            errors.DeviceError,
            errors.StateDirError,
            errors.StoreUnavailable,
            errors.StoreUnfit,
        )
    }.get(answer["error"], errors.GpubossError)
    return told(answer["message"])
