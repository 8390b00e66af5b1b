"""The rules of a ledger in plain Python, without a store, a keeper or files.

Called by `gpuboss.testing.MemoryLedger`. Written a second time and not shared with the store's scripts, so that each
can be held against the other: `tests/contract/test_ledgers.py` runs both. One node, one thread, time as an argument.
The numbers at the branches:

1. Waiters are served by priority, then by order; the first option that fits is granted, on all its devices or none.
2. One that must wait has holders told to yield, if that helps: the fewest, least important first, slots before jobs,
   youngest first. Else it marks the devices of its best option, where only pre-emptible ones are let past it.
3. A notice is taken back when nobody waits for it any more, unless it was acknowledged.
4. A lease with a time to live is freed when it is not renewed; no other is freed by time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuboss.devices import Device
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import (
    HOLDS_MEMORY,
    OVER,
    DeviceUse,
    Fence,
    HolderKind,
    Lease,
    LeaseRequest,
    LeaseState,
    Notice,
    Shares,
)

__all__ = ["Happened", "Record", "Rules"]

Happened = tuple[str, str, str]
"""What, lease id, holder."""


@dataclass(slots=True)
class Record:
    """One lease."""

    request: LeaseRequest
    owner: ProcessIdentity
    order: int
    state: LeaseState
    since_s: float
    options: tuple[Shares, ...]
    priority: int
    shares: dict[str, int] = field(default_factory=dict)
    fence: Fence | None = None
    revision: int = 0
    why: Sequence[Mapping[str, Mapping[str, int]]] = ()
    reason: str = ""
    renewed_s: float = 0.0
    notice: Notice | None = None
    notice_s: float = 0.0
    notice_grace_s: float = 0.0
    target: Shares | None = None
    """Waiting: the option that is being emptied for it."""

    @property
    def id(self) -> str:
        """The lease's."""
        return self.request.request_id

    @property
    def holds(self) -> bool:
        """Whether it counts against its devices."""
        return self.state in HOLDS_MEMORY

    @property
    def yields(self) -> bool:
        """Whether a more important waiter may have it."""
        return self.request.preemptible or self.request.kind is HolderKind.SLOT

    @property
    def place(self) -> tuple[int, int]:
        """Lower is more important."""
        return self.priority, self.order


@dataclass(slots=True)
class _Mark:
    """A waiter that must wait wants this device."""

    by: Record
    lets_past: bool
    """Nothing can be done for it yet: those that would yield to it may use the device meanwhile."""


