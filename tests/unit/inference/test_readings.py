"""What of the ledger is ours, and what the scheduler is told of the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuboss.devices import Device, DeviceKind
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import DeviceUse, Fence, HolderKind, Lease, LeaseState, Notice, Snapshot
from inference.readings import read

US = ProcessIdentity("boot", 10, 1, 1)
THEM = ProcessIdentity("boot", 20, 1, 1)
GPU = DeviceUse(Device("gpu", DeviceKind.CUDA, "gpu", 0, 1000, 100, measured=True), 0, None, 30, 7, 0)


def a_lease(kind: HolderKind = HolderKind.JOB, owner: ProcessIdentity = THEM, **changes: object) -> Lease:
    lease = Lease(*("one", "one", f"{kind}:x", kind, LeaseState.ACTIVE, {"gpu": 200}, 10, Fence(1, 1), None, owner, 0))
    return replace(lease, **changes)  # type: ignore[arg-type] # names of fields


def told(*leases: Lease, queued: dict[str, str] | None = None):  # type: ignore[no-untyped-def] # events.DevicesRead
    snapshot = Snapshot(1, (GPU,), leases)
    return read(snapshot, owner=US, queued=queued or {}, asked_at_s=1.0, at_s=2.0)


def test_a_device_without_leases_is_told_with_foreign_use_and_what_did_not_come_back():
    event = told()
    [room] = event.devices
    assert (room.id, room.capacity_bytes, room.others_bytes, room.leased_bytes) == ("gpu", 900, 37, 0)
    assert room.accelerator
    assert (event.at_s, event.asked_at_s) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("lease", "others"),
    [
        (a_lease(HolderKind.SLOT, US), 0),
        (a_lease(HolderKind.SLOT, THEM), 200),
        (a_lease(HolderKind.JOB, THEM), 200),
        # Asked for over HTTP: this process asked, and somebody else uses it.
        (a_lease(HolderKind.JOB, US), 200),
        (a_lease(HolderKind.SERVICE, US), 200),
        (a_lease(state=LeaseState.ENDING), 200),
        (a_lease(state=LeaseState.GRANTED), 200),
        (a_lease(state=LeaseState.QUEUED, shares={}), 0),
    ],
)
def test_everything_but_our_own_slots_is_others(lease: Lease, others: int):
    [room] = told(lease).devices
    assert (room.others_bytes, room.leased_bytes) == (37 + others, others)


def test_what_holders_use_beyond_their_claims_is_nobodys_room():
    gpu = replace(GPU, claimed_bytes=200, observed_bytes=260)
    [room] = read(
        Snapshot(1, (gpu,), (a_lease(HolderKind.SLOT, US),)), owner=US, queued={}, asked_at_s=1.0, at_s=2.0
    ).devices
    assert room.others_bytes == 37 + 60


def test_others_who_wait_are_named_and_our_own_waiters_are_not():
    theirs = a_lease(id="theirs", state=LeaseState.QUEUED, shares={})
    ours = a_lease(HolderKind.SLOT, US, id="ours", state=LeaseState.QUEUED, shares={})
    assert told(theirs, ours).waiting == {"theirs"}


def test_what_others_are_told_to_yield_to_our_waiting_slots_is_told_by_model():
    notice = Notice("ours", "slot:robin", 5, 0, 30.0, acknowledged=False)
    first = a_lease(id="a", notice=notice)
    second = a_lease(id="b", notice=notice, shares={"gpu": 50})
    other = a_lease(id="c", notice=replace(notice, by="elsewhere"))
    assert told(first, second, other, queued={"ours": "robin"}).coming == {"robin": {"gpu": 250}}
