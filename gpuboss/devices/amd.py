"""AMD cards through sysfs: their memory as a whole, without figures per process.

Called by `discover`. Only tested against recorded sysfs trees, never on a card.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from gpuboss.devices import Device, DeviceKind, Probe, Reading
from gpuboss.errors import DeviceError
from gpuboss.units import GIB

_SMALLEST_BYTES = GIB
"""Less is the window of a processor's built-in graphics, whose real memory is the host's."""


class AmdProbe:
    """The cards of this host, in the order of their places on the bus."""

    def __init__(self, cards: Sequence[Path], *, first_index: int, reserve_bytes: int) -> None:
        self._cards = [(card, _device(card, first_index + n, reserve_bytes)) for n, card in enumerate(cards)]

    def devices(self) -> Sequence[Device]:
        """The cards by their unique id, or their place on the bus where they have none."""
        return tuple(device for _, device in self._cards)

    def read(self, pids: Collection[int]) -> Sequence[Reading]:  # noqa: ARG002 (no figures per process)
        """What all processes use of each card."""
        return [
            Reading(device.id, _number(card / "mem_info_vram_used"), {}, time.monotonic(), complete=False)
            for card, device in self._cards
        ]


def find(*, first_index: int, reserve_bytes: int, drm: Path = Path("/sys/class/drm")) -> Probe | None:
    """The AMD cards of this host; None when there are none."""
    if sys.platform != "linux" or not drm.is_dir():
        return None
    cards = [
        entry / "device"
        for entry in drm.iterdir()
        if re.fullmatch(r"card\d+", entry.name) and (entry / "device" / "mem_info_vram_total").is_file()
    ]
    cards = [card for card in cards if _number(card / "mem_info_vram_total") >= _SMALLEST_BYTES]
    cards.sort(key=lambda card: card.resolve().name)
    return AmdProbe(cards, first_index=first_index, reserve_bytes=reserve_bytes) if cards else None


def _device(card: Path, index: int, reserve_bytes: int) -> Device:
    address = card.resolve().name
    unique = _text(card / "unique_id").removeprefix("0x")
    # ROCm names a card "GPU-" and its unique id; ROCR_VISIBLE_DEVICES takes that name.
    name = f"GPU-{unique}" if unique.strip("0") else f"PCI-{address}"
    product = _text(card / "product_name") or f"AMD GPU at {address}"
    return Device(
        name, DeviceKind.ROCM, product, index, _number(card / "mem_info_vram_total"), reserve_bytes, measured=True
    )


def _number(path: Path) -> int:
    text = _text(path)
    if not text.isdigit():
        raise DeviceError(f"{path} says {text!r}: declare devices (GPUBOSS_DEVICES) to go on without this card")
    return int(text)


def _text(path: Path) -> str:
    """The file's text, bare; empty when the driver does not offer it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
