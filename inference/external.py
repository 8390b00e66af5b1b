"""One program that we did not start (ComfyUI, a vision service): seen, given a lease, asked to free, measured.

Run by `externals.py`; calls the ledger, `external_process.py` (which process is it, what does it use?) and
`external_http.py`. Every few seconds, and whenever its lease gets notice, one look:

1. Its process is not there: it has no lease.
2. It is there without a lease: one is asked for, over all the memory it is said to need. What it uses already is its
   own (`adopts`). Until the lease is granted it waits in the ledger's queue like anybody, and models give way as they
   do to a training job. A lease that an earlier life of this broker got for it is taken over.
3. Its lease has notice: when it is idle, or the grace is over, it is asked to free its memory. Then its claim is shrunk
   to what it is seen to use; on devices that nobody measures, what it says is believed. (The notice is not
   acknowledged: a lease that goes on smaller would keep one that is.)
4. It works again with a claim that was shrunk: the claim grows back where there is room. What it uses beyond its claim
   meanwhile is counted all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from gpuboss import errors
from gpuboss.devices import Device, DeviceKind
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import OVER, HolderKind, Lease, LeaseRequest, LeaseState, Shares, new_request_id
from gpuboss.sizing import choose_devices, options_for
from inference import external_http, external_process
from inference.external_spec import Spec, pattern_of
from inference.ledger import ExternalLedger

__all__ = ["External", "ExternalState", "ExternalView"]

LOOK_S = 2.0
"""Between two looks."""
FREE_AGAIN_S = 10.0
"""Before a program that was asked to free its memory, and still has notice, is asked again."""
FAREWELL_S = 2.0
"""How long leaving the ledger's queue may take; then it is left to be done when the store answers."""
LEAST_BYTES = 1 << 20
"""A lease has at least so much of each of its devices."""

_log = structlog.get_logger(__name__)


class ExternalState(enum.StrEnum):
    """Where such a program stands."""

    ABSENT = "absent"
    """No process matches."""
    WAITING = "waiting"
    """It runs; its lease is queued."""
    HELD = "held"
    """It runs under its lease."""
    ELSEWHERE = "elsewhere"
    """It runs under a lease that is not ours to change, such as one of `gpuboss run`."""


@dataclass(frozen=True, slots=True)
class ExternalView:
    """It, for people."""

    name: str
    state: ExternalState
    pid: int | None
    shares: Shares
    used_bytes: int | None
    """None where nobody measures it."""
    busy: bool | None
    """None when it does not say."""
    notice: str | None
    """Who wants its memory."""
    problem: str | None
    """What went wrong last."""


