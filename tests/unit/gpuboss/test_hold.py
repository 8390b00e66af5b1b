"""What `hold` understands, and what it shows of a lease, without a ledger."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import gpuboss
from gpuboss.devices import Device, DeviceKind
from gpuboss.held import visible_devices
from gpuboss.leases import HolderKind
from gpuboss.taking import Wish

GIB = 1 << 30
SIM = Device("sim0", DeviceKind.SIM, "simulated", 0, 24 * GIB, 0, measured=False)


def wish(*arguments: Any, **more: Any) -> Wish:
    return gpuboss.hold(*arguments, **more)._wish


def test_sizes_priorities_and_durations_are_read_as_everywhere() -> None:
    found = wish("20GiB", job="sft-12", priority="batch", wait="2h", grace="1m", preemptible=True)
    assert found == Wish("job:sft-12", 20 * GIB, priority=50, preemptible=True, grace_s=60.0, wait_s=7200.0)
    assert wish(GIB, wait=timedelta(minutes=1)).wait_s == 60.0
    assert wish(GIB, wait=0).wait_s == 0.0
    assert wish(GIB).wait_s is None
    assert wish(exclusive=True, gpus=2).vram_bytes is None
    assert gpuboss.hold_async("20GiB", job="sft-12")._wish == wish("20GiB", job="sft-12")


def test_a_holder_has_a_name() -> None:
    assert wish(GIB, job="a").holder == wish(GIB, job="job:a").holder == "job:a"
    assert wish(GIB, name="service:vision").holder == "service:vision"
    assert wish(GIB).holder.startswith("job:")
    assert wish(GIB, name="service:vision").request([SIM]).kind is HolderKind.SERVICE
    assert wish(GIB, job="a").request([SIM]).kind is HolderKind.JOB


def test_a_wish_becomes_a_request() -> None:
    request = wish("2GiB", job="a", priority="high", preemptible=True, grace=5).request([SIM])
    assert request.options == ({"sim0": 2 * GIB},)
    assert (request.priority, request.preemptible, request.grace_s, request.ttl_s) == (5, True, 5.0, None)
    assert str(wish("2GiB", gpus=2, devices=["gpu0", "gpu1"])) == "2GiB of each of 2 devices of gpu0, gpu1"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "say how much memory"),
        ({"vram": GIB, "exclusive": True}, "one of both"),
        ({"vram": "20 gigs"}, 'write it like "20GiB"'),
        ({"vram": 0}, "nothing to hold"),
        ({"vram": GIB, "gpus": 0}, "nothing to hold"),
        ({"vram": GIB, "devices": []}, "nothing to hold"),
        ({"vram": GIB, "devices": "gpu0"}, r"write \['gpu0'\]"),
        ({"vram": GIB, "priority": "middling"}, "one of urgent"),
        ({"vram": GIB, "wait": "soon"}, 'write it like "30s"'),
        ({"vram": GIB, "wait": -1}, "wait: .* out of range"),
        ({"vram": GIB, "wait": timedelta(seconds=-5)}, "wait: .* out of range"),
        ({"vram": GIB, "grace": timedelta(seconds=-5)}, "grace: .* out of range"),
        ({"vram": GIB, "wait": ["1s"]}, "wait: .* not understood"),
        ({"vram": [1]}, "vram: .* not understood"),
        ({"vram": GIB, "gpus": "2"}, "gpus='2' is not"),
        ({"vram": GIB, "gpus": 1.5}, "gpus=1.5 is not"),
        ({"vram": GIB, "gpus": [1]}, r"gpus=\[1\] is not"),
        ({"vram": GIB, "priority": [1]}, r"priority .* is not"),
        ({"vram": GIB, "name": 5}, "name=5 is not"),
        ({"vram": GIB, "job": ["a"]}, r"job=\['a'\] is not"),
        ({"vram": GIB, "devices": 5}, "devices=5 is not"),
        ({"vram": GIB, "devices": [5]}, r"devices=\[5\] is not"),
        ({"vram": GIB, "on_preempt": 5}, "on_preempt=5 is not"),
        ({"vram": GIB, "settings": "here"}, "settings='here' is not"),
        ({"vram": GIB, "job": "a\nb"}, "is no name"),
        ({"vram": GIB, "name": "n" * 201}, "is no name"),
    ],
)
def test_what_is_not_understood_is_said_at_once(arguments: dict[str, Any], told: str) -> None:
    for hold in (gpuboss.hold, gpuboss.hold_async, gpuboss.acquire):
        with pytest.raises(ValueError, match=told):
            hold(**arguments)


async def test_each_kind_of_block_names_the_other() -> None:
    with pytest.raises(TypeError, match=r"async with gpuboss\.hold_async"):
        async with gpuboss.hold("1GiB"):
            pass
    with pytest.raises(TypeError, match=r"`with gpuboss\.hold\("), gpuboss.hold_async("1GiB"):
        pass


def test_children_are_shown_the_devices_of_the_lease_alone() -> None:
    cards = [Device(f"GPU-{name}", DeviceKind.CUDA, "card", n, GIB, 0, True) for n, name in enumerate("ab")]
    assert visible_devices(cards) == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    amd = [Device(f"GPU-{n}", DeviceKind.ROCM, "card", n, GIB, 0, True) for n in (3, 5)]
    assert visible_devices(amd) == {"ROCR_VISIBLE_DEVICES": "GPU-3,GPU-5", "HIP_VISIBLE_DEVICES": "0,1"}
    unnamed = [Device("PCI-0000:03:00.0", DeviceKind.ROCM, "card", 3, GIB, 0, True)]
    assert visible_devices(unnamed) == {"HIP_VISIBLE_DEVICES": "3"}
    assert visible_devices([SIM]) == {}


def test_nothing_happens_before_the_block_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUBOSS_STATE_DIR", "/proc/nowhere")
    gpuboss.hold("20GiB")
    with pytest.raises(gpuboss.StateDirError):
        gpuboss.hold("20GiB").__enter__()
    assert not Path("/proc/nowhere").exists()
