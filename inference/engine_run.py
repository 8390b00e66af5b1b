"""One life of an engine and everything it holds: lease, shim, process, socket, connections.

Made by `slot.py` for each start. Calls the ledger (memory), `process.py` (the shim), a backend (how to start, is it
ready?) and `proxy.py` (the connection). The steps come in this order; `end` may follow any of them, also one that was
cancelled half way:

1. `acquire`      a lease on memory; a shim is fetched meanwhile, unless others have to give that memory back first
2. `launch`       the engine runs and stands in the node ledger
3. `until_ready`  it answers
4. `until_over`   it died
5. `end`          everything of it is dead, its row is out of the ledger, its lease is released
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final, assert_never

import structlog

from gpuboss import errors as ledger_errors
from gpuboss.lease_wire import terms_for
from gpuboss.leases import HolderKind, Lease, LeaseRequest, LeaseState, new_request_id
from gpuboss.node_ledger import NodeLedger
from inference import engine_log
from inference.backends import Backend, Launch
from inference.errors import EngineDied, LoadFailed, LoadTimeout, NoRoom, WillNeverFit
from inference.events import Shares
from inference.lease_terms import LeaseTerms
from inference.ledger import Ledger
from inference.load_progress import LoadProgress
from inference.model import Model
from inference.process import Exited, LaunchOrder, LeaseOrder, Lost, Refused, Report, Shim, Shims, Started, Wedged
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
_SHOWN_LINES = 8

_log = structlog.get_logger(__name__)


class EngineRun:
    """See the module. Used by one task, the slot's."""

    def __init__(
        self,
        model: Model,
        *,
        ledger: Ledger,
        backend: Backend,
        binary: Path,
        shims: Shims,
        clock: Callable[[], float],
        wedged: Callable[[Wedged], None],
        noticed: Callable[[Lease], None],
        grace_s: float = GRACE_S,
    ) -> None:
        self.pid: int | None = None
        """The engine's."""
        self.client: EngineClient | None = None
        self.fraction: float | None = None
        """How far the load is, as far as anything tells."""
        self._model = model
        self._ledger = ledger
        self._backend = backend
        self._binary = binary
        self._shims = shims
        self._clock = clock
        self._wedged = wedged
        self._noticed = noticed
        self._grace_s = grace_s
        self._terms = LeaseTerms(ledger, model.id)
        self._shim: Shim | None = None
        self._next: asyncio.Task[Report] | None = None
        self._launched = False
        """The order was given, and nothing says that the engine does not run."""
        self._over: Exited | Lost | None = None
        self._socket: Path | None = None
        self._log_path = engine_log.log_path(ledger.state.log_dir, model.id)
        self._log_start = 0

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
        name = f"slot:{self._model.id}"
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
                    raise LoadFailed(f"'{self._model.id}' cannot be started: {self._ending(report)}")
                case _:
                    assert_never(report)

    def _order(self) -> LaunchOrder:
        """Everything the shim needs. Files that the engine finds or makes are private."""
        lease, state = self.lease, self._ledger.state
        assert lease is not None
        assert lease.fence is not None, "a granted lease has a fence"
        self._socket = state.socket_path(f"engine-{lease.id[:8]}")
        key = secrets.token_urlsafe(24)
        home = state.root / "engine-home"
        home.mkdir(mode=0o700, exist_ok=True)
        engine_log.rotate(self._log_path)
        with contextlib.suppress(FileNotFoundError):
            self._log_start = self._log_path.stat().st_size
        self.client = EngineClient(self._socket, key, name=self._model.id)
        command = self._backend.command(
            self._model,
            Launch(
                binary=self._binary,
                socket=self._socket,
                api_key=key,
                shares=lease.shares,
                devices=self._ledger.devices,
                home=home,
            ),
        )
        return LaunchOrder(
            argv=command.argv,
            env={**command.env, "GPUBOSS_LEASE": lease.id},
            cwd=str(home),
            log=str(self._log_path),
            socket=str(self._socket),
            lease=LeaseOrder(
                lease.id, lease.fence.epoch, lease.fence.seq, lease.holder, dict(lease.shares), terms_for(lease)
            ),
        )

    # -- 3 ---------------------------------------------------------------------------------------------------------

    async def until_ready(self) -> None:
        """Wait until the engine answers.

        Raises:
            LoadFailed: it died.
            LoadTimeout: it lives and makes no progress.
        """
        assert self.client is not None
        assert self.pid is not None
        progress = LoadProgress(self.pid, self._model.file_bytes, self._log_path, self._clock)
        pause_s = FIRST_PAUSE_S
        while not await self._is_ready(self.client, progress):
            if self._arrived():
                raise LoadFailed(f"'{self._model.id}' could not be loaded: {self._ending(await self._report())}")
            self.fraction = progress.fraction
            await asyncio.wait({self._reporting()}, timeout=pause_s)
            pause_s = min(pause_s * PAUSE_GROWTH, LAST_PAUSE_S)
        self.fraction = None
        self._shims.refill()

    async def _is_ready(self, client: EngineClient, progress: LoadProgress) -> bool:
        """One probe.

        Raises:
            LoadTimeout: there was no progress for too long.
        """
        progress.look()
        if progress.stalled_s is not None:
            raise LoadTimeout(
                f"'{self._model.id}' did not become ready: no progress for {progress.stalled_s:.0f} s "
                f"({progress}){self._last_words()}"
            )
        try:
            async with asyncio.timeout(PROBE_PATIENCE_S):
                readiness = await self._backend.probe(client)
        except TimeoutError:
            return False
        progress.told(readiness.fraction)
        return readiness.ready

    # -- 4 ---------------------------------------------------------------------------------------------------------

    async def until_over(self) -> EngineDied:
        """Wait for the engine's end, nobody having ordered it, and say how it came."""
        while True:
            engine_log.rotate(self._log_path)
            done, _ = await asyncio.wait({self._reporting()}, timeout=60.0)
            if done:
                ending = self._ending(await self._report())
                return EngineDied(f"the engine of '{self._model.id}' died: {ending}", retry_after_s=1.0)

    @property
    def lost(self) -> bool:
        """The shim is dead without having said that the engine is."""
        return isinstance(self._over, Lost)

    # -- 5 ---------------------------------------------------------------------------------------------------------

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
            await self._give_back(self.lease, used=used)
        self._terms.lease = self.pid = None

    async def _end_processes(self) -> None:
        """Until everything the engine started is dead and its row is gone."""
        assert self._shim is not None
        assert self.lease is not None
        if self._over is None:
            self._shim.stop(self._backend.stop_grace_s)
        while self._over is None and self._launched:
            await self._report()
        if isinstance(self._over, Lost):
            await self._row_gone(self.lease.id)

    async def _row_gone(self, lease_id: str) -> None:
        """The keeper ends what a dead shim left, and then takes out its row."""
        pause_s = 0.01
        while self._row_stands(lease_id):
            await self._ledger.sweep()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.5)

    def _row_stands(self, lease_id: str) -> bool:
        try:
            with NodeLedger(self._ledger.state.ledger_path) as books:
                return any(row.lease_id == lease_id for row in books.rows())
        except ledger_errors.GpubossError as error:
            _log.warning("node_ledger_unread", model=self._model.id, error=error.message)
            return True

    async def _give_back(self, lease: Lease, *, used: bool) -> None:
        try:
            await (self._ledger.release(lease) if used else self._ledger.cancel(lease))
        except ledger_errors.StaleFence:
            pass  # it is over already
        except ledger_errors.GpubossError as error:
            # The keeper frees it, for its holder is dead and out of the books.
            _log.warning("lease_not_released", model=self._model.id, lease=lease.id, error=error.message)

    # -- reports of the shim -----------------------------------------------------------------------------------------

    def _reporting(self) -> asyncio.Task[Report]:
        """The task that waits for the next report; one at a time, and none is lost when its waiter is cancelled."""
        if self._next is None:
            assert self._shim is not None
            self._next = asyncio.create_task(self._shim.report(), name=f"reports on {self._model.id}")
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

    def _ending(self, report: Report) -> str:
        """How the engine ended, and what it said last."""
        match report:
            case Exited():
                return f"it {report}{self._last_words()}"
            case Lost(code):
                return f"its supervisor was ended by {f'signal {-code}' if code < 0 else f'exit code {code}'}"
            case Wedged(pids):
                return f"its processes {', '.join(map(str, pids))} do not end"
            case _:
                return f"its supervisor said {report}"

    def _last_words(self) -> str:
        lines = engine_log.last_lines(self._log_path, _SHOWN_LINES, since_bytes=self._log_start)
        text = engine_log.without_paths("\n".join(lines), self._model.path)
        return f"; its log ends with:\n{text}" if lines else ""
