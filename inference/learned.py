"""What models were really seen to take, and from then on claim: told to the ledger, read back at the next start.

Started by the broker beside `pool.py`, which says what serves (`serving`) and hears when claims have changed. Calls the
ledger (what its books saw of each lease) and `registry.py` (which makes the models anew; the next load claims it).

A peak counts once its devices were read after the engine was ready, so that no half-loaded engine passes for a small
one, and only where a driver measures: of `sim` devices nothing is learned. What accelerators of a lease showed is added
up; host memory beside them stands for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from gpuboss.devices import Device, DeviceKind
from gpuboss.errors import GpubossError
from gpuboss.leases import Lease
from gpuboss.ledger_rows import SharePeak
from gpuboss.peaks import PeakRecord
from inference.estimate import Peak
from inference.model import Model
from inference.profile import profile_of
from inference.registry import Registry

__all__ = ["Learned", "PeakLedger", "Serving", "peak_of"]

LOOK_S = 2.0
"""Between two looks at the books; the keeper reads the devices about as often."""
_NEWS_PART = 0.01
"""Figures that differ by less are the same: no engine takes the same to the byte each time."""
_HOST = "host"
"""What host memory beside accelerators is called in a record."""

_log = structlog.get_logger(__name__)


class PeakLedger(Protocol):
    """What is needed of the ledger; `gpuboss.client.Client` is the real one, which says what raises what."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of this node."""

    async def peaks(self) -> Mapping[str, tuple[SharePeak, ...]]:
        """By lease, the most its living holder was seen to use."""

    async def learn(self, profile: str, lease: Lease, size_by_kind: Mapping[str, int]) -> PeakRecord:
        """Keep what a holder took."""

    async def learned(self) -> tuple[PeakRecord, ...]:
        """All that is kept."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A slot that is ready."""

    model: Model
    """As it was loaded."""
    lease: Lease
    ready_at_s: float
    """Monotonic."""


class Learned:
    """See the module. Belongs to one event loop."""

    def __init__(self, ledger: PeakLedger, registry: Registry) -> None:
        self._ledger = ledger
        self._registry = registry
        self._kinds = {device.id: device.kind for device in ledger.devices}
        self._peaks: dict[str, Peak] = {}
        """By profile."""
        self._told: dict[str, Mapping[str, int]] = {}
        """By lease that serves, what was told of it."""

    async def startup(self) -> None:
        """Have the registry rest its claims on what earlier brokers saw. Raises StoreUnavailable."""
        for record in await self._ledger.learned():
            self._note(record)
        if self._peaks:
            await asyncio.to_thread(self._registry.learn, dict(self._peaks))

    async def main_loop(self, serving: Callable[[], Iterable[Serving]], changed: Callable[[], None]) -> None:
        """Look every 2 s; `changed` is called in the loop when claims of models have changed. Until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if await self.look(tuple(serving())):
                    changed()
            except GpubossError as error:
                _log.warning("peaks_not_learned", error=str(error))

    async def look(self, serving: Sequence[Serving]) -> bool:
        """Tell what is new of those that serve; True when the registry has made models anew. Raises GpubossError."""
        self._told = {lease_id: told for lease_id, told in self._told.items() if _is_among(lease_id, serving)}
        if not serving:
            return False
        found, before = await self._ledger.peaks(), dict(self._peaks)
        for slot in serving:
            seen = peak_of(slot, found.get(slot.lease.id, ()), self._kinds)
            if seen is None or not _is_news(seen, self._told.get(slot.lease.id)):
                continue
            self._note(await self._ledger.learn(profile_of(slot.model, _kind_of(seen)), slot.lease, seen))
            self._told[slot.lease.id] = seen
        if self._peaks == before:
            return False
        changes = await asyncio.to_thread(self._registry.learn, dict(self._peaks))
        return bool(changes)

    def _note(self, record: PeakRecord) -> None:
        kinds = {kind for peak in record.peaks for kind in peak if kind != _HOST}
        size = max((record.most(kind) for kind in kinds), default=0)
        peak = Peak(size, len(record.peaks), record.most(_HOST))
        if size and not _is_alike(peak, self._peaks.get(record.profile)):
            self._peaks[record.profile] = peak


def peak_of(slot: Serving, peaks: Sequence[SharePeak], kinds: Mapping[str, DeviceKind]) -> dict[str, int] | None:
    """What a slot took at most by kind of device, `host` for host memory beside accelerators; None while not known."""
    by_device = {peak.device_id: peak for peak in peaks}
    accelerators = [device for device in slot.lease.shares if kinds.get(device) is not DeviceKind.CPU]
    main = accelerators or list(slot.lease.shares)
    seen: dict[str, int] = {}
    for device in slot.lease.shares:
        peak = by_device.get(device)
        if peak is None or peak.read_at_s <= slot.ready_at_s:
            return None
        name = kinds[device].value if device in main else _HOST
        seen[name] = seen.get(name, 0) + peak.bytes
    return seen


def _kind_of(seen: Mapping[str, int]) -> str:
    """The kind that the model's claim is for."""
    return next(kind for kind in seen if kind != _HOST)


def _is_news(seen: Mapping[str, int], told: Mapping[str, int] | None) -> bool:
    return told is None or any(size > told.get(kind, 0) * (1 + _NEWS_PART) for kind, size in seen.items())


def _is_alike(peak: Peak, known: Peak | None) -> bool:
    if known is None or peak.loads != known.loads:
        return False
    pairs = ((peak.bytes, known.bytes), (peak.host_bytes, known.host_bytes))
    return all(abs(size - before) <= before * _NEWS_PART for size, before in pairs)


def _is_among(lease_id: str, serving: Sequence[Serving]) -> bool:
    return any(slot.lease.id == lease_id for slot in serving)
