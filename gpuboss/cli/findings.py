"""What a doctor finds: the words in which `gpuboss doctor` and `model-boss doctor` tell it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["LITTLE_DISK_BYTES", "Finding", "Verdict"]

LITTLE_DISK_BYTES = 200 << 20
"""Less free space than this in the state directory is worth a warning."""


class Verdict(enum.StrEnum):
    """What a finding means."""

    OK = "ok"
    """As it should be."""
    WARNING = "warning"
    """Works, but somebody should know."""
    BROKEN = "broken"
    """Does not work until the remedy is applied."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's."""

    check: str
    verdict: Verdict
    text: str
    remedy: str | None = None
    """What to do; None when nothing is to be done, or the text says it."""
