"""The pool between a scheduler and a registry that do not change at the same moment, and a ledger that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuboss.devices import Device, DeviceKind
from gpuboss.leases import DeviceUse, Snapshot
from gpuboss.priority import NORMAL
from inference import pool as pool_module
from inference.errors import EngineMissing, QueueTimeout
from inference.pool import Pool
from inference.queue import QueueLimits
from inference.scheduler import Scheduler
from inference.slot_maker import SlotMaker
from tests.unit.inference.slot_world import MODEL

ROOM = DeviceUse(Device("sim0", DeviceKind.SIM, "sim0", 0, 1 << 30, 0, measured=False), 0, None, 0, 0, 1 << 30)


class Ledger:
    """Shows its devices, or fails in a way nobody foresaw."""

    def __init__(self, root: Path) -> None:
        self.state = SimpleNamespace(root=root)
        self.devices: tuple[DeviceUse, ...] = (ROOM,)
        self.fails: Exception | None = None
        self.failed = 0

    async def snapshot(self) -> Snapshot:
        if self.fails is not None:
            self.failed += 1
            raise self.fails
        return Snapshot(1, self.devices, ())


class NoShims:
    """There is no engine to supervise."""

    async def startup(self) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


@pytest.fixture
async def pool(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pool]:
    monkeypatch.setattr(pool_module, "TICK_S", 0.01)
    monkeypatch.setattr(pool_module, "WAITING_TICK_S", 0.01)
    parts: dict[str, Any] = {"ledger": ledger, "shims": NoShims()}
    slots = SlotMaker(find_engine=lambda _: None, **parts)
    registry: Any = SimpleNamespace(models={MODEL.id: MODEL})
    scheduler = Scheduler(QueueLimits(max_wait_s=0.05))
    pool = Pool(registry=registry, scheduler=scheduler, slots=slots, node="here", shutdown_s=0.1)
    yield pool
    await pool.shutdown()


async def test_a_model_that_left_the_registry_a_moment_ago_is_still_the_schedulers(pool: Pool) -> None:
    """A reload exchanges the registry's models in a thread; the scheduler hears of it a moment later."""
    await pool.startup()
    pool.registry.models = {}  # type: ignore[misc] # this registry is a stand-in
    admission = pool.submit(MODEL, priority=NORMAL)
    with pytest.raises(EngineMissing):
        admission.grant_now()
    admission.close()


async def test_ticks_go_on_whatever_a_look_at_the_devices_raises(pool: Pool, ledger: Ledger) -> None:
    ledger.devices = ()  # so that the ticket waits
    await pool.startup()
    ledger.fails = RuntimeError("nobody foresaw this")
    admission = pool.submit(MODEL, priority=NORMAL)
    with pytest.raises(QueueTimeout):
        await asyncio.wait_for(admission.granted(), 5)
    admission.close()
    assert ledger.failed
