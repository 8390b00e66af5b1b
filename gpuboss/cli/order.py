"""What `gpuboss run` was told to do, as a value. Made by `gpuboss.cli.run`, read by `supervise`."""

from __future__ import annotations

from dataclasses import dataclass

from gpuboss.settings import LedgerSettings
from gpuboss.taking import Wish

__all__ = ["Order"]


@dataclass(frozen=True, slots=True)
class Order:
    """One run."""

    settings: LedgerSettings
    wish: Wish
    """The lease to wait for."""
    preempt_signal: int
    """Sent to the command when its memory is asked back."""
