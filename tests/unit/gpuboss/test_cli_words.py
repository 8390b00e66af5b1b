"""What people are told: why they wait, who holds what, how long ago."""

from __future__ import annotations

import time

import pytest

from gpuboss.cli import words
from gpuboss.cli.run import job_name
from gpuboss.cli.speech import escaped
from gpuboss.devices import Device, DeviceKind
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import (
    DeviceUse,
    Fence,
    ForeignUse,
    HolderKind,
    Lease,
    LeaseState,
    Notice,
    Shares,
    Snapshot,
)

GIB = 1 << 30
GPUS = [Device(f"GPU-{n}", DeviceKind.CUDA, "NVIDIA", n, 24 * GIB, 0, measured=True) for n in range(2)]
SIM = Device("sim0", DeviceKind.SIM, "simulated device", 2, 24 * GIB, 0, measured=False)


def use(device: Device, free: int, **more: object) -> DeviceUse:
    fields = {"claimed_bytes": 0, "observed_bytes": 0, "foreign_bytes": 0, "residual_bytes": 0} | more
    return DeviceUse(device, free_bytes=free * GIB, **fields)  # type: ignore[arg-type]


def lease(holder: str, shares: Shares | None = None, *, position: int | None = None, **more: object) -> Lease:
    fields = {
        "id": f"id-{holder}",
        "request_id": f"id-{holder}",
        "holder": holder,
        "kind": HolderKind.JOB,
        "state": LeaseState.QUEUED if position else LeaseState.ACTIVE,
        "shares": {device: size * GIB for device, size in (shares or {}).items()},
        "priority": 10,
        "fence": None if position else Fence(1, 1),
        "position": position,
        "owner": ProcessIdentity("boot", 7, 1, 1),
        "since_ms": 0,
    }
    return Lease(**fields | more)  # type: ignore[arg-type]


def test_a_waiter_is_told_its_place_the_numbers_and_the_holders() -> None:
    mine = lease("job:late", position=2)
    held = (lease("slot:robin", {"GPU-0": 10}), lease("job:sft-11", {"GPU-0": 8}))
    snapshot = Snapshot(1, (use(GPUS[0], 6),), (*held, lease("job:first", position=1), mine, lease("x", position=3)))
    assert words.waiting(snapshot, mine, [{"GPU-0": 20 * GIB}]) == (
        "position 2 of 3; 20GiB of gpu0 wanted, 6GiB free; held by slot:robin 10GiB, job:sft-11 8GiB"
    )


def test_a_waiter_is_told_that_a_model_in_its_way_is_pinned_and_what_helps() -> None:
    mine, pinned = lease("job:late", position=1), lease("slot:robin", {"GPU-0": 24}, kind=HolderKind.SLOT, priority=0)
    told = words.waiting(Snapshot(1, (use(GPUS[0], 0),), (pinned, mine)), mine, [{"GPU-0": GIB}])
    assert told.endswith("held by slot:robin 24GiB (pinned: unload it, or use --over-pinned)")


def test_where_any_device_would_do_all_are_told_with_their_holders() -> None:
    mine = lease("job:late", position=1)
    held = (lease("job:a", {"GPU-1": 12}), lease("job:b", {"GPU-0": 22}))
    snapshot = Snapshot(1, (use(GPUS[0], 2), use(GPUS[1], 12)), (*held, mine))
    options = [{"GPU-1": 20 * GIB}, {"GPU-0": 20 * GIB}]
    assert words.waiting(snapshot, mine, options) == (
        "position 1 of 1; 20GiB of one of gpu0, gpu1 wanted, at most 12GiB free; held by job:b 22GiB, job:a 12GiB"
    )
    whole = [{"GPU-1": 24 * GIB}, {"GPU-0": 23 * GIB}]
    assert "; one of 23GiB of gpu0 (2GiB free), 24GiB of gpu1 (12GiB free) wanted; held by" in words.waiting(
        snapshot, mine, whole
    )


