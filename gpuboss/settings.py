"""What a process says about the ledger it wants to use, and the timings that keeper and clients share.

Made by the broker from its configuration, or by `LedgerSettings.from_environment` for the command line; read by
`gpuboss.client` and, through the keeper's standard input, by `gpuboss.keeper`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpuboss.devices import DEFAULT_RESERVE_BYTES, DeviceKind, DeviceSpec, devices_from_environment
from gpuboss.store_url import shown
from gpuboss.units import format_bytes

__all__ = ["STORE_VARIABLE", "LedgerSettings", "Timings", "describe_devices"]

STORE_VARIABLE = "GPUBOSS_URL"
"""Environment variable that names a store shared by several hosts: `redis://`, `rediss://`, `unix://` or
`redis+sentinel://`, as `gpuboss.store_routes` explains them."""


@dataclass(frozen=True, slots=True)
class Timings:
    """How long things take and how long they may take. Refused at construction when they cannot be right together."""

    beat_s: float = 2.0
    """Between two syncs of a node with the store."""
    tick_s: float = 1.0
    """Between two looks of a waiter whose wake-up may have been lost, and between two ticks of the store."""
    ttl_s: float = 15.0
    """After which a lease that nobody renews is ending, and a waiter that nobody asks for leaves."""
    renew_deadline_s: float = 10.0
    """How long a renewal or any other command is tried for while the store does not answer."""
    linger_s: float = 5.0
    """How long a keeper stays after its last client and lease."""

    def __post_init__(self) -> None:
        """ValueError unless ttl > renew deadline > 2 beats: else one slow beat would end the leases of the living."""
        if not self.ttl_s > self.renew_deadline_s > 2 * self.beat_s > 0:
            raise ValueError(
                f"timings cannot be right: ttl {self.ttl_s:g} s must exceed the renew deadline "
                f"{self.renew_deadline_s:g} s, and that two beats of {self.beat_s:g} s"
            )
        if not 0 < self.tick_s < self.ttl_s / 3 or self.linger_s < 0:
            raise ValueError(
                f"timings cannot be right: tick {self.tick_s:g} s, ttl {self.ttl_s:g} s, linger {self.linger_s:g} s"
            )


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Which ledger to use. What is None is left to the ledger: a keeper that runs already tells what it has."""

    state_dir: Path | None = None
    """None: by the rules of `gpuboss.state_dir`."""
    devices: tuple[DeviceSpec, ...] | None = None
    """Declared devices; None: those of the running keeper, or else the discovered ones."""
    store_url: str | None = None
    """A store shared by several hosts; None: that of the running keeper, or else a private one of this host."""
    reserve_bytes: int = DEFAULT_RESERVE_BYTES
    """Kept back on every discovered device, when this process is the one that starts the keeper."""
    timings: Timings = field(default_factory=Timings)

    @classmethod
    def from_environment(cls) -> LedgerSettings:
        """As GPUBOSS_STATE_DIR, GPUBOSS_DEVICES and GPUBOSS_URL say. DeviceError for devices not understood."""
        return cls(devices=devices_from_environment(), store_url=os.environ.get(STORE_VARIABLE) or None)

    def __repr__(self) -> str:
        """Without the store's password."""
        store = None if self.store_url is None else shown(self.store_url)
        return (
            f"LedgerSettings(state_dir={self.state_dir!r}, devices={self.devices!r}, store_url={store!r}, "
            f"reserve_bytes={self.reserve_bytes}, timings={self.timings!r})"
        )

    def to_wire(self) -> dict[str, Any]:
        """For JSON: what keeper and clients tell each other. It holds the store's password: not for logs."""
        return {
            "devices": None if self.devices is None else [asdict(spec) for spec in self.devices],
            "store_url": self.store_url,
            "reserve_bytes": self.reserve_bytes,
            "timings": asdict(self.timings),
        }

    @classmethod
    def from_wire(cls, wire: dict[str, Any], state_dir: Path | None) -> LedgerSettings:
        """The inverse of `to_wire`; the state directory does not travel."""
        specs = wire["devices"]
        return cls(
            state_dir=state_dir,
            devices=None
            if specs is None
            else tuple(DeviceSpec(**spec | {"kind": DeviceKind(spec["kind"])}) for spec in specs),
            store_url=wire["store_url"],
            reserve_bytes=wire["reserve_bytes"],
            timings=Timings(**wire["timings"]),
        )


def describe_devices(specs: Sequence[DeviceSpec] | None) -> str:
    """For people: `sim0=8GiB,sim1=24GiB`, or what None means."""
    if specs is None:
        return "the devices found on this host"
    return ",".join(f"{spec.id}={format_bytes(spec.total_bytes)}" for spec in specs)
