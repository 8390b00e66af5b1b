"""A claim that turned out too small: raised once, and then the refusal's words. Pure.

Called by the scheduler after a load that ended for want of memory. What is seen of loads that succeed is learned
elsewhere (`learned.py`); a load that ran out of memory never shows how much it would have taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpuboss.units import format_bytes, whole_mib
from inference.model import Model

__all__ = ["raised", "why_refused"]

_PERCENT = 15


def raised(model: Model, observed_bytes: int = 0) -> Model:
    """The model with 15 % more to claim, and no less than it was seen to use when it failed."""
    more = whole_mib(model.claim_bytes * (100 + _PERCENT) // 100)
    basis = f"{format_bytes(model.claim_bytes)} + {_PERCENT} %, for that ran out of memory ({model.claim_basis})"
    if observed_bytes > more:
        more = whole_mib(observed_bytes)
        basis = f"what it used when it ran out of {format_bytes(model.claim_bytes)} ({model.claim_basis})"
    host = whole_mib(model.host_bytes * (100 + _PERCENT) // 100)
    return replace(model, claim_bytes=more, claim_basis=basis, host_bytes=host)


def why_refused(first: Model, again: Model, free: Mapping[str, int], observed_bytes: int | None = None) -> str:
    """In numbers, why a model that ran out of memory with its first claim and with the raised one is not loaded.

    `free`: bytes of each device when the second load failed. `observed_bytes`: what it was seen to use, where a driver
    tells.
    """
    seen = "" if observed_bytes is None else f" It was seen to use {format_bytes(observed_bytes)}."
    rooms = ", ".join(f"{device} had {format_bytes(size)} free" for device, size in sorted(free.items()))
    return (
        f"model '{first.id}' ran out of memory with {format_bytes(first.claim_bytes)} ({first.claim_basis}), and again "
        f"with {format_bytes(again.claim_bytes)}.{seen} {rooms or 'No device is known'}. Set vram in its manifest to "
        "what it needs, or lower context, parallel or gpu_layers"
    )
