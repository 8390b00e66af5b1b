"""What holders were seen to take, kept in the store for claims to come.

Told and read through `gpuboss.client` by whoever knows what makes one holder like another: the ledger itself only keeps
the figures, under names it does not understand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PeakRecord", "record_from"]


@dataclass(frozen=True, slots=True)
class PeakRecord:
    """The peaks of holders that are alike."""

    profile: str
    """What makes them alike; chosen by who told of them."""
    loads: int
    """How many holders were seen so far."""
    peaks: tuple[Mapping[str, int], ...]
    """The latest of them (5 at most), oldest first: what each took at most, by kind of device."""
    at_ms: int
    """Wall clock of the store, in ms since 1970, at which it was told of last."""

    def most(self, kind: str) -> int:
        """The largest of the latest figures for a kind of device; 0 where there is none."""
        return max((peak.get(kind, 0) for peak in self.peaks), default=0)


def record_from(told: Mapping[str, Any]) -> PeakRecord:
    """A record as the scripts reply it."""
    peaks = tuple({kind: int(size) for kind, size in peak["bytes"].items()} for peak in told["peaks"] or ())
    return PeakRecord(told["profile"], int(told["loads"]), peaks, int(told["at_ms"]))
