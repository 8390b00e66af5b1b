"""What `gpuboss run` says of host memory that stands in for a GPU, and of a place in the queue that is lost."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from gpuboss import errors
from gpuboss.cli.asking import lost_place, tell_of_host_memory
from gpuboss.cli.progress import Progress
from gpuboss.devices import Device, DeviceKind
from gpuboss.leases import Lease, LeaseState
from gpuboss.taking import Wish
from tests.unit.gpuboss.test_cli_words import lease

GIB = 1 << 30
CPU = Device("cpu", DeviceKind.CPU, "host RAM", 1, 64 * GIB, GIB, measured=True)
GPU = Device("GPU-0", DeviceKind.CUDA, "NVIDIA", 0, 24 * GIB, 0, measured=True)


def said(devices: list[Device], size: int | None, only: tuple[str, ...] | None = None) -> str:
    client: Any = SimpleNamespace(devices=devices)
    stream = io.StringIO()
    progress = Progress(quiet=True, in_foreground=lambda: False, stream=stream)
    tell_of_host_memory(client, Wish("job:a", size, only=only), progress)
    return stream.getvalue()


def test_it_is_told_also_where_nothing_else_is() -> None:
    line = "gpuboss: no GPU was found: {} of host memory (cpu) is leased instead; see gpuboss doctor\n"
    assert said([CPU], GIB) == line.format("1GiB")
    assert said([CPU], None) == line.format("63GiB"), "all of it"


def test_who_named_it_or_has_a_gpu_is_told_nothing() -> None:
    assert said([CPU], GIB, ("cpu",)) == ""
    assert said([GPU, CPU], GIB) == ""


def test_what_can_never_be_granted_is_refused_instead() -> None:
    with pytest.raises(errors.LeaseRefused, match="cpu can give 63GiB"):
        said([CPU], 100 * GIB)


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("expired", "lost its place in the queue: the store had not heard of this host for longer than a lease lives"),
        ("", "was taken out of the queue (gpuboss release)"),
        (None, "was taken out of the queue (gpuboss release)"),
    ],
)
async def test_who_lost_its_place_is_told_whose_doing_it_was(reason: str | None, why: str) -> None:
    async def find(lease_id: str) -> Lease:
        if reason is None:
            raise errors.StoreUnavailable("away")
        return lease("job:w1", id=lease_id, state=LeaseState.CANCELLED, reason=reason)

    client: Any = SimpleNamespace(find=find)
    assert (await lost_place(client, "job:w1", "id")).message == f"job:w1 {why}"
    assert "gpuboss release" in (await lost_place(client, "job:w1", None)).message, "so soon it was no clock"
