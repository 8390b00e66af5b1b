"""What `gpuboss run` says of host memory that stands in for a GPU, and of a place in the queue that is lost."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from gpuboss import errors
from gpuboss.cli.asking import lost_place, refuse_what_never_fits, tell_of_host_memory
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


CARDS = [
    Device(f"GPU-{n}", DeviceKind.CUDA, "NVIDIA", n, size * GIB, 0, measured=True) for n, size in enumerate((8, 8, 7))
]


@pytest.mark.parametrize(
    ("devices", "wish", "remedy"),
    [
        (CARDS[:1], {"vram_bytes": 20 * GIB}, "Ask for less"),
        (CARDS, {"vram_bytes": 20 * GIB}, "Ask for less, or spread it over more devices: --gpus 3 --vram 6827MiB"),
        (CARDS, {"vram_bytes": 10 * GIB}, "Ask for less, or spread it over more devices: --gpus 2 --vram 5GiB"),
        (CARDS, {"vram_bytes": 22 * GIB}, "Ask for less"),
        (
            CARDS,
            {"vram_bytes": 9 * GIB, "gpus": 2},
            "Ask for less, or spread it over more devices: --gpus 3 --vram 6GiB",
        ),
        (CARDS, {"vram_bytes": 10 * GIB, "only": ("gpu0",)}, "Ask for less"),
        (CARDS[:1], {"vram_bytes": GIB, "gpus": 2}, "Ask for fewer devices: --gpus 1"),
        (CARDS[:2], {"vram_bytes": None, "gpus": 4}, "Ask for fewer devices: --gpus 2"),
        (CARDS[:1], {"vram_bytes": 9 * GIB, "gpus": 2}, "Ask for less, and for fewer devices: --gpus 1"),
        (
            CARDS,
            {"vram_bytes": GIB, "gpus": 2, "only": ("gpu0",)},
            "Ask for fewer devices: --gpus 1, or name more with --device",
        ),
    ],
)
def test_what_can_never_be_granted_is_refused_with_what_could_be(
    devices: list[Device], wish: dict[str, Any], remedy: str
) -> None:
    client: Any = SimpleNamespace(devices=devices)
    with pytest.raises(errors.LeaseRefused) as refused:
        refuse_what_never_fits(client, Wish("job:a", **wish))
    figures, _, told = refused.value.message.partition(". ")
    assert "GPU-0 can give 8GiB" in figures
    assert told == remedy


def test_what_may_be_granted_is_not_refused_and_a_device_that_is_none_is_named() -> None:
    client: Any = SimpleNamespace(devices=CARDS)
    refuse_what_never_fits(client, Wish("job:a", 7 * GIB, gpus=3))
    with pytest.raises(errors.LeaseRefused, match=r"no device 'gpu7'; it has GPU-0, GPU-1, GPU-2$"):
        refuse_what_never_fits(client, Wish("job:a", GIB, only=("gpu7",)))


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
