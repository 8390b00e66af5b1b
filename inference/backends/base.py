"""The values that pass between a backend and those who run its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuboss.devices import Device
from inference.events import Shares

Routes = Mapping[str, frozenset[str]]
"""Path -> methods."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Where and how one engine is to run."""

    binary: Path
    """The engine's program."""
    socket: Path
    """The unix socket to listen on; its name ends in `.sock`."""
    api_key: str
    """What every request must carry."""
    shares: Shares
    """Bytes per device id, as leased."""
    devices: tuple[Device, ...]
    """All devices of the node."""
    home: Path
    """A private directory that stands for the user's home."""

    @property
    def leased(self) -> tuple[Device, ...]:
        """The devices of the lease, in index order."""
        return tuple(sorted((d for d in self.devices if d.id in self.shares), key=lambda device: device.index))


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start."""

    argv: tuple[str, ...]
    """Program and arguments; no secret is among them, for everybody can read them."""
    env: Mapping[str, str]
    """The whole environment."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """How far a starting engine is."""

    ready: bool
    """It would answer a request now."""
    fraction: float | None = None
    """Part of the load that is done, 0 to 1, where the engine tells."""
