"""NVIDIA, AMD and Apple devices, against what their drivers were recorded to say. None of these ran on a card."""

from __future__ import annotations

import functools
import os
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpuboss import identity
from gpuboss.devices import DeviceKind, amd, apple, discover, nvml
from gpuboss.devices.cpu import CpuProbe
from gpuboss.errors import DeviceError
from gpuboss.units import GIB, MIB

# --- NVIDIA


@dataclass
class Card:
    """What the driver says about one card; an exception in a place is raised there."""

    uuid: Any
    name: Any = "NVIDIA H200"
    total: Any = 139 * GIB
    used: Any = 700 * MIB
    compute: Any = ()
    graphics: Any = ()
    parts: list[Card] | None = None


@dataclass
class Driver:
    """Stands for the module `pynvml`."""

    cards: list[Card]
    init: Exception | None = None
    started: int = field(default=0)

    NVMLError = type("NVMLError", (Exception,), {})
    NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})
    NVMLError_NotFound = type("NVMLError_NotFound", (NVMLError,), {})
    NVMLError_NoPermission = type("NVMLError_NoPermission", (NVMLError,), {})
    NVMLError_LibraryNotFound = type("NVMLError_LibraryNotFound", (NVMLError,), {})
    NVMLError_DriverNotLoaded = type("NVMLError_DriverNotLoaded", (NVMLError,), {})

    def nvmlInit(self) -> None:
        say(self.init)
        self.started += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> Card:
        return self.cards[number]

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:
        if card.name == "old":
            raise self.NVMLError_NotSupported
        return [1, 1] if card.parts is not None else [0, 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, number: int) -> Card:
        if card.parts is None or number >= len(card.parts):
            raise self.NVMLError_NotFound
        return card.parts[number]

    def nvmlDeviceGetUUID(self, card: Card) -> Any:
        return say(card.uuid)

    def nvmlDeviceGetName(self, card: Card) -> Any:
        return say(card.name)

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:
        return types.SimpleNamespace(total=say(card.total), used=say(card.used))

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> Any:
        return say(card.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: Card) -> Any:
        return say(card.graphics)


def say(recorded: Any) -> Any:
    if isinstance(recorded, Exception):
        raise recorded
    return recorded


def process(pid: int, used: int | None) -> types.SimpleNamespace:
    return types.SimpleNamespace(pid=pid, usedGpuMemory=used)


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if not in a container: there the driver's pids are not ours."""
    monkeypatch.setattr(nvml, "_driver_sees_our_pids", lambda: True)


def cards(*found: Card) -> Any:
    probe = nvml.find(first_index=0, reserve_bytes=512 * MIB, driver=Driver(list(found)))
    assert probe is not None
    return probe


def test_nvidia_cards_are_named_by_uuid_in_the_drivers_order() -> None:
    first, second = cards(Card("GPU-b"), Card(b"GPU-a", name=b"old", total=24 * GIB)).devices()
    assert (first.id, first.kind, first.name, first.index, first.measured) == (
        "GPU-b",
        DeviceKind.CUDA,
        "NVIDIA H200",
        0,
        True,
    )
    assert (first.total_bytes, first.reserve_bytes) == (139 * GIB, 512 * MIB)
    assert (second.id, second.name, second.index, second.total_bytes) == ("GPU-a", "old", 1, 24 * GIB)


def test_nvidia_processes_that_compute_and_draw_are_counted_once() -> None:
    (reading,) = cards(
        Card(
            "GPU-a",
            used=9 * GIB,
            compute=[process(7, 5 * GIB), process(8, GIB)],
            graphics=[process(7, 5 * GIB), process(9, MIB)],
        )
    ).read([7])
    assert reading.used_bytes == 9 * GIB
    assert reading.by_pid == {7: 5 * GIB, 8: GIB, 9: MIB}
    assert reading.complete


def test_nvidia_processes_without_a_figure_are_left_out_and_the_reading_says_so() -> None:
    (reading,) = cards(Card("GPU-a", compute=[process(7, None), process(8, GIB)])).read([])
    assert (reading.by_pid, reading.without_figure) == ({8: GIB}, (7,))
    assert not reading.complete


