"""For the tests of programs that use the ledger: a clock that goes when it is told to, and a ledger in memory.

    from gpuboss.leases import HolderKind, LeaseRequest, LeaseState, new_request_id
    from gpuboss.testing import FakeClock, MemoryLedger

    async def test_my_program():
        def ask(name, **more):
            return LeaseRequest(new_request_id(), name, HolderKind.JOB, ({"sim0": 20 << 30},), priority=10, **more)

        clock = FakeClock()
        async with MemoryLedger("sim0=24GiB,sim1=24GiB", clock) as ledger:
            lease = await ledger.acquire(ask("job:mine", ttl_s=60.0))
            lease = await ledger.activate(lease, by_word=True)
            waiter = await ledger.acquire(ask("job:next"))
            assert (lease.state, waiter.state) == (LeaseState.ACTIVE, LeaseState.QUEUED)
            clock.advance(60.0)  # nobody renewed it
            assert (await ledger.wait_granted(waiter)).state is LeaseState.GRANTED

`MemoryLedger` takes the place of `gpuboss.Client`: it is for programs that are given their ledger. It keeps what a
client promises, with no store, no keeper, no files and no other process, and passes the same tests
(`tests/contract/test_ledgers.py`). `gpuboss.hold` and its like never use it: a program that calls them is tested with
`GPUBOSS_DEVICES=sim0=24GiB` and a `GPUBOSS_STATE_DIR` of its own, against a real keeper and store.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from gpuboss import errors
from gpuboss.client import Renewed
from gpuboss.devices import Device, DeviceKind, parse_devices
from gpuboss.identity import ProcessIdentity
from gpuboss.lease_wire import explain_shortage
from gpuboss.leases import OVER, Fence, Lease, LeaseRequest, LeaseState, Shares, Snapshot
from gpuboss.ledger_rows import Ground, SharePeak
from gpuboss.peaks import PeakRecord
from gpuboss.state_dir import StateDir
from gpuboss.testing_rules import Record, Rules
from gpuboss.watching import LedgerEvent, LedgerWatch, Tell

__all__ = ["FakeClock", "MemoryLedger"]


_MOST_PEAKS = 5


class FakeClock:
    """A clock for tests: it stands still until `advance`."""

    def __init__(self, start_s: float = 1_700_000_000.0) -> None:
        self.now_s = start_s
        """Seconds since 1970, and since anything else."""
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        """As `time.time()`."""
        return self.now_s

    monotonic = time
    """As `time.monotonic()`."""

    def at(self, moment_s: float, act: Callable[[], None]) -> None:
        """Call something when the clock gets there."""
        heapq.heappush(self._timers, (moment_s, next(self._numbers), act))

    async def sleep(self, seconds: float) -> None:
        """As `asyncio.sleep`; returns when the clock has been advanced that far."""
        over = asyncio.Event()
        self.at(self.now_s + seconds, over.set)
        await over.wait()

    def advance(self, seconds: float) -> None:
        """Let time pass. What is due on the way is called at its own moment, in order. ValueError for the past."""
        if seconds < 0:
            raise ValueError(f"time does not go back by {-seconds:g} s")
        goal_s = self.now_s + seconds
        while self._timers and self._timers[0][0] <= goal_s:
            moment_s, _, act = heapq.heappop(self._timers)
            self.now_s = max(self.now_s, moment_s)
            act()
        self.now_s = goal_s


class _Sayings:
    """Tells watches what happens, at once."""

    def __init__(self) -> None:
        self.listening = asyncio.Event()
        self.listening.set()
        self._watches: list[LedgerWatch] = []

    def admit(self, watch: LedgerWatch) -> None:
        self._watches.append(watch)

    def dismiss(self, watch: LedgerWatch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)

    def tell(self, event: LedgerEvent) -> None:
        for watch in list(self._watches):
            watch.tell(event)


class MemoryLedger:
    """A ledger of one process, for tests. Its methods do what those of `Client` do, and raise the same errors."""

    def __init__(
        self,
        devices: str | Sequence[Device] = "sim0=24GiB",
        clock: FakeClock | None = None,
        *,
        state: StateDir | Path | None = None,
        node: str = "memory",
    ) -> None:
        """`devices`: as in GPUBOSS_DEVICES, or values. `state`: where the program under test may put files."""
        self.clock = clock or FakeClock()
        self.node = node
        self.devices: tuple[Device, ...] = _declared(devices) if isinstance(devices, str) else tuple(devices)
        self.owner = ProcessIdentity.current()
        """As whose requests these are; other owners' can be made with `acquire(..., owner=...)`."""
        self.store_up = True
        """False: the store does not answer, as far as programs can tell: what needs it raises StoreUnavailable."""
        self._state = StateDir.resolve(state) if isinstance(state, Path) else state
        self._rules = Rules(self.devices, node)
        self._sayings = _Sayings()
        self._changed: dict[str, asyncio.Event] = {}
        self._cancelled: set[str] = set()
        """Given up before they were asked for."""
        self._entered: dict[str, ProcessIdentity | None] = {}
        self._on_notice: dict[str, Tell] = {}
        self._on_lost: dict[str, Tell] = {}
        self._due_s: float | None = None
        self._learned: dict[str, dict[str, dict[str, int]]] = {}
        """Profile -> lease -> what it was told to take."""

    @property
    def state(self) -> StateDir:
        """Where files go. RuntimeError when the test has not said where."""
        if self._state is None:
            raise RuntimeError("this MemoryLedger has no state directory: give it one (state=tmp_path)")
        return self._state

    # -- as Client -----------------------------------------------------------------------------------------------------

    async def acquire(
        self, request: LeaseRequest, *, order: int | None = None, owner: ProcessIdentity | None = None
    ) -> Lease:
        """See `Client.acquire`."""
        self._pass_time()
        if request.request_id in self._cancelled:
            raise errors.StaleFence(f"lease {request.request_id} is cancelled: ask for a new one")
        record = self._rules.records.get(request.request_id)
        if record is None:
            if not any(map(self._rules.could_ever_fit, request.options)):
                why = explain_shortage(self._rules.shortage(request.options))
                raise errors.LeaseRefused(f"{request.holder} can never be granted {why}")
            record = self._rules.ask(request, owner or self.owner, order, self.clock.now_s)
            self._settle()
        return self._outcome(record)

    async def wait_granted(self, lease: Lease) -> Lease:
        """See `Client.wait_granted`."""
        record = self._record(lease)
        while record.state is LeaseState.QUEUED:
            await self._changed.setdefault(record.id, asyncio.Event()).wait()
        return self._outcome(record)

    async def cancel(self, lease: Lease) -> None:
        """See `Client.cancel`."""
        self._pass_time()
        record = self._rules.records.get(lease.id)
        if record is None:
            self._cancelled.add(lease.id)
        elif record.state in (LeaseState.QUEUED, LeaseState.GRANTED):
            self._end(record, LeaseState.CANCELLED)

    async def activate(self, lease: Lease, process: ProcessIdentity | None = None, *, by_word: bool = False) -> Lease:
        """See `Client.activate`."""
        self._pass_time()
        record = self._fenced(lease)
        room = self._rules.room_for(record)
        for device, size in record.shares.items():
            if record.state is LeaseState.GRANTED and size > room[device]:
                raise errors.ActivationRefused(device, wanted_bytes=size, free_bytes=room[device])
        self._entered[record.id] = None if by_word else process or self.owner
        self._rules.enter(record, self.clock.now_s)
        self._settle()
        return self._show(record)

    async def take_over(self, lease_id: str, fence: Fence) -> Lease:
        """See `Client.take_over`."""
        self._pass_time()
        record = self._rules.records.get(lease_id)
        if record is None or not record.holds or record.fence != fence or record.state is LeaseState.GRANTED:
            raise errors.StaleFence(f"lease {lease_id} is over, another's, or not used by anybody")
        record.owner = self.owner
        return self._show(record)

    async def renew(self, lease: Lease) -> Lease:
        """See `Client.renew`."""
        renewed = await self.renew_many([lease])
        if not renewed.leases:
            raise errors.StaleFence(f"lease {lease.id} of {lease.holder} is over")
        return renewed.leases[0]

    async def renew_many(self, leases: Sequence[Lease]) -> Renewed:
        """See `Client.renew_many`."""
        self._pass_time()
        renewed, stale, unknown = [], [], []
        for lease in leases:
            record = self._rules.records.get(lease.id)
            if record is None:
                unknown.append(lease.id)
            elif not record.holds or record.fence != lease.fence:
                stale.append(lease.id)
            else:
                self._rules.renew(record, self.clock.now_s)
                renewed.append(self._show(record))
        return Renewed(tuple(renewed), tuple(stale), tuple(unknown))

    async def resize(self, lease: Lease, options: Sequence[Shares] | None = None, priority: int | None = None) -> Lease:
        """See `Client.resize`."""
        self._pass_time()
        record = self._record(lease)
        if record.state in OVER:
            raise errors.StaleFence(f"lease {lease.id} of {lease.holder} is {record.state}")
        if record.state is LeaseState.QUEUED:
            if options is not None and not any(map(self._rules.could_ever_fit, options)):
                why = explain_shortage(self._rules.shortage(options))
                raise errors.LeaseRefused(f"lease {lease.id} of {lease.holder} cannot be given {why}")
            record.options = tuple(options) if options is not None else record.options
        else:
            self._resize_holder(self._fenced(lease), options)
        record.priority = record.priority if priority is None else priority
        self._rules.pump(self.clock.now_s)
        self._settle()
        return self._show(record)

    async def preempt(self, lease_id: str, *, by: str, grace_s: float | None = None) -> Lease:
        """See `Client.preempt`."""
        self._pass_time()
        record = self._rules.records.get(lease_id)
        if record is None or not record.holds:
            raise errors.StaleFence(f"lease {lease_id} is not held by anybody: there is nothing to yield")
        self._rules.tell(record, by, self.clock.now_s, grace_s)
        self._settle()
        return self._show(record)

    async def ack(self, lease: Lease) -> Lease:
        """See `Client.ack`."""
        self._pass_time()
        record = self._fenced(lease)
        self._rules.acknowledge(record)
        return self._show(record)

    async def release(self, lease: Lease) -> None:
        """See `Client.release`."""
        self._pass_time()
        record = self._rules.records.get(lease.id)
        if lease.fence is None or record is None:
            await self.cancel(lease)
        elif record.holds and record.fence == lease.fence:
            self._forget(record.id)
            self._end(record, LeaseState.FREED)

    async def find(self, lease_id: str) -> Lease | None:
        """See `Client.find`."""
        self._pass_time()
        record = self._rules.records.get(lease_id)
        return None if record is None else self._show(record)

    async def snapshot(self) -> Snapshot:
        """See `Client.snapshot`."""
        self._pass_time()
        in_order = [*self._rules.holders(), *self._rules.waiters()]
        return Snapshot(1, self._rules.uses(), tuple(map(self._show, in_order)))

    async def learn(self, profile: str, lease: Lease, size_by_kind: Mapping[str, int]) -> PeakRecord:
        """See `Client.learn`."""
        self._pass_time()
        told = self._learned.setdefault(profile, {})
        told[lease.id] = {
            kind: max(size_by_kind.get(kind, 0), told.get(lease.id, {}).get(kind, 0))
            for kind in {*size_by_kind, *told.get(lease.id, {})}
        }
        return self._record_of(profile)

    async def learned(self) -> tuple[PeakRecord, ...]:
        """See `Client.learned`."""
        self._pass_time()
        return tuple(map(self._record_of, self._learned))

    async def grounds(self, lease_id: str) -> tuple[Ground, ...]:  # noqa: ARG002 (as `Client.grounds`)
        """See `Client.grounds`; nothing is measured here, and no books are kept."""
        return ()

    async def peaks(self) -> Mapping[str, tuple[SharePeak, ...]]:
        """See `Client.peaks`; nothing is measured here."""
        return {}

    async def audit(self) -> list[str]:
        """See `Client.audit`."""
        return list(self._rules.faults())

    async def sweep(self) -> None:
        """See `Client.sweep`; there is nothing to look for."""
        self._pass_time()

    def watch(self) -> LedgerWatch:
        """See `Client.watch`."""
        return LedgerWatch(self._sayings)

    def on_notice(self, lease: Lease, callback: Tell, *, at_once: bool = True) -> None:  # noqa: ARG002 (always is)
        """See `Client.on_notice`."""
        self._on_notice[lease.id] = callback
        if lease.notice is not None:
            callback(lease)

    def on_lost(self, lease: Lease, callback: Tell) -> None:
        """See `Client.on_lost`."""
        self._on_lost[lease.id] = callback

    async def close(self) -> None:
        """Give up what is still waited for."""
        for record in self._rules.waiters():
            if record.owner == self.owner:
                self._end(record, LeaseState.CANCELLED)

    async def __aenter__(self) -> MemoryLedger:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- for tests alone -----------------------------------------------------------------------------------------------

    def end_holder(self, lease: Lease) -> None:
        """Play the death of a lease's holder, as a keeper would find it: a holder is freed, a waiter leaves."""
        record = self._record(lease)
        if record.state not in OVER:
            self._end(record, LeaseState.FREED if record.holds else LeaseState.CANCELLED)

    def use_without_lease(self, device_id: str, size: int) -> None:
        """Play programs without a lease that use so many bytes of a device, instead of those played before."""
        self._rules.foreign[device_id] = size
        self._rules.pump(self.clock.now_s)
        self._settle()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _resize_holder(self, record: Record, options: Sequence[Shares] | None) -> None:
        if options is None:
            return
        if len(options) != 1 or options[0].keys() != record.shares.keys():
            raise ValueError(f"lease {record.id} holds {sorted(record.shares)}: a holder keeps its devices")
        short = self._rules.resize_holder(record, options[0], self.clock.now_s)
        if short:
            why = explain_shortage(
                [
                    {
                        f"{self.node}/{device}": {
                            "wanted": options[0][device], "held": record.shares[device], "free": free
                        }
                        for device, free in short.items()
                    }
                ]
            )  # fmt: skip
            raise errors.LeaseRefused(f"lease {record.id} of {record.request.holder} cannot be given {why}")

    def _record_of(self, profile: str) -> PeakRecord:
        told = self._learned[profile]
        return PeakRecord(profile, len(told), tuple(told.values())[-_MOST_PEAKS:], int(self.clock.now_s * 1000))

    def _pass_time(self) -> None:
        if not self.store_up:
            raise errors.StoreUnavailable("the lease store does not answer: the test has switched it off")
        self._rules.expire(self.clock.now_s)
        self._settle()

    def _end(self, record: Record, state: LeaseState) -> None:
        self._rules.end(record, state, self.clock.now_s)
        self._settle()

    def _settle(self) -> None:
        """Tell everybody what has happened, and come back when time ends something."""
        happened, self._rules.happened = self._rules.happened, []
        for what, lease_id, holder in happened:
            self._sayings.tell(LedgerEvent(what, lease_id, holder, self.node, int(self.clock.now_s * 1000)))
            record = self._rules.records[lease_id]
            if record.state is not LeaseState.QUEUED and (waiting := self._changed.pop(lease_id, None)):
                waiting.set()
            if what in ("notice", "withdrawn") and lease_id in self._on_notice:
                self._on_notice[lease_id](self._show(record))
            if record.state in OVER:
                self._on_notice.pop(lease_id, None)
                if lost := self._on_lost.pop(lease_id, None):
                    lost(self._show(record))
        due_s = self._rules.next_expiry_s()
        if due_s is not None and due_s != self._due_s:
            self._due_s = due_s
            self.clock.at(due_s, self._expire)

    def _expire(self) -> None:
        self._due_s = None
        self._rules.expire(self.clock.now_s)
        self._settle()

    def _forget(self, lease_id: str) -> None:
        self._on_notice.pop(lease_id, None)
        self._on_lost.pop(lease_id, None)

    def _record(self, lease: Lease) -> Record:
        record = self._rules.records.get(lease.id)
        if record is None:
            raise errors.StaleFence(f"lease {lease.id} of {lease.holder} is not known")
        return record

    def _fenced(self, lease: Lease) -> Record:
        record = self._record(lease)
        if not record.holds or lease.fence is None or record.fence != lease.fence:
            raise errors.StaleFence(f"lease {lease.id} of {lease.holder} is {record.state}, or granted anew to another")
        return record

    def _outcome(self, record: Record) -> Lease:
        if record.state in (LeaseState.CANCELLED, LeaseState.FREED):
            raise errors.StaleFence(f"lease {record.id} is {record.state}: ask for a new one under a new request id")
        return self._show(record)

    def _show(self, record: Record) -> Lease:
        return self._rules.show(record, self.clock.now_s)


def _declared(text: str) -> tuple[Device, ...]:
    return tuple(
        Device(
            spec.id,
            spec.kind,
            "simulated device" if spec.kind is DeviceKind.SIM else "host memory",
            index,
            spec.total_bytes,
            spec.reserve_bytes,
            measured=False,
        )
        for index, spec in enumerate(parse_devices(text))
    )
