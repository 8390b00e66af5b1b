"""Leases on device memory: who may use how much of which device, and proof that nobody uses more.

    with gpuboss.hold("20GiB", job="sft-12", wait="2h") as lease:
        ...

A training job installs this package alone. Importing it imports nothing: what it offers is loaded when it is first
used, for every spawned engine passes through a small child that imports `gpuboss.node_ledger` on its way, and what
stood here would be on that way too.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuboss.client import Client as Client
    from gpuboss.devices import Device as Device
    from gpuboss.errors import ActivationRefused as ActivationRefused
    from gpuboss.errors import DeviceError as DeviceError
    from gpuboss.errors import GpubossError as GpubossError
    from gpuboss.errors import LeaseRefused as LeaseRefused
    from gpuboss.errors import LedgerConflict as LedgerConflict
    from gpuboss.errors import StaleFence as StaleFence
    from gpuboss.errors import StateDirError as StateDirError
    from gpuboss.errors import StoreUnavailable as StoreUnavailable
    from gpuboss.errors import StoreUnfit as StoreUnfit
    from gpuboss.errors import WaitExpired as WaitExpired
    from gpuboss.held import AsyncHeldLease as AsyncHeldLease
    from gpuboss.held import HeldLease as HeldLease
    from gpuboss.holding import acquire as acquire
    from gpuboss.holding import hold as hold
    from gpuboss.holding import hold_async as hold_async
    from gpuboss.holding import release as release
    from gpuboss.holding import renew as renew
    from gpuboss.leases import DeviceUse as DeviceUse
    from gpuboss.leases import Lease as Lease
    from gpuboss.leases import LeaseRequest as LeaseRequest
    from gpuboss.leases import LeaseState as LeaseState
    from gpuboss.leases import Notice as Notice
    from gpuboss.leases import Snapshot as Snapshot
    from gpuboss.looking import devices as devices
    from gpuboss.looking import snapshot as snapshot
    from gpuboss.looking import watch as watch
    from gpuboss.settings import LedgerSettings as LedgerSettings
    from gpuboss.watching import LedgerEvent as LedgerEvent

_HOMES = {
    "client": ("Client",),
    "devices": ("Device",),
    "errors": (
        *("ActivationRefused", "DeviceError", "GpubossError", "LeaseRefused", "LedgerConflict", "StaleFence"),
        *("StateDirError", "StoreUnavailable", "StoreUnfit", "WaitExpired"),
    ),
    "held": ("AsyncHeldLease", "HeldLease"),
    "holding": ("acquire", "hold", "hold_async", "release", "renew"),
    "leases": ("DeviceUse", "Lease", "LeaseRequest", "LeaseState", "Notice", "Snapshot"),
    "looking": ("snapshot", "watch"),
    "settings": ("LedgerSettings",),
    "watching": ("LedgerEvent",),
}
"""Module -> what it offers here."""

__all__ = ["devices", *sorted(name for names in _HOMES.values() for name in names)]  # `devices`: a package one can call


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "devices":
        return import_module("gpuboss.devices")
    for home, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(import_module(f"gpuboss.{home}"), name)
            return found
    raise AttributeError(f"module 'gpuboss' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