def test_where_several_of_more_would_do_the_number_is_told() -> None:
    sims = [Device(f"sim{n}", DeviceKind.SIM, "simulated device", n, 24 * GIB, 0, measured=False) for n in range(3)]
    mine = lease("job:late", position=1)
    snapshot = Snapshot(1, tuple(use(sim, free) for sim, free in zip(sims, (8, 0, 2), strict=True)), (mine,))
    options = [dict.fromkeys(pair, 6 * GIB) for pair in (("sim0", "sim2"), ("sim0", "sim1"), ("sim1", "sim2"))]
    said = words.waiting(snapshot, mine, options)
    assert said == "position 1 of 1; 6GiB of each of 2 of sim0, sim1, sim2 wanted, at most 2GiB free on each"


def test_a_gang_is_told_of_each_device() -> None:
    mine = lease("job:late", position=1)
    snapshot = Snapshot(1, (use(GPUS[0], 2), use(GPUS[1], 12)), (mine,))
    said = words.waiting(snapshot, mine, [{"GPU-0": 20 * GIB, "GPU-1": 20 * GIB}])
    assert "20GiB wanted on each of gpu0 (2GiB free) and gpu1 (12GiB free)" in said


def test_who_came_first_is_named_where_there_is_room() -> None:
    mine = lease("job:small", position=2)
    snapshot = Snapshot(1, (use(SIM, 6),), (lease("job:big", position=1), mine))
    said = words.waiting(snapshot, mine, [{"sim0": 2 * GIB}])
    assert said == "position 2 of 2; 2GiB of sim0 wanted, 6GiB free; kept for job:big, who came first"


def test_strangers_leftovers_and_those_who_yield_are_told_apart() -> None:
    mine = lease("job:late", position=1)
    notice = Notice("w", "job:late", 10, 0, 12.3, acknowledged=True)
    shown = use(
        GPUS[0],
        0,
        foreign_bytes=4 * GIB,
        foreign_pids=(ForeignUse(4711, "python", 3 * GIB),),
        residual_bytes=3 * GIB,
        quarantined_bytes=2 * GIB,
    )
    snapshot = Snapshot(1, (shown,), (lease("slot:robin", {"GPU-0": 15}, notice=notice), mine))
    said = words.waiting(snapshot, mine, [{"GPU-0": 20 * GIB}])
    for part in (
        "slot:robin 15GiB (told to yield, 12 s left)",
        "python (4711, no lease) 3GiB",
        "driver did not give back) 2GiB",
        "programs without a lease 1GiB",
        "and 1 other",
    ):
        assert part in said
    alone = words.waiting(Snapshot(1, (use(GPUS[0], 0, residual_bytes=GIB),), (mine,)), mine, [{"GPU-0": 20 * GIB}])
    assert alone.endswith("held by leftovers of holders 1GiB")
    assert words.foreign([shown]) == ["gpu0: python (pid 4711) uses 3GiB without a lease"]


def test_a_crowd_is_counted() -> None:
    mine = lease("job:late", position=1)
    crowd = tuple(lease(f"job:{n}", {"sim0": 10 - n}) for n in range(6))
    said = words.waiting(Snapshot(1, (use(SIM, 0),), (*crowd, mine)), mine, [{"sim0": 20 * GIB}])
    assert said.endswith("job:0 10GiB, job:1 9GiB, job:2 8GiB, job:3 7GiB and 2 others")


