"""The keeper: one process per host and state directory, which watches the node and minds its ledger.

`python -m gpuboss.keeper`, started detached by the first client that finds no keeper (`gpuboss.keeper_link`), parent
of the private store. Startup takes the lock, opens the door, starts the store, finds the devices and syncs; the main
loop is `gpuboss.beats`. It leaves when its last client, lease and row have been gone for a while; then the store ends
with it.

Calls `gpuboss.door`, `gpuboss.reception`, `gpuboss.store_keeper`, `gpuboss.node_watch`, `gpuboss.beats`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gpuboss import errors, identity
from gpuboss.devices import Device, DeviceKind, Probe, discover
from gpuboss.door import Door
from gpuboss.host_lock import HostLock, gpu_lock
from gpuboss.reception import Opened, Reception
from gpuboss.settings import LedgerSettings
from gpuboss.state_dir import StateDir
from gpuboss.store_keeper import StoreKeeper
from gpuboss.wire import Wire, device_to_wire

if TYPE_CHECKING:
    from gpuboss.beats import Beats
    from gpuboss.node_watch import NodeWatch
    from gpuboss.store import Store

__all__ = ["Keeper", "main"]

_LOCK_S = 5.0
"""How long the keeper before this one may take to leave."""
_REFUSAL_S = 3.0
"""How long a keeper that cannot start waits for somebody to tell why."""
_FIND_S = 15.0
"""How long drivers may take to say what devices there are; some wake their cards first."""
_LOCKED_KINDS = frozenset({DeviceKind.CUDA, DeviceKind.ROCM, DeviceKind.METAL})
_log = logging.getLogger("gpuboss.keeper")


class Keeper:
    """See the module. What is opened in `startup` is closed in the reverse order, also when startup fails half-way."""

    def __init__(self, state: StateDir, settings: LedgerSettings) -> None:
        self._state = state
        self._settings = settings
        self._door: Door
        self._reception = Reception(state.root, settings, lambda: not self._door.visitors)
        self._door = Door(state.socket_path("keeper"), self._reception)
        self._beats: Beats | None = None
        self._told_to_leave = False
        self._idle_since_s: float | None = None

    async def run(self) -> int:
        """From the lock to the end; the process's exit code."""
        if self._state.is_shared:
            os.umask(0o007)  # whoever of the group runs the next keeper needs the store's files and the logs
        lock = HostLock(self._state.lock_path("keeper"), note=str(self._state.root))
        if not await self._take(lock):
            return 0
        async with contextlib.AsyncExitStack() as closing:
            closing.callback(lock.release)
            _log.info("keeper %d starts for %s", os.getpid(), self._state.root)
            await self._door.open()
            closing.callback(self._door.close)
            try:
                beats = await self._startup(closing)
                await beats.main_loop(lambda: self._stay(beats.in_use))
                self._door.shut()
            except errors.GpubossError as error:
                _log.error("%s", error)
                await self._refuse_callers(error)
                return 1
            except Exception as error:
                await self._refuse_callers(errors.GpubossError(f"the keeper failed, its log tells how: {error!r}"))
                raise
        _log.info("keeper %d is gone", os.getpid())
        return 0

    def leave(self) -> None:
        """End soon."""
        self._told_to_leave = True
        if self._beats is not None:
            self._beats.poke()

    async def _startup(self, closing: contextlib.AsyncExitStack) -> Beats:
        """Store, devices, first sync; then visitors are let in. Raises the GpubossError that they are told instead."""
        minder = StoreKeeper(self._state, self._settings.store_url)
        closing.push_async_callback(minder.stop)
        await minder.launch()
        # Imported here: these and the store's library take a tenth of a second, in which the server starts.
        from gpuboss.beats import Beats
        from gpuboss.node_ledger import NodeLedger
        from gpuboss.node_watch import NodeWatch

        self._state.forget_other_boots()
        ledger = closing.enter_context(NodeLedger(self._state.ledger_path))
        node = NodeWatch(identity.machine_id(), await self._find_devices(), ledger)
        closing.callback(node.close)
        self._lock_gpus(node.devices, closing)
        await minder.wait_ready()
        store = self._connect_store(minder.url)
        closing.push_async_callback(store.close)
        beats = self._beats = Beats(node, store, self._settings.timings, self._state.holders_dir, self._tell_epoch)
        minding = asyncio.create_task(minder.mind(beats.poke), name="mind-store")
        minding.add_done_callback(self._store_is_lost)
        closing.push_async_callback(_end, minding)
        await self._first_sync(store, beats)
        if self._settings.store_url:
            closing.push_async_callback(node.leave, store)
        self._reception.open(Opened(beats, self._welcome(minder.url, node)))
        _log.info("ready with %s", ", ".join(device.id for device in node.devices))
        return beats

    async def _find_devices(self) -> list[Probe]:
        from gpuboss.probing import in_time

        return await in_time(
            lambda: discover(self._settings.devices, self._settings.reserve_bytes), _FIND_S, "finding the devices"
        )

    def _connect_store(self, url: str) -> Store:
        from gpuboss.store import Store

        try:
            return Store(url, self._settings.timings)
        except ValueError as error:
            raise errors.StoreUnfit(f"GPUBOSS_URL (`store` in the configuration) names no store: {error}") from error

    async def _first_sync(self, store: Store, beats: Beats) -> None:
        """A private store that falls just now is waited for; a shared one that does not answer is refused."""
        patience_s = 0.0 if self._settings.store_url else self._settings.timings.renew_deadline_s
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                for warning in await store.check_fitness():
                    _log.warning("%s", warning)
                await beats.begin()
                return
            except errors.StoreUnavailable:
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(0.05)

    def _welcome(self, store_url: str, node: NodeWatch) -> Wire:
        return {
            "op": "welcome",
            "pid": os.getpid(),
            "store_url": store_url,
            "node": node.node,
            "devices": [device_to_wire(device) for device in node.devices],
            "timings": asdict(self._settings.timings),
        }

    def _tell_epoch(self, epoch: int) -> None:
        self._door.tell_all({"op": "epoch", "epoch": epoch})

    def _store_is_lost(self, minding: asyncio.Task[None]) -> None:
        """The store cannot be restarted: the next keeper may be able to."""
        if not minding.cancelled() and (error := minding.exception()) is not None:
            _log.error("the store is given up: %s", error)
            self.leave()

    def _stay(self, in_use: bool) -> bool:
        if self._told_to_leave or self._reception.leaving:
            return False
        if in_use or self._door.callers:
            self._idle_since_s = None
            return True
        now_s = time.monotonic()
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        return now_s - self._idle_since_s < self._settings.timings.linger_s

    async def _take(self, lock: HostLock) -> bool:
        """Whether this process is the keeper now; False when another one is and answers."""
        deadline_s = time.monotonic() + _LOCK_S
        while True:
            try:
                lock.acquire()
                return True
            except errors.LockHeld as error:
                if await _answers(self._door.path):
                    return False
                if time.monotonic() > deadline_s:
                    _log.error("%s", error)
                    return False
            await asyncio.sleep(0.02)

    def _lock_gpus(self, devices: Sequence[Device], closing: contextlib.AsyncExitStack) -> None:
        """One ledger per GPU on this host: LedgerConflict names the other one's state directory."""
        for device in devices:
            if device.kind in _LOCKED_KINDS:
                try:
                    closing.enter_context(gpu_lock(device.id, note=f"the ledger in {self._state.root}"))
                except errors.LockHeld as error:
                    raise errors.LedgerConflict(
                        f"{device.name} ({device.id}) belongs to another ledger: {error}. Use the same state directory "
                        "(GPUBOSS_STATE_DIR; /var/lib/gpuboss is for a host's users to share)"
                    ) from error

    async def _refuse_callers(self, error: errors.GpubossError) -> None:
        """Tell everybody who comes, until the one who started this keeper was told."""
        if self._reception.is_open:
            return
        self._reception.fail(error)
        deadline_s = time.monotonic() + _REFUSAL_S
        # Two conditions, and nothing else to do meanwhile.
        while time.monotonic() < deadline_s and (self._door.callers or not self._reception.refused):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _answers(socket: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(str(socket))
    except OSError:
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def _run(state: StateDir, settings: LedgerSettings) -> int:
    keeper = Keeper(state, settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, keeper.leave)
    return await keeper.run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m gpuboss.keeper`."""
    parser = argparse.ArgumentParser(
        prog="python -m gpuboss.keeper", description="Keeps the memory ledger of this host."
    )
    parser.add_argument("--state-dir", type=Path, help="as GPUBOSS_STATE_DIR")
    parser.add_argument(
        "--detach", action="store_true", help="run in the background, with the settings given on standard input"
    )
    told = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = LedgerSettings.from_environment()
    if told.detach:
        settings = LedgerSettings.from_wire(json.loads(sys.stdin.buffer.read()), told.state_dir)
        # A grandchild of whoever starts us: nobody who ends its own children ends the keeper of other people's leases.
        if os.fork():
            os._exit(0)
    return asyncio.run(_run(StateDir.resolve(told.state_dir), settings))


if __name__ == "__main__":
    sys.exit(main())
