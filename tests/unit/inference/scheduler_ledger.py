"""The ledger of a scheduler's world: leases of slots and of jobs outside, granted first come, first served in a class.

A blocked one earmarks its first option. A job that is blocked has notice given to slots (docs: gpuboss): to those whose
lease is of its class or a less important one, as few as suffice, and to none if all together do not. A slot that is
queued has notice given to less important jobs that declared that they yield.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from inference import events
from inference.events import DeviceRoom, Shares
from inference.slot_state import SlotState
from tests.unit.inference.scheduler_rules import HELD, Notice, Rules, Slot


@dataclass
class Job:
    """The truth about one holder outside."""

    id: str
    priority: int
    order: int
    option: Shares
    lasts_s: float
    yields: bool
    state: str = "queued"
    """`queued`, `held` or `over`."""
    yields_to: Place | None = None
    """It was told to end for this slot."""


@dataclass
class Place:
    """A slot's lease in the queue."""

    priority: int
    order: float
    slot_id: str
    life: int
    slot: Slot = field(repr=False, default_factory=Slot)

    @property
    def stands(self) -> bool:
        return self.slot.life == self.life and self.slot.state in {SlotState.LOADING, SlotState.QUEUED}


class Leases(Rules):
    """Grants, notices and readings. A world mixes it in and says what time is, and how slots load."""

    rng: random.Random
    calm: bool
    pending: list[Place]
    jobs: dict[str, Job]
    foreign: dict[str, int]
    """In use without a lease, by device."""
    job_gap_s: float | None
    """Seconds between two jobs; None: there are none."""
    coming: dict[str, dict[str, int]]
    """By slot that is queued, what jobs were told to give it, as the scheduler knows."""
    slots_pass: bool
    """May slots be granted what a blocked job has earmarked?"""
    after: Callable[[float, Callable[[], None]], None]
    feed: Callable[[events.Event], None]
    leased: Callable[[str, int], None]
    counts: dict[str, int]
    numbers: Iterator[int]

    # -- jobs -------------------------------------------------------------------------------------------------------

    def a_job_comes(self) -> None:
        if self.calm or self.job_gap_s is None:
            return
        rng = self.rng
        self.after(rng.expovariate(1 / self.job_gap_s), self.a_job_comes)
        devices = rng.sample(self.devices, rng.choice([1, 1, min(2, len(self.devices))]))
        job = Job(
            id=f"j{next(self.numbers)}",
            priority=rng.choice([1, 5, 10, 10, 20, 50]),
            order=next(self.numbers),
            option={device.id: max(1, int(device.capacity_bytes * rng.uniform(0.2, 1.0))) for device in devices},
            lasts_s=rng.expovariate(0.2),
            yields=rng.random() < 0.3,
        )
        self.jobs[job.id] = job
        self.grant_leases()
        if rng.random() < 0.3:
            self.after(rng.expovariate(0.2), lambda: self.job_gives_up(job))

    def job_gives_up(self, job: Job) -> None:
        if job.state == "queued":
            job.state = "over"
            self.withdraw_notices(job.id)
            self.grant_leases()

    def job_ends(self, job: Job) -> None:
        if job.state == "held":
            job.state = "over"
            self.grant_leases()
            if self.rng.random() < 0.3:
                self.read()

    # -- grants -----------------------------------------------------------------------------------------------------

    def grant_leases(self) -> None:
        """First come, first served within a class; a blocked one earmarks its first option."""
        room = self.free()
        by_jobs, by_slots = dict.fromkeys(room, 0), dict.fromkeys(room, 0)
        self.pending = [place for place in self.pending if place.stands]
        queued = [job for job in self.jobs.values() if job.state == "queued"]
        for one in sorted([*self.pending, *queued], key=lambda one: (one.priority, one.order)):
            # Slots may be let past jobs, which they yield to; never past another slot, for they would not yield to it.
            let_past = isinstance(one, Place) and self.slots_pass
            open_room = {device: room[device] - by_slots[device] for device in room}
            if not let_past:
                open_room = _less(open_room, by_jobs)
            options = one.slot.options if isinstance(one, Place) else (one.option,)
            taken = next((o for o in options if all(open_room[device] >= size for device, size in o.items())), None)
            earmarked = by_slots if isinstance(one, Place) else by_jobs
            for device, size in (taken or options[0]).items():
                if taken is None:
                    earmarked[device] += size
                else:
                    room[device] -= size
            if taken is not None and let_past and isinstance(one, Place):
                one.slot.passed = {job.id for job in queued if (job.priority, job.order) < (one.priority, one.order)}
            if taken is not None:
                self.grant(one, taken)
            else:
                self.give_notice(one, options[0], room)

    def grant(self, one: Place | Job, taken: Shares) -> None:
        if isinstance(one, Job):
            one.state = "held"
            self.after(one.lasts_s, lambda: self.job_ends(one))
            self.withdraw_notices(one.id)
            self.counts["job granted"] = self.counts.get("job granted", 0) + 1
            return
        self.pending.remove(one)
        one.slot.leased, one.slot.heard, one.slot.shares = True, False, taken
        self.after(0.0, lambda: self.leased(one.slot_id, one.life))

    def free(self) -> dict[str, int]:
        """Bytes nobody has, by device, whatever the scheduler knows of it."""
        room = {device.id: device.capacity_bytes - self.foreign[device.id] for device in self.devices}
        for shares in (
            *(slot.shares for slot in self.slots.values() if slot.leased),
            *(job.option for job in self.jobs.values() if job.state == "held"),
        ):
            for device, size in shares.items():
                room[device] -= size
        return room

    # -- notices ----------------------------------------------------------------------------------------------------

    def give_notice(self, one: Place | Job, option: Shares, room: dict[str, int]) -> None:
        if isinstance(one, Place):
            self.ask_jobs(one, option, room)
            return
        short = {device: size - room[device] for device, size in option.items()}
        coming = [slot for slot in self.slots.values() if slot.leased and slot.notice and slot.notice.by == one.id]
        willing = [
            (name, slot)
            for name, slot in self.slots.items()
            if slot.leased and slot.lease_class >= one.priority and slot.state in HELD and slot.notice is None
        ]
        chosen: list[tuple[str, Slot]] = []
        for slot in coming:
            short = _less(short, slot.shares)
        for name, slot in sorted(willing, key=lambda found: (-found[1].lease_class, found[0])):
            if all(size <= 0 for size in short.values()):
                break
            if any(short.get(device, 0) > 0 for device in slot.shares):
                chosen.append((name, slot))
                short = _less(short, slot.shares)
        if any(size > 0 for size in short.values()):
            return
        for name, slot in chosen:
            grace_s = self.rng.choice([0.0, 2.0, 30.0])
            outranks = one.priority < slot.lease_class or one.id in slot.passed
            slot.notice = Notice(one.id, one.priority, self.now + grace_s, self.now, outranks)
            self.after(0.0, lambda name=name, notice=slot.notice: self.tell_notice(name, notice))

    def tell_notice(self, name: str, notice: Notice) -> None:
        slot = self.slots[name]
        if slot.notice is not notice:
            return
        slot.notice = notice = replace(notice, told_at=self.now)
        self.demand_told.setdefault(notice.by, self.now)
        self.counts["noticed"] = self.counts.get("noticed", 0) + 1
        told = (notice.by, f"job:{notice.by}", notice.priority, notice.deadline, notice.outranks)
        self.feed(events.Noticed(self.now, name, *told))

    def withdraw_notices(self, by: str) -> None:
        for name, slot in self.slots.items():
            if slot.notice is not None and slot.notice.by == by and not slot.acknowledged:
                slot.notice, slot.withdrawn_at = None, self.now
                self.after(0.0, lambda name=name: self.feed(events.Withdrawn(self.now, name)))

    def ask_jobs(self, place: Place, option: Shares, room: dict[str, int]) -> None:
        """Jobs that declared it end some time after they were asked."""
        short = {device: size - room[device] for device, size in option.items()}
        chosen = []
        for job in self.jobs.values():
            helps = any(short.get(device, 0) > 0 for device in job.option)
            if helps and job.state == "held" and job.yields and job.priority > place.priority and not job.yields_to:
                short = _less(short, job.option)
                chosen.append(job)
        if any(size > 0 for size in short.values()):
            return
        for job in chosen:
            job.yields_to = place
            self.counts["job yields"] = self.counts.get("job yields", 0) + 1
            self.after(self.rng.uniform(0.0, 5.0), lambda job=job: self.job_ends(job))

    # -- readings ---------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """The scheduler gets to know the figures of this moment."""
        held = dict.fromkeys(self.foreign, 0)
        for job in self.jobs.values():
            if job.state == "held":
                for device, size in job.option.items():
                    held[device] += size
        self.devices = [
            replace(device, others_bytes=self.foreign[device.id] + held[device.id], leased_bytes=held[device.id])
            for device in self.devices
        ]
        waiting = frozenset(job.id for job in self.jobs.values() if job.state == "queued")
        self.note_promises(waiting)
        coming: dict[str, dict[str, int]] = {}
        for job in self.jobs.values():
            if job.state == "held" and job.yields_to is not None and job.yields_to.stands:
                slot_id = job.yields_to.slot_id
                coming[slot_id] = _less(coming.get(slot_id, {}), {d: -size for d, size in job.option.items()})
        self.coming = coming
        self.feed(events.DevicesRead(self.now, tuple(self.devices), waiting, coming, self.now))

    def note_promises(self, waiting: frozenset[str]) -> None:
        """What was promised to those who wait no more is free, or theirs."""
        for by in [by for by in self.promised if by not in waiting and self.demand_told.get(by, 0.0) < self.now]:
            del self.promised[by]
        for slot in self.slots.values():
            by = slot.yields_to
            if by is not None and by not in waiting and self.demand_told.get(by, 0.0) < self.now:
                slot.yields_to = None

    def bare(self, devices: list[DeviceRoom]) -> list[DeviceRoom]:
        return [replace(device, others_bytes=0, leased_bytes=0) for device in devices]


def _less(short: dict[str, int], shares: Shares) -> dict[str, int]:
    """Both may be of other devices than the other."""
    return {device: short.get(device, 0) - shares.get(device, 0) for device in {**short, **shares}}