def test_who_wants_it_back() -> None:
    told = Notice("w1", "job:sft-12", 1, 0, 59.7, acknowledged=False)
    assert words.notice(told) == "job:sft-12 (urgent) wants this memory back in 60 s"
    assert words.notice(Notice("", "ann", 0, 0, -1.0, acknowledged=False)) == "ann wants this memory back in 0 s"
    assert words.notice(Notice("", "", 0, 0, 5.0, acknowledged=False)) == "a person wants this memory back in 5 s"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "train.py"], "train"),
        (["python3.11", "-u", "/home/ann/jobs/sft.v2.py", "--steps", "9.py"], "sft.v2"),
        (["python", "-m", "trainer.main", "x"], "trainer.main"),
        (["/usr/bin/python3", "-c", "print()"], "python3"),
        (["torchrun", "--nproc", "2", "train.py"], "train"),
        (["bash", "job.sh"], "job"),
        (["./benchmark", "fast.py"], "benchmark"),
        (["./a\nb\x1b[31m" + "c" * 200], "a?b?[31m" + "c" * 92),
    ],
)
def test_a_job_has_a_name_of_its_own(command: list[str], name: str) -> None:
    assert job_name(command) == name


def test_a_name_that_a_stranger_chose_writes_nothing_else_to_the_terminal() -> None:
    mean = use(GPUS[0], 2, foreign_bytes=GIB, foreign_pids=(ForeignUse(7, "a\nb\x1b[31m", GIB),))
    assert words.foreign([mean]) == ["gpu0: a?b?[31m (pid 7) uses 1GiB without a lease"]
    mine = lease("job:late", position=1)
    assert "held by a?b?[31m (7, no lease) 1GiB" in words.waiting(Snapshot(1, (mean,), (mine,)), mine, [{"GPU-0": 9}])
    assert escaped("sh -c a\nb\x1b[2K\u202e日本") == "sh -c a\\nb\\x1b[2K\\u202e日本"


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"GPU-0": 8}, "wants 8GiB"),
        ({"GPU-0": 8, "GPU-1": 8}, "wants 2 x 8GiB"),
        ({"sim0": 8, "GPU-1": 24}, "wants gpu1 24GiB, sim0 8GiB"),
    ],
)
def test_a_waiter_is_shown_with_what_it_wants(wanted: dict[str, int], told: str) -> None:
    late = lease("job:late", position=1, wants={device: size * GIB for device, size in wanted.items()})
    assert words.memory(late, [*GPUS, SIM]) == told


def test_ids_are_as_short_as_tells_them_apart() -> None:
    ids = ["http-render-21", "http-render-22", "http-render-2", "3f2a" * 8, "short"]
    assert words.short_ids(ids) == {
        "http-render-21": "http-render-21",
        "http-render-22": "http-render-22",
        "http-render-2": "http-render-2",
        "3f2a" * 8: "3f2a3f2a3f2a",
        "short": "short",
    }
    assert words.short_ids(["http-render-21-left", "http-render-22-left"] * 2) == {
        "http-render-21-left": "http-render-21",
        "http-render-22-left": "http-render-22",
    }
    assert words.short_ids([]) == {}


def test_shares_and_ages() -> None:
    assert words.memory(lease("job:a", {"sim0": 1, "GPU-1": 2}), [*GPUS, SIM]) == "gpu1 2GiB, sim0 1GiB"
    assert words.memory(lease("job:new", position=1), GPUS) == "-"
    assert words.shares({"GPU-0": 20 * GIB, "GPU-1": 20 * GIB}, GPUS) == "20GiB of gpu0 and gpu1"
    assert words.shares({"sim0": GIB, "GPU-0": 20 * GIB}, [*GPUS, SIM]) == "20GiB of gpu0, 1GiB of sim0"
    tenth = Device("GPU-0a", DeviceKind.CUDA, "NVIDIA", 10, 24 * GIB, 0, measured=True)
    assert words.shares({"GPU-0a": GIB, "GPU-1": GIB, "x": GIB}, [tenth, *GPUS]) == "1GiB of gpu1, gpu10 and x"
    assert [words.duration(s) for s in (-3, 0.4, 59, 61, 7300, 200_000)] == ["0s", "0s", "59s", "1m", "2h", "2d"]
    assert words.ago(int((time.time() - 90) * 1000)) == "1m"
