"""`gpuboss devices` and `ps`: who uses a device, with and without a lease, is shown by pid, and counted."""

from __future__ import annotations

import json
import re
from argparse import Namespace

import pytest

from gpuboss.cli import views
from gpuboss.cli.events import line_of
from gpuboss.devices import Device, DeviceKind
from gpuboss.leases import DeviceUse, ForeignUse, Snapshot
from gpuboss.watching import LedgerEvent
from tests.unit.gpuboss.test_cli_words import lease

GIB = 1 << 30
GPU = Device("GPU-6f2a", DeviceKind.CUDA, "H200", 0, 40 * GIB, GIB, measured=True)
STRANGERS = (ForeignUse(812, "blender", 9 * GIB), ForeignUse(99, "", None))
USE = DeviceUse(GPU, 20 * GIB, 15 * GIB, 9 * GIB, 0, 10 * GIB, foreign_pids=STRANGERS)
SIM = Device("sim0", DeviceKind.SIM, "simulated device", 1, 8 * GIB, 0, measured=False)
LEASES = (
    lease("service:comfyui", {"sim0": 8, "GPU-6f2a": 12}),
    lease("job:word", {"GPU-6f2a": 4}),
    lease("job:granted", {"GPU-6f2a": 4}),
    lease("job:late", position=1, wants={"GPU-6f2a": 4 * GIB}),
    lease("job:render", {"GPU-6f2a": 1}, id="http-render-21"),
    lease("job:render", {"GPU-6f2a": 1}, id="http-render-22"),
)
PIDS = {"id-service:comfyui": 4711, "id-job:word": None}
"""As the node's books have them; all leases were asked for by process 7."""


@pytest.fixture(autouse=True)
def looked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(told: Namespace) -> tuple[Snapshot, views.Pids]:
        return Snapshot(1, (USE, DeviceUse(SIM, 0, None, 0, 0, 8 * GIB)), LEASES), PIDS

    monkeypatch.setattr(views, "_look", look)


def test_strangers_are_shown_by_pid_with_what_to_do_about_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert views.devices(Namespace(json=False)) == 0
    shown = capsys.readouterr().out
    assert "gpu0: blender (pid 812) uses 9GiB without a lease" in shown
    assert "gpu0: a process (pid 99) uses an unknown amount without a lease" in shown
    assert "`gpuboss adopt --pid PID`" in shown
    header, row, _ = (re.split(r"\t|  +", line) for line in shown.splitlines()[:3])
    assert row[header.index("OTHERS")] == "9GiB"


def test_programs_get_the_same_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert views.devices(Namespace(json=True)) == 0
    device, _ = json.loads(capsys.readouterr().out)
    assert device["foreign_bytes"] == 9 * GIB
    assert device["foreign_pids"] == [
        {"pid": 812, "name": "blender", "bytes": 9 * GIB},
        {"pid": 99, "name": "", "bytes": None},
    ]


def test_a_lease_is_shown_with_the_process_whose_memory_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert views.ps(Namespace(json=False)) == 0
    header, *rows = (re.split(r"  +", line) for line in capsys.readouterr().out.splitlines())
    pids = {row[header.index("HOLDER")]: row[header.index("PID")] for row in rows}
    assert pids == {
        "service:comfyui": "4711",
        "job:word": "-",
        "job:granted": "7",
        "job:late": "7",
        "job:render": "7",
    }
    assert rows[0][header.index("MEMORY")] == "gpu0 12GiB, sim0 8GiB", "in the order of the devices"
    assert rows[3][header.index("MEMORY")] == "wants 4GiB"
    assert views.ps(Namespace(json=True)) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [found["pid"] for found in shown] == [4711, None, 7, 7, 7, 7]
    assert [found["wants"] for found in shown] == [{}, {}, {}, {"GPU-6f2a": 4 * GIB}, {}, {}]


def test_leases_whose_ids_begin_alike_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert views.ps(Namespace(json=False)) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert shown[1] == "id-service:c", "no longer than it has to be"
    assert shown[-2:] == ["http-render-21", "http-render-22"]


def test_an_event_names_its_lease_in_full() -> None:
    line = line_of(LedgerEvent("granted", "http-render-21", "job:render", "node", 1000))
    assert line.split()[1:] == ["granted", "http-render-21", "job:render"]
