"""How leases, devices and the programs beside us look in the control API."""

from __future__ import annotations

from coordinator.api import views
from gpuboss.devices import Device, DeviceKind
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import DeviceUse, Fence, ForeignUse, HolderKind, Lease, LeaseState, Notice, Snapshot
from inference.external import ExternalState, ExternalView

GPU = Device("GPU-6f2a", DeviceKind.CUDA, "H200", 0, 1000, 100, measured=True)
STRANGERS = (ForeignUse(812, "blender", 90), ForeignUse(99, "", None))
USE = DeviceUse(GPU, 200, 150, 90, 7, 603, quarantined_bytes=5, foreign_pids=STRANGERS)
LEASE = Lease(
    id="http-mine",
    request_id="http-mine",
    holder="job:sft",
    kind=HolderKind.JOB,
    state=LeaseState.ACTIVE,
    shares={"GPU-6f2a": 200},
    priority=50,
    fence=Fence(1, 2),
    position=None,
    owner=ProcessIdentity("boot", 1, 1, 1),
    since_ms=0,
    preemptible=True,
    ttl_s=60.0,
    notice=Notice("w", "job:other", 10, 0, 12.3456, acknowledged=False),
)


def test_foreign_processes_are_shown_by_pid_beside_what_is_quarantined():
    [device] = views.devices(Snapshot(1, (USE,), (LEASE,)))["devices"]
    assert device["foreign"] == [
        {"pid": 812, "name": "blender", "bytes": 90},
        {"pid": 99, "name": "", "bytes": None},
    ]
    assert (device["foreign_bytes"], device["quarantined_bytes"]) == (90, 5)


def test_programs_beside_us_are_shown_with_the_devices():
    view = ExternalView("comfyui", ExternalState.HELD, 7, {"GPU-6f2a": 3}, 2, True, "job:sft", None)
    assert views.devices(Snapshot(1, (), ()), [view])["external"] == [
        {
            "name": "comfyui",
            "state": "held",
            "pid": 7,
            "devices": {"GPU-6f2a": 3},
            "used_bytes": 2,
            "busy": True,
            "notice": "job:sft",
            "problem": None,
        }
    ]


def test_a_lease_is_shown_by_the_callers_own_name_with_what_its_program_needs():
    shown = views.lease(LEASE, [GPU])
    assert (shown["id"], shown["request_id"]) == ("http-mine", "mine")
    assert shown["env"] == {"CUDA_VISIBLE_DEVICES": "GPU-6f2a", "GPUBOSS_LEASE": "http-mine"}
    assert shown["priority"] == "batch"
    assert shown["notice"] == {"for": "job:other", "priority": "normal", "left_s": 12.346, "acknowledged": False}