@dataclass(eq=False)
class External:
    """See the module. One task drives it."""

    spec: Spec
    ledger: ExternalLedger
    state: ExternalState = ExternalState.ABSENT
    process: ProcessIdentity | None = None
    lease: Lease | None = None
    used_bytes: int | None = None
    busy: bool | None = None
    problem: str | None = None
    _hurry: asyncio.Event = field(default_factory=asyncio.Event)
    _asking: asyncio.Task[None] | None = None
    _deadline_s: float = 0.0
    """When the grace of the notice is over."""
    _asked_to_free_s: float | None = None
    """When it was, because of this notice."""
    _freed: bool = False
    """It gave its memory up and has not worked since."""

    @property
    def holder(self) -> str:
        """Its name in the ledger."""
        return f"service:{self.spec.name}"

    def view(self) -> ExternalView:
        """It, as it stands."""
        lease = self.lease
        return ExternalView(
            name=self.spec.name,
            state=self.state,
            pid=self.process.pid if self.process else None,
            shares=lease.shares if lease else {},
            used_bytes=self.used_bytes,
            busy=self.busy,
            notice=lease.notice.holder if lease and lease.notice else None,
            problem=self.problem,
        )

    async def main_loop(self) -> None:
        """Look now and then, until cancelled. What waits then is given up; what is held stays the program's."""
        try:
            while True:
                try:
                    await self._look()
                except errors.GpubossError as error:
                    self._trouble(error.message)
                except Exception:
                    _log.exception("external_fault", name=self.spec.name)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._hurry.wait()
                self._hurry.clear()
        finally:
            await self._ask_no_more()

    # -- one look -----------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        process = await asyncio.to_thread(external_process.find, pattern_of(self.spec.match), self.process)
        if process != self.process:
            await self._leave()
            self.process = process
        if process is None:
            self.state = ExternalState.ABSENT
            return
        self.busy = await external_http.is_busy(self.spec.busy) if self.spec.busy else False
        if self.lease is None and self._asking is None:
            await self._get_lease(process)
        if self.lease is not None:
            await self._tend(self.lease)

    async def _leave(self) -> None:
        """The process is gone, or another: so is its lease."""
        await self._ask_no_more()
        lease, self.lease, self.used_bytes, self._freed = self.lease, None, None, False
        if lease is not None:
            _log.info("external_gone", name=self.spec.name)
            await self.ledger.release(lease)

    async def _get_lease(self, process: ProcessIdentity) -> None:
        """Case 2."""
        row = await asyncio.to_thread(external_process.lease_of, process, self.ledger.state)
        if row is None:
            self.state = ExternalState.WAITING
            self._asking = asyncio.create_task(self._ask(process), name=f"lease of {self.holder}")
            return
        found = await self.ledger.find(row.lease_id)
        if row.holder != self.holder or found is None or found.state in OVER:
            self.state = ExternalState.ELSEWHERE
            return
        self._hold(found)

    async def _ask(self, process: ProcessIdentity) -> None:
        lease: Lease | None = None
        try:
            snapshot = await self.ledger.snapshot()
            used = await asyncio.to_thread(external_process.use_of, process, snapshot, self._only_host_memory())
            request = LeaseRequest(
                new_request_id(),
                self.holder,
                HolderKind.SERVICE,
                self._options(used, snapshot.devices),
                self.spec.priority,
                preemptible=self.spec.free is not None,
                grace_s=self.spec.grace_s,
                adopts=used,
            )
            lease = await self.ledger.acquire(request)
            if lease.state is LeaseState.QUEUED:
                lease = await self.ledger.wait_granted(lease)
            lease = await self.ledger.activate(lease, process)
            self._hold(lease)
            lease = None
            self._hurry.set()
        except errors.GpubossError as error:
            self._trouble(error.message)
        finally:
            self._asking = None
            if lease is not None:
                await self.ledger.cancel(lease)

    def _options(self, used: Mapping[str, int], uses: tuple[object, ...]) -> tuple[Shares, ...]:
        """All it needs, on the device where it is seen, or was said to be, or that suits best."""
        only = [self.spec.device] if self.spec.device else list(used) or None
        size = max(self.spec.vram_bytes, *used.values()) if used else self.spec.vram_bytes
        return options_for(self.ledger.devices, uses, vram_bytes=size, only=only)  # type: ignore[arg-type]

    def _hold(self, lease: Lease) -> None:
        self.lease, self.state, self.problem = lease, ExternalState.HELD, None
        self.ledger.on_notice(lease, self._noticed)
        self.ledger.on_lost(lease, self._lost)
        _log.info("external_leased", name=self.spec.name, pid=self.process.pid if self.process else None)

    def _noticed(self, lease: Lease) -> None:
        before, self.lease = self.lease, lease
        if lease.notice is None:
            self._asked_to_free_s = None
        elif before is None or before.notice is None:
            self._deadline_s = time.monotonic() + lease.notice.left_s
            self._asked_to_free_s = None
        self._hurry.set()

    def _lost(self, lease: Lease) -> None:
        """Somebody ended it; the next look sees whether there is a process to have a lease."""
        if self.lease is not None and self.lease.id == lease.id:
            self.lease, self.used_bytes, self._freed = None, None, False
            self._hurry.set()

    # -- cases 3 and 4 ------------------------------------------------------------------------------------------------

    async def _tend(self, lease: Lease) -> None:
        self.used_bytes = await asyncio.to_thread(external_process.observed, lease, self.ledger.state)
        if lease.notice is not None:
            await self._yield(lease)
        elif self._freed and (self.busy or self._outgrown(lease)):
            await self._grow(lease)

    async def _yield(self, lease: Lease) -> None:
        now_s = time.monotonic()
        if self.spec.free is None or (self.busy is not False and now_s < self._deadline_s):
            return
        if self._asked_to_free_s is None or now_s - self._asked_to_free_s >= FREE_AGAIN_S:
            self.problem = await external_http.perform(self.spec.free)
            self._asked_to_free_s = now_s
            if self.problem is not None:
                self._trouble(self.problem)
                return
            self._freed = True
            _log.info("external_freed", name=self.spec.name, wanted_by=lease.notice.holder if lease.notice else "")
        if self._freed:
            await self._shrink(lease)

    async def _shrink(self, lease: Lease) -> None:
        """To what it still uses, now that it was asked."""
        await self.ledger.sweep()  # a reading of now
        self.used_bytes = await asyncio.to_thread(external_process.observed, lease, self.ledger.state)
        left = {device: min(share, max(self._left_on(device), LEAST_BYTES)) for device, share in lease.shares.items()}
        if left != dict(lease.shares):
            self.lease = await self.ledger.resize(lease, [left])
        self._hurry_soon()

    def _left_on(self, device: str) -> int:
        measured = any(one.id == device and one.measured for one in self.ledger.devices)
        return (self.used_bytes or 0) if measured else 0

    async def _grow(self, lease: Lease) -> None:
        full = {device: max(self.spec.vram_bytes, share) for device, share in lease.shares.items()}
        if full == dict(lease.shares):
            self._freed = False
            return
        try:
            self.lease = await self.ledger.resize(lease, [full])
            self._freed, self.problem = False, None
        except errors.LeaseRefused as error:
            self._trouble(error.message)

    def _outgrown(self, lease: Lease) -> bool:
        return self.used_bytes is not None and self.used_bytes > sum(lease.shares.values()) * 11 // 10

    def _hurry_soon(self) -> None:
        """Memory comes back bit by bit: the next look is not long in coming while somebody waits."""
        asyncio.get_running_loop().call_later(LOOK_S / 8, self._hurry.set)

    def _only_host_memory(self) -> bool:
        devices: list[Device] = choose_devices(self.ledger.devices, [self.spec.device] if self.spec.device else None)
        return all(device.kind is DeviceKind.CPU for device in devices)

    async def _ask_no_more(self) -> None:
        asking = self._asking
        if asking is not None:
            asking.cancel()
            _, late = await asyncio.wait({asking}, timeout=FAREWELL_S)
            if late:
                asking.cancel()
                await asyncio.wait({asking})

    def _trouble(self, what: str) -> None:
        if what != self.problem:
            _log.warning("external_problem", name=self.spec.name, problem=what)
        self.problem = what
