"""One life of an engine and everything it holds: lease, shim, process, socket, connections.

Made by `slot.py` for each start. Calls the ledger (memory), `process.py` (the shim), a backend (how to start, is it
ready?), `proxy.py` (the connection), `load_progress.py` and `progress_watch.py` (does it get on?) and `inquest.py` (why
did it end?). The steps come in this order; `end` may follow any of them, also one that was cancelled half way:

1. `acquire`      a lease on memory; a shim is fetched meanwhile, unless others have to give that memory back first
2. `launch`       the engine runs and stands in the node ledger
3. `until_ready`  it answers
4. `until_over`   it died, or stalled: what was under way has been told so
5. `end`          everything of it is dead, its row is out of the ledger, its lease is released

`adopt` stands in the place of 1 to 3 for an engine that a dead broker left; from `hand_over` on this one's would be.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final, assert_never

import structlog

from gpuboss import errors as ledger_errors
from gpuboss.leases import HolderKind, Lease, LeaseRequest, LeaseState, new_request_id
from inference import engine_log
from inference.backends import Backend
from inference.engine_log import EngineLog
from inference.errors import EngineDied, EngineStalled, LoadFailed, NoRoom, WillNeverFit
from inference.events import Shares
from inference.fingerprint import fingerprint
from inference.inquest import Inquest
from inference.launch_order import launch_order
from inference.lease_terms import LeaseTerms
from inference.ledger import Ledger
from inference.left_row import LeftRow
from inference.legacy import Legacy
from inference.load_progress import LoadProgress
from inference.model import Model
from inference.orphans import Orphan
from inference.process import Exited, LaunchOrder, Lost, Refused, Report, Shim, Shims, Started, Wedged
from inference.progress_watch import STALL_S, ProgressWatch, computing_process
from inference.proxy import EngineClient

__all__ = ["GRACE_S", "EngineRun"]

GRACE_S: Final = 30.0
"""From the notice to a slot until what it does is cut short, where nothing else is configured."""
FIRST_PAUSE_S = 0.002
LAST_PAUSE_S = 0.25
PAUSE_GROWTH = 1.2
"""Pauses between probes grow with the load, so that they add a fifth to it at most."""
PROBE_PATIENCE_S = 5.0
SETTLE_S = 5.0
"""How long memory of an ended holder may take to be seen as free again."""

_log = structlog.get_logger(__name__)


class EngineRun:
    """See the module. Used by one task, the slot's."""

    def __init__(
        self,
        model: Model,
        slot_id: str,
        *,
        ledger: Ledger,
        backend: Backend,
        binary: Path,
        shims: Shims,
        clock: Callable[[], float],
        wedged: Callable[[Wedged], None],
        noticed: Callable[[Lease], None],
        grace_s: float = GRACE_S,
        stall_s: float = STALL_S,
        orphan_grace_s: float | None = None,
    ) -> None:
        self.pid: int | None = None
        """The engine's."""
        self.client: EngineClient | None = None
        self.fraction: float | None = None
        """How far the load is, as far as anything tells."""
        self._model = model
        self._slot_id = slot_id
        self._ledger = ledger
        self._backend = backend
        self._binary = binary
        self._shims = shims
        self._clock = clock
        self._wedged = wedged
        self._noticed = noticed
        self._grace_s = grace_s
        self._stall_s = stall_s
        self._terms = LeaseTerms(ledger, slot_id)
        self._left = LeftRow(ledger)
        self._legacy = Legacy(ledger.state, slot_id, model.id, orphan_grace_s)
        self._shim: Shim | None = None
        self._next: asyncio.Task[Report] | None = None
        self._launched = False
        """The order was given, and nothing says that the engine does not run."""
        self._over: Exited | Lost | None = None
        self._hopeless = False
        """It stalled: there is nothing in it that a gentle end would save."""
        self._socket: Path | None = None
        self._log = EngineLog(engine_log.log_path(ledger.state.log_dir, slot_id))
        self._inquest = Inquest(model, backend, self._log)

    @property
    def lease(self) -> Lease | None:
        """What it holds, or waits for."""
        return self._terms.lease

    @property
    def shim_pid(self) -> int | None:
        """The supervisor's process; None until there is one."""
        return self._shim.pid if self._shim else None

    # -- 1 ---------------------------------------------------------------------------------------------------------

    async def acquire(
        self, options: tuple[Shares, ...], priority: int, *, order: int | None = None, patient: bool = False
    ) -> Lease:
        """Wait for the memory. `order` is a place in the ledger's queue; `patient`: it may be long, so without a shim.

        Raises:
            WillNeverFit: the ledger says that it never can be granted.
            LoadFailed: the ledger does not answer.
        """
        name = f"slot:{self._slot_id}"
        request = LeaseRequest(
            new_request_id(), name, HolderKind.SLOT, options, priority, preemptible=True, grace_s=self._grace_s
        )
        fetching = None if patient else asyncio.create_task(self._shims.take(), name=f"shim of {name}")
        try:
            lease = self._terms.lease = await self._ledger.acquire(request, order=order)
            self._terms.asked(options, priority)
            if lease.state is LeaseState.QUEUED:
                lease = await self._ledger.wait_granted(lease)
            self._terms.granted(lease)
        except ledger_errors.LeaseRefused as error:
            raise WillNeverFit(f"'{self._model.id}' cannot be loaded: {error.message}") from error
        except ledger_errors.GpubossError as error:
            raise LoadFailed(f"'{self._model.id}' cannot be loaded: {error.message}", retry_after_s=2.0) from error
        finally:
            if fetching is not None:
                self._shim = await fetching
        return lease

    def ask_for(self, options: tuple[Shares, ...] | None, priority: int) -> None:
        """Change what the lease asks for, while it is queued, and its class, at any time; it keeps its place."""
        self._terms.want(options, priority)

    def acknowledge(self) -> None:
        """Say that the slot has heard its notice and is yielding."""
        self._terms.acknowledge()

    # -- 2 ---------------------------------------------------------------------------------------------------------

    async def launch(self) -> None:
        """Start the engine. From here on notices are heard.

        Raises:
            NoRoom: the node's books say that the memory is not there.
            LoadFailed: the program cannot be started, or the shim died.
        """
        if self._shim is None:
            self._shim = await self._shims.take()
        await self._inquest.begin()
        order = self._order()
        assert self.lease is not None
        self._ledger.on_notice(self.lease, self._noticed)
        deadline_s = self._clock() + SETTLE_S
        swept = False
        while True:
            self._launched = True
            self._shim.launch(order)
            match report := await self._report():
                case Started(pid):
                    self.pid = pid
                    return
                case Refused("ActivationRefused", _, settling) if (
                    not swept or settling > 0
                ) and self._clock() < deadline_s:
                    # The keeper may know of somebody's end what the books do not say yet.
                    await self._ledger.sweep()
                    swept = True
                    await asyncio.sleep(0.05)
                case Refused("ActivationRefused", message):
                    raise NoRoom(
                        f"'{self._model.id}' has its lease, but the memory is not there: {message}", retry_after_s=5.0
                    )
                case Refused(message=message):
                    raise LoadFailed(f"'{self._model.id}' cannot be started: {engine_log.without_paths(message)}")
                case Exited() | Lost() | Wedged():
                    raise self._inquest.load_failed(report, self.lease.shares)
                case _:
                    assert_never(report)

    def _order(self) -> LaunchOrder:
        """Everything the shim needs, and from here on the way to the engine."""
        lease = self.lease
        assert lease is not None
        self._socket, key = self._ledger.state.socket_path(f"engine-{lease.id[:8]}"), secrets.token_urlsafe(24)
        order = launch_order(
            self._model,
            self._backend,
            self._binary,
            self._ledger,
            lease,
            socket=self._socket,
            key=key,
            log=self._log.path,
        )
        self.client = EngineClient(self._socket, key, name=self._model.id)
        if self._legacy.is_wanted:
            defined = fingerprint(self._model, self._backend, self._binary, lease.shares, self._ledger.devices)
            self._legacy.note(defined, self._socket, key)
        return order

    # -- 3 ---------------------------------------------------------------------------------------------------------

    async def until_ready(self) -> None:
        """Wait until the engine answers.

        Raises:
            LoadFailed: it died.
            LoadTimeout: it lives and makes no progress.
        """
        assert self.client is not None
        assert self.pid is not None
        assert self.lease is not None
        progress = LoadProgress(self.pid, self._model.file_bytes, self._log.path, self._clock)
        pause_s = FIRST_PAUSE_S
        while not await self._is_ready(self.client, progress):
            if self._arrived():
                raise self._inquest.load_failed(await self._report(), self.lease.shares)
            self.fraction = progress.fraction
            await asyncio.wait({self._reporting()}, timeout=pause_s)
            pause_s = min(pause_s * PAUSE_GROWTH, LAST_PAUSE_S)
            await self._log.keep_short()
        self.fraction = None
        self._shims.refill()

    async def _is_ready(self, client: EngineClient, progress: LoadProgress) -> bool:
        """One probe.

        Raises:
            LoadTimeout: there was no progress for too long.
        """
        progress.look()
        if progress.stalled_s is not None:
            self._hopeless = True
            raise self._inquest.load_stalled(progress.stalled_s, progress)
        try:
            async with asyncio.timeout(PROBE_PATIENCE_S):
                readiness = await self._backend.probe(client)
        except TimeoutError:
            return False
        progress.told(readiness.fraction)
        return readiness.ready

    # -- from broker to broker --------------------------------------------------------------------------------------

    def hand_over(self, load_s: float) -> None:
        """Have the engine, which serves now, wait for the next broker if this one dies."""
        assert self._shim is not None
        assert self.lease is not None
        self._legacy.hand_over(self._shim, self.lease, load_s)

    async def adopt(self, orphan: Orphan, shim: Shim, lease: Lease) -> None:
        """Go on with the engine that another broker launched; its shim and its lease are ours already.

        Raises:
            LoadFailed: it does not answer.
        """
        past = orphan.past
        self._shim, self._launched, self.pid, self._socket = shim, True, orphan.engine_pid, past.socket
        self.client = EngineClient(past.socket, past.api_key, name=self._model.id)
        self._legacy.note(past.fingerprint, past.socket, past.api_key)
        self._terms.granted(lease)
        await self._inquest.begin()
        try:
            async with asyncio.timeout(PROBE_PATIENCE_S):
                answers = (await self._backend.probe(self.client)).ready
        except TimeoutError:
            answers = False
        if not answers:
            raise LoadFailed(f"the engine of '{self._model.id}' (process {self.pid}) does not answer its next broker")

    def hear_notices(self) -> None:
        """Have those told who listen to notices, also of one that an adopted lease has already."""
        assert self.lease is not None
        self._ledger.on_notice(self.lease, self._noticed)

    # -- 4 ---------------------------------------------------------------------------------------------------------

    async def until_over(self) -> EngineDied | EngineStalled:
        """Wait for the engine's end, nobody having ordered it, or for a stall, and say how it came."""
        assert self.client is not None
        assert self.lease is not None
        process = computing_process(self.pid, self._ledger.devices, self.lease.shares)
        watch = ProgressWatch(self.client, self._backend, process, stall_s=self._stall_s, clock=self._clock)
        while True:
            done, _ = await asyncio.wait({self._reporting()}, timeout=watch.pause_s)
            if done:
                return self._inquest.died(await self._report(), self.lease.shares)
            await self._log.keep_short()
            await watch.look()
            if watch.stalled_s is not None:
                self._hopeless = True
                error = self._inquest.stalled(watch.stalled_s, self._stall_s)
                self.client.interrupt(error)
                return error

    @property
    def lost(self) -> bool:
        """The shim is dead without having said that the engine is."""
        return isinstance(self._over, Lost)

    # -- 5 ---------------------------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """The broker ends: leave to the keeper what only the keeper can end."""
        self._left.hurry()

    async def end(self) -> None:
        """Give back what is held, in order. Takes as long as it takes for the processes to be dead."""
        if self.client is not None:
            await self.client.close()
        used = self._launched
        if used:
            await self._end_processes()
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait({self._next})
        if self._shim is not None:
            self._shims.retire(self._shim)
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)
        await self._terms.close()
        if self.lease is not None:
            self._legacy.forget(self.lease)
            await self._give_back(self.lease, used=used)
        self._terms.lease = self.pid = None

    async def _end_processes(self) -> None:
        """Until everything the engine started is dead and its row is gone."""
        assert self._shim is not None
        assert self.lease is not None
        if self._over is None:
            self._shim.stop(0.0 if self._hopeless else self._backend.stop_grace_s)
        while self._over is None and self._launched:
            await self._report()
        if isinstance(self._over, Lost):
            await self._left.wait_gone(self.lease.id)

    async def _give_back(self, lease: Lease, *, used: bool) -> None:
        if self._left.given_up:
            return
        try:
            await (self._ledger.release(lease) if used else self._ledger.cancel(lease))
        except ledger_errors.StaleFence:
            pass  # it is over already
        except ledger_errors.GpubossError as error:
            # The keeper frees it, for its holder is dead and out of the books.
            _log.warning("lease_not_released", slot=self._slot_id, lease=lease.id, error=error.message)

    # -- reports of the shim -----------------------------------------------------------------------------------------

    def _reporting(self) -> asyncio.Task[Report]:
        """The task that waits for the next report; one at a time, and none is lost when its waiter is cancelled."""
        if self._next is None:
            assert self._shim is not None
            self._next = asyncio.create_task(self._shim.report(), name=f"reports on {self._slot_id}")
        return self._next

    def _arrived(self) -> bool:
        return self._next is not None and self._next.done()

    async def _report(self) -> Report:
        task = self._reporting()
        report = await asyncio.shield(task)
        self._next = None
        match report:
            case Exited() | Lost():
                self._over = report
            case Wedged():
                self._wedged(report)
            case Refused():
                self._launched = False
            case Started():
                pass
            case _:
                assert_never(report)
        return report