class Rules:
    """The books of one node."""

    def __init__(self, devices: Sequence[Device], node: str) -> None:
        self.devices = tuple(devices)
        self.node = node
        self.foreign: dict[str, int] = {}
        self.records: dict[str, Record] = {}
        """Every lease there ever was."""
        self.happened: list[Happened] = []
        """What the caller has not told anybody yet."""
        self._caps = {device.id: device.total_bytes - device.reserve_bytes for device in devices}
        self._live: dict[str, Record] = {}
        """Those that are not over."""
        self._seq = 0
        self._order = 0

    # -- looking -------------------------------------------------------------------------------------------------------

    def waiters(self) -> list[Record]:
        """In the order in which they are served."""
        waiting = [record for record in self._live.values() if record.state is LeaseState.QUEUED]
        return sorted(waiting, key=lambda record: record.place)

    def holders(self) -> list[Record]:
        """In no order."""
        return [record for record in self._live.values() if record.holds]

    def show(self, record: Record, now_s: float) -> Lease:
        """As a client sees it."""
        position = self.waiters().index(record) + 1 if record.state is LeaseState.QUEUED else None
        return Lease(
            record.id,
            record.id,
            record.request.holder,
            record.request.kind,
            record.state,
            dict(record.shares),
            record.priority,
            record.fence,
            position,
            record.owner,
            int(record.since_s * 1000),
            preemptible=record.yields,
            grace_s=record.request.grace_s,
            ttl_s=record.request.ttl_s,
            order=record.order,
            notice=self._shown_notice(record, now_s),
            node=self.node,
            revision=record.revision,
            reason=record.reason,
            wants=dict(record.options[0]) if record.state is LeaseState.QUEUED else {},
        )

    def uses(self) -> tuple[DeviceUse, ...]:
        """Of every device, in their order."""
        free, claimed = self._free(), self._claimed()
        return tuple(
            DeviceUse(
                device,
                claimed_bytes=claimed[device.id],
                observed_bytes=None,
                foreign_bytes=self.foreign.get(device.id, 0),
                residual_bytes=0,
                free_bytes=free[device.id],
            )
            for device in self.devices
        )

    def shortage(self, options: Iterable[Shares]) -> list[dict[str, dict[str, int]]]:
        """Per option and device what is wanted and what could be had at most."""
        totals = {device.id: device.total_bytes for device in self.devices}
        found = []
        for option in options:
            needs = {}
            for device, size in option.items():
                known = {"cap": self._caps[device], "total": totals[device]} if device in totals else {}
                needs[f"{self.node}/{device}"] = {"wanted": size, **known}
            found.append(needs)
        return found

    def could_ever_fit(self, option: Shares) -> bool:
        """Whether the empty devices had room."""
        return all(size <= self._caps.get(device, 0) for device, size in option.items())

    def room_for(self, record: Record) -> dict[str, int]:
        """Device -> what is free there for a holder that is about to use it, by what is in use already."""
        in_use = Counter(self.foreign)
        for other in self.holders():
            if other is not record and other.state is LeaseState.ACTIVE:
                in_use.update(other.shares)
        return {
            device: self._caps[device] - in_use[device] + min(self.foreign.get(device, 0), adopted)
            for device in record.shares
            for adopted in [record.request.adopts.get(device, 0)]
        }

    # -- changing ------------------------------------------------------------------------------------------------------

    def ask(self, request: LeaseRequest, owner: ProcessIdentity, order: int | None, now_s: float) -> Record:
        """Queue it, and grant what can be granted. The options could fit."""
        self._order = max(self._order + 1, int(now_s * 1000))
        record = Record(
            request,
            owner,
            self._order if order is None else order,
            LeaseState.QUEUED,
            now_s,
            request.options,
            request.priority,
        )
        self.records[record.id] = self._live[record.id] = record
        self.pump(now_s)
        if record.state is LeaseState.QUEUED:
            self._say("queued", record)
        return record

    def enter(self, record: Record, now_s: float) -> None:
        """Its holder uses it from now on; what it used before is foreign no more."""
        if record.state is LeaseState.GRANTED:
            for device, size in record.request.adopts.items():
                moved = min(size, self.foreign.get(device, 0), record.shares.get(device, 0))
                self.foreign[device] = self.foreign.get(device, 0) - moved
            self._set_state(record, LeaseState.ACTIVE, now_s)
            record.renewed_s = now_s

    def end(self, record: Record, state: LeaseState, now_s: float, reason: str = "") -> None:
        """It is over."""
        record.reason = reason
        record.notice = None
        self._set_state(record, state, now_s)
        self.pump(now_s)

    def renew(self, record: Record, now_s: float) -> None:
        """Its holder lives."""
        record.renewed_s = now_s

    def resize_holder(self, record: Record, shares: Shares, now_s: float) -> dict[str, int]:
        """Change what it holds; what is free for it on each device where it does not fit, else nothing."""
        marks = self.pump(now_s)
        free = self._free()
        short = {}
        for device, size in shares.items():
            more = size - record.shares[device]
            mark = marks.get(device)
            kept = mark is not None and mark.by.priority <= record.priority and not self._may_enter(mark, record)
            if more > 0 and (kept or more > free[device]):
                short[device] = 0 if kept else max(0, free[device])
        if not short:
            record.revision += dict(shares) != record.shares
            record.shares = dict(shares)
            self.pump(now_s)
        return short

    def tell(self, record: Record, by: Record | str, now_s: float, grace_s: float | None = None) -> None:
        """Give a holder notice: for a waiter, or for a person by this name."""
        outranks = isinstance(by, str) or by.place < record.place
        old = record.notice
        if old is None or (outranks and not old.outranks):
            record.notice_s = now_s
            record.notice_grace_s = record.request.grace_s if grace_s is None else grace_s
            self._say("notice", record)
        elif grace_s is not None:
            record.notice_grace_s = min(record.notice_grace_s, now_s + grace_s - record.notice_s)
        acknowledged = old is not None and old.acknowledged and (old.outranks or not outranks)
        record.notice = Notice(
            by="" if isinstance(by, str) else by.id,
            holder=by if isinstance(by, str) else by.request.holder,
            priority=0 if isinstance(by, str) else by.priority,
            since_ms=int(record.notice_s * 1000),
            left_s=0.0,
            acknowledged=acknowledged,
            outranks=outranks,
        )

    def acknowledge(self, record: Record) -> None:
        """A holder has heard its notice."""
        told = record.notice
        if told is not None:
            record.notice = replace(told, acknowledged=True)

    def expire(self, now_s: float) -> None:
        """Case 4. A holder by word that was told to yield gets no longer than its grace."""
        for record in self.holders():
            expiry_s, reason = _expiry(record)
            if now_s >= expiry_s:
                self.end(record, LeaseState.FREED, now_s, reason)

    def next_expiry_s(self) -> float | None:
        """When time will end the next lease; None when it will end none."""
        moments = [_expiry(record)[0] for record in self.holders()]
        return min((moment for moment in moments if moment < math.inf), default=None)

    def pump(self, now_s: float) -> dict[str, _Mark]:
        """Grant and make room, case 1 to 3; the devices that waiters want in the end."""
        marks: dict[str, _Mark] = {}
        spoken: Counter[str] = Counter()
        free = self._free()
        for waiter in self.waiters():
            fitting = next((option for option in waiter.options if self._fits(waiter, option, marks, free)), None)
            if fitting is not None:
                self._grant(waiter, fitting, now_s)
                free = self._free()
            else:
                self._make_room(waiter, marks, spoken, free, now_s)
        self._withdraw()
        return marks

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _grant(self, waiter: Record, option: Shares, now_s: float) -> None:
        self._seq += 1
        waiter.shares, waiter.fence, waiter.target = dict(option), Fence(1, self._seq), None
        waiter.renewed_s = now_s
        self._set_state(waiter, LeaseState.GRANTED, now_s)

    def _fits(self, waiter: Record, option: Shares, marks: Mapping[str, _Mark], free: Mapping[str, int]) -> bool:
        return self.could_ever_fit(option) and all(
            self._wanted(waiter, device, size) <= free[device]
            and (device not in marks or self._may_enter(marks[device], waiter))
            for device, size in option.items()
        )

    def _make_room(
        self,
        waiter: Record,
        marks: dict[str, _Mark],
        spoken: Counter[str],
        free: Mapping[str, int],
        now_s: float,
    ) -> None:
        """Case 2; an option that is being emptied for it already comes first."""
        options = [option for option in waiter.options if self.could_ever_fit(option)]
        options.sort(key=lambda option: option is not waiter.target)
        for option in options:
            victims = self._victims(waiter, option, marks, spoken, free)
            if victims is None:
                continue
            for holder in victims:
                self.tell(holder, waiter, now_s)
            waiter.target = option
            for device, size in option.items():
                marks.setdefault(device, _Mark(waiter, lets_past=False)).lets_past = False
                spoken[device] += self._wanted(waiter, device, size)
            return
        for device in options[0] if options else ():
            marks.setdefault(device, _Mark(waiter, lets_past=True))

    def _victims(
        self,
        waiter: Record,
        option: Shares,
        marks: Mapping[str, _Mark],
        spoken: Mapping[str, int],
        free: Mapping[str, int],
    ) -> list[Record] | None:
        """Whom to tell; nobody where enough is coming; None where telling all is not enough."""
        if any(device in marks and not self._may_empty(marks[device], waiter) for device in option):
            return None
        lacking = Counter({device: self._wanted(waiter, device, size) for device, size in option.items()})
        lacking.subtract({device: free[device] - spoken.get(device, 0) for device in option})
        coming = [holder for holder in self.holders() if self._is_coming(holder, waiter)]
        for holder in coming:
            _take_off(lacking, holder.shares)
        chosen: list[Record] = []
        candidates = [holder for holder in self.holders() if holder not in coming and self._may_have(waiter, holder)]
        for holder in sorted(candidates, key=_told_first):
            if any(lacking[device] > 0 for device in option if device in holder.shares):
                chosen.append(holder)
                _take_off(lacking, holder.shares)
        if any(lacking[device] > 0 for device in option):
            return None
        for holder in reversed(chosen[:]):
            if all(lacking[device] + holder.shares.get(device, 0) <= 0 for device in option):
                chosen.remove(holder)
                _take_off(lacking, holder.shares, -1)
        return chosen

    def _withdraw(self) -> None:
        """Case 3."""
        for record in self.holders():
            notice = record.notice
            if notice is None or notice.by == "" or notice.acknowledged:
                continue
            waiter = self.records.get(notice.by)
            if waiter is None or waiter.state is not LeaseState.QUEUED:
                record.notice = None
                self._say("withdrawn", record)

    def _is_coming(self, holder: Record, waiter: Record) -> bool:
        """Whether its memory is counted on: it was told, for this waiter or one before it, or yields in any case."""
        notice = holder.notice
        if notice is None:
            return False
        by = self.records.get(notice.by)
        return notice.acknowledged or by is None or by is waiter or by.place <= waiter.place

    @staticmethod
    def _may_have(waiter: Record, holder: Record) -> bool:
        if holder.request.kind is HolderKind.SLOT:
            return holder.priority >= waiter.priority and not _are_siblings(waiter, holder)
        return holder.yields and waiter.place < holder.place

    @staticmethod
    def _may_enter(mark: _Mark, waiter: Record) -> bool:
        return mark.lets_past and waiter.yields and not _are_siblings(mark.by, waiter)

    def _may_empty(self, mark: _Mark, waiter: Record) -> bool:
        return not mark.lets_past or self._may_enter(mark, waiter)

    def _wanted(self, waiter: Record, device: str, size: int) -> int:
        adopted = min(waiter.request.adopts.get(device, 0), size, self.foreign.get(device, 0))
        return size - adopted

    def _claimed(self) -> Counter[str]:
        claimed: Counter[str] = Counter()
        for record in self.holders():
            claimed.update(record.shares)
        return claimed

    def _free(self) -> dict[str, int]:
        claimed = self._claimed()
        for record in self.holders():
            if record.state is LeaseState.GRANTED:  # what it adopts is foreign until it is active
                for device, size in record.shares.items():
                    claimed[device] -= size - self._wanted(record, device, size)
        return {device: cap - self.foreign.get(device, 0) - claimed[device] for device, cap in self._caps.items()}

    def _shown_notice(self, record: Record, now_s: float) -> Notice | None:
        if record.notice is None:
            return None
        return replace(record.notice, left_s=record.notice_s + record.notice_grace_s - now_s)

    def _set_state(self, record: Record, state: LeaseState, now_s: float) -> None:
        record.state, record.since_s = state, now_s
        if state in OVER:
            self._live.pop(record.id, None)
        self._say(state.value, record)

    def _say(self, what: str, record: Record) -> None:
        self.happened.append((what, record.id, record.request.holder))

    def faults(self) -> Iterator[str]:
        """What must never be."""
        fences = Counter(record.fence for record in self.records.values() if record.fence is not None)
        for fence, count in fences.items():
            if count > 1:
                yield f"{count} leases have the fence {fence}"
        claimed = self._claimed()
        for device, cap in self._caps.items():
            if claimed[device] > cap:
                yield f"{claimed[device]} of {cap} bytes of {device} are claimed"
        for record in self.records.values():
            if record.state in OVER and record.notice is not None:
                yield f"lease {record.id} is {record.state} and shall yield"


def _take_off(lacking: Counter[str], shares: Shares, times: int = 1) -> None:
    for device, size in shares.items():
        if device in lacking:
            lacking[device] -= times * size


def _expiry(record: Record) -> tuple[float, str]:
    """When a lease ends by time, and why then."""
    if record.request.ttl_s is None:
        return math.inf, ""
    expiry_s = record.renewed_s + record.request.ttl_s
    grace_s = record.notice_s + record.notice_grace_s
    if record.notice is not None and record.notice.outranks and grace_s <= expiry_s:
        return grace_s, "preempted"
    return expiry_s, "expired"


def _told_first(holder: Record) -> tuple[int, bool, int]:
    return -holder.priority, holder.request.kind is not HolderKind.SLOT, -holder.order


def _are_siblings(one: Record, other: Record) -> bool:
    """Slots of one owner: between them their broker decides."""
    both = one.request.kind is HolderKind.SLOT and other.request.kind is HolderKind.SLOT
    return both and one.owner == other.owner