@pytest.mark.parametrize("why", ["container", "permission"])
def test_nvidia_without_figures_per_process_still_tells_the_whole(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(nvml, "_driver_sees_our_pids", lambda: why != "container")
    compute = Driver.NVMLError_NoPermission("no") if why == "permission" else [process(7, GIB)]
    (reading,) = cards(Card("GPU-a", used=3 * GIB, compute=compute)).read([7])
    assert (reading.used_bytes, reading.by_pid, reading.complete) == (3 * GIB, {}, False)


def test_nvidia_cards_without_graphics_are_read_all_the_same() -> None:
    (reading,) = cards(Card("GPU-a", compute=[process(7, GIB)], graphics=Driver.NVMLError_NotSupported("no"))).read([])
    assert reading.by_pid == {7: GIB}
    assert reading.complete


@pytest.mark.parametrize("total", [Driver.NVMLError_NotSupported("no"), 0])
def test_an_nvidia_processor_that_shares_the_hosts_ram_is_leased_as_cpu(
    total: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (device,) = cards(Card("GPU-spark", total=total), Card("GPU-a")).devices()
    assert (device.id, device.index) == ("GPU-a", 0)
    assert "GPU-spark has no memory of its own" in caplog.text
    assert nvml.find(first_index=0, reserve_bytes=0, driver=Driver([Card("GPU-spark", total=total)])) is None


def test_a_split_nvidia_card_is_its_parts() -> None:
    parts = [Card("MIG-1", total=10 * GIB), Card("MIG-2", total=20 * GIB)]
    found = cards(Card("GPU-a", parts=parts), Card("GPU-b")).devices()
    assert [(device.id, device.index) for device in found] == [("MIG-1", 0), ("MIG-2", 1), ("GPU-b", 2)]


@pytest.mark.parametrize("missing", ["NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"])
def test_a_host_without_an_nvidia_driver_has_no_such_cards(missing: str) -> None:
    driver = Driver([], init=getattr(Driver, missing)("no"))
    assert nvml.find(first_index=0, reserve_bytes=0, driver=driver) is None
    assert nvml.find(first_index=0, reserve_bytes=0, driver=Driver([])) is None


def test_a_broken_nvidia_driver_is_an_error_and_not_a_host_without_cards() -> None:
    with pytest.raises(DeviceError, match=r"does not start \(version mismatch\).*nvidia-smi.*GPUBOSS_DEVICES"):
        nvml.find(first_index=0, reserve_bytes=0, driver=Driver([], init=Driver.NVMLError("version mismatch")))
    lost = Card("GPU-a")
    probe = cards(lost)
    lost.used = Driver.NVMLError("GPU is lost")
    with pytest.raises(DeviceError, match=r"does not answer \(GPU is lost\)"):
        probe.read([])


def test_the_package_for_nvidia_has_every_name_we_use() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name in [name for name in dir(Driver) if name.startswith(("nvml", "NVML"))]:
        assert hasattr(pynvml, name), name


@pytest.mark.parametrize(
    ("namespace", "version", "sees"),
    [
        (0xEFFFFFFC, "Linux version 6.8", True),
        (4026532999, "Linux version 6.8", False),
        (0xEFFFFFFC, "5.15-microsoft-standard-WSL2", False),
    ],
)
def test_the_drivers_pids_are_ours_on_a_host_but_not_in_a_container_or_wsl(
    monkeypatch: pytest.MonkeyPatch, namespace: int, version: str, sees: bool
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(identity, "pid_namespace", lambda: namespace)
    monkeypatch.setattr(Path, "read_text", lambda path, **_: version)
    assert nvml._driver_sees_our_pids() is sees


# --- AMD


@pytest.fixture
def drm(tmp_path: Path) -> Path:
    """A tree as the drivers make it: two AMD cards, a processor's graphics, connectors, and a card of another maker."""
    tree: dict[tuple[str, str], dict[str, object]] = {
        ("card1", "0000:83:00.0"): {
            "mem_info_vram_total": 24 * GIB,
            "mem_info_vram_used": 2 * GIB,
            "unique_id": "8bf1a2c3d4e5f607",
        },
        ("card2", "0000:03:00.0"): {
            "mem_info_vram_total": 16 * GIB,
            "mem_info_vram_used": 0,
            "product_name": "Radeon RX 7800 XT",
        },
        ("card0", "0000:c4:00.0"): {
            "mem_info_vram_total": 512 * MIB,
            "mem_info_vram_used": 64 * MIB,
            "unique_id": "0x0",
        },
        ("card3", "0000:41:00.0"): {"vendor": "0x8086"},
    }
    drm = tmp_path / "class" / "drm"
    for (card, address), files in tree.items():
        device = tmp_path / "devices" / address
        device.mkdir(parents=True)
        for name, content in files.items():
            (device / name).write_text(f"{content}\n")
        for entry in (card, f"{card}-HDMI-A-1"):
            (drm / entry).mkdir(parents=True)
            (drm / entry / "device").symlink_to(device)
    return drm


linux = pytest.mark.skipif(sys.platform != "linux", reason="sysfs is Linux'")


@linux
def test_amd_cards_are_found_in_bus_order_without_built_in_graphics(drm: Path) -> None:
    probe = amd.find(first_index=2, reserve_bytes=MIB, drm=drm)
    assert probe is not None
    first, second = probe.devices()
    assert (first.id, first.name, first.index) == ("PCI-0000:03:00.0", "Radeon RX 7800 XT", 2)
    assert (second.id, second.name, second.index) == ("GPU-8bf1a2c3d4e5f607", "AMD GPU at 0000:83:00.0", 3)
    assert (second.kind, second.total_bytes, second.reserve_bytes, second.measured) == (
        DeviceKind.ROCM,
        24 * GIB,
        MIB,
        True,
    )


@linux
def test_amd_use_is_known_as_a_whole_and_by_nobody(drm: Path) -> None:
    probe = amd.find(first_index=0, reserve_bytes=0, drm=drm)
    assert probe is not None
    assert [(reading.used_bytes, reading.by_pid, reading.complete) for reading in probe.read([os.getpid()])] == [
        (0, {}, False),
        (2 * GIB, {}, False),
    ]


@linux
def test_an_amd_card_that_stops_answering_is_an_error_that_names_its_file(drm: Path) -> None:
    probe = amd.find(first_index=0, reserve_bytes=0, drm=drm)
    assert probe is not None
    (drm / "card1" / "device" / "mem_info_vram_used").write_text("")
    with pytest.raises(DeviceError, match=r"mem_info_vram_used says ''.*GPUBOSS_DEVICES"):
        probe.read([])


@linux
def test_a_host_without_amd_cards_has_none(tmp_path: Path) -> None:
    assert amd.find(first_index=0, reserve_bytes=0, drm=tmp_path / "none") is None
    assert amd.find(first_index=0, reserve_bytes=0, drm=tmp_path) is None


# --- Apple

VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               100000.
Pages active:                             700000.
Pages inactive:                           200000.
Pages speculative:                         50000.
Pages throttled:                               0.
Pages wired down:                         300000.
Pages purgeable:                           12144.
"Translation faults":                  123456789.
File-backed pages:                        300000.
"""
RECORDED: dict[str, str | None] = {
    "sysctl -n hw.memsize": str(32 * GIB) + "\n",
    "sysctl -n hw.optional.arm64": "1\n",
    "sysctl -n machdep.cpu.brand_string": "Apple M3 Max\n",
    "sysctl -n iogpu.wired_limit_mb": "0\n",
    "vm_stat": VM_STAT,
    "ps -o rss= -p 501": "  2048\n",
}
AVAILABLE = (100000 + 50000 + 200000 + 12144) * 16384


def mac(changes: dict[str, str | None] | None = None) -> apple.Runner:
    """A Mac by recorded output; None for a command that fails."""
    recorded = RECORDED | (changes or {})
    return lambda command: recorded.get(" ".join(command))


def test_apples_gpu_gets_the_part_that_metal_recommends_or_the_owner_set() -> None:
    assert apple.working_set_bytes(32 * GIB) == 32 * GIB * 2 // 3
    assert apple.working_set_bytes(64 * GIB) == 48 * GIB
    assert apple.working_set_bytes(32 * GIB, wired_limit_mb=28 * 1024) == 28 * GIB
    assert apple.working_set_bytes(32 * GIB, wired_limit_mb=99 * 1024) == 32 * GIB


def test_apples_memory_is_shared_out_between_gpu_and_cpu_without_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(apple, "find", functools.partial(apple.find, runner=mac()))
    monkeypatch.setattr(nvml, "_pynvml", lambda: None)
    metal, cpu = (device for probe in discover(reserve_bytes=GIB) for device in probe.devices())
    assert (metal.id, metal.kind, metal.name, metal.index) == ("metal", DeviceKind.METAL, "Apple M3 Max", 0)
    assert (cpu.id, cpu.index) == ("cpu", 1)
    assert metal.total_bytes + cpu.total_bytes == 32 * GIB


def test_apples_gpu_is_read_as_a_whole() -> None:
    probe = apple.AppleProbe(index=0, reserve_bytes=0, runner=mac())
    (reading,) = probe.read([501])
    assert reading.used_bytes == 32 * GIB * 2 // 3 - AVAILABLE
    assert (reading.by_pid, reading.complete) == ({}, False)


def test_apples_ram_is_read_per_process() -> None:
    memory = apple.MacMemory(mac(), kept_bytes=21 * GIB)
    assert memory.total_bytes() == 11 * GIB
    assert memory.available_bytes() == AVAILABLE
    assert memory.resident(501) == (2 * MIB, 0)
    assert memory.resident(502) is None
    (reading,) = CpuProbe(memory=memory).read([501, 502])
    assert reading.by_pid == {501: 2 * MIB}


def test_other_machines_have_no_apple_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert apple.find(first_index=0, reserve_bytes=0, runner=mac()) is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert (
        apple.find(first_index=0, reserve_bytes=0, runner=mac({"sysctl -n hw.optional.arm64": None})) is None
    )  # an Intel Mac


def test_a_mac_that_does_not_tell_is_an_error_that_says_how_to_go_on() -> None:
    with pytest.raises(DeviceError, match=r"sysctl hw.memsize says ''.*GPUBOSS_DEVICES"):
        apple.MacMemory(mac({"sysctl -n hw.memsize": None})).total_bytes()
    with pytest.raises(DeviceError, match=r"vm_stat gives no figures"):
        apple.MacMemory(mac({"vm_stat": None})).available_bytes()
