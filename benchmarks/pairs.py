"""Whole leases per second, taken and given back one after the other by one process: `gpuboss.hold` and reslock.

Both on an empty ledger of one device, in one process, in blocks that take turns. `hold` runs on the private store and
enters the holder into the node ledger; reslock rewrites its JSON file under a lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import gpuboss
from gpuboss.devices import parse_devices
from gpuboss.settings import LedgerSettings

BLOCK = 50


def pairs_per_second(directory: Path, *, rounds: int, report: Callable[[str], None]) -> dict[str, list[float]]:
    """One sample per round for `hold()` and for `reslock`."""
    from reslock import ResourcePool

    settings = LedgerSettings(state_dir=directory / "gpuboss", devices=parse_devices("sim0=24GiB"))
    pool = ResourcePool(directory / "reslock.json")
    pool.set_resources({"vram_mb": 24 * 1024})

    def ours() -> None:
        with gpuboss.hold("1GiB", job="bench", settings=settings):
            pass

    def theirs() -> None:
        with pool.acquire(vram_mb=1024, label="bench"):
            pass

    samples: dict[str, list[float]] = {"hold()": [], "reslock": []}
    for pair in (ours, theirs):
        _rate(pair)  # the first starts the keeper and imports what is imported late
    for turn in range(rounds):
        samples["hold()"].append(_rate(ours))
        samples["reslock"].append(_rate(theirs))
        if turn % 5 == 4:
            last = ", ".join(f"{name} {values[-1]:.0f}/s" for name, values in samples.items())
            report(f"pairs, round {turn + 1} of {rounds}: {last}")
    return samples


def _rate(pair: Callable[[], None]) -> float:
    began = time.perf_counter()
    for _ in range(BLOCK):
        pair()
    return BLOCK / (time.perf_counter() - began)
