"""What a real engine on `cpu` is seen to take changes what its model claims, also for the next broker."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpuboss.client import Client, LedgerSettings
from gpuboss.devices import parse_devices
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import HolderKind, LeaseRequest, new_request_id
from gpuboss.settings import Timings
from gpuboss.units import GIB, MIB
from inference.discovery import Sources
from inference.estimate import Room
from inference.learned import Learned, Serving
from inference.registry import Registry
from tests.integration.inference.test_estimate_and_engine import Shape, engine
from tests.support import until


@pytest.fixture
async def ledger(tmp_dir: Path) -> AsyncIterator[Client]:
    """One that measures."""
    timings = Timings(beat_s=0.5, tick_s=0.25, ttl_s=6.0, renew_deadline_s=5.0, linger_s=0.2)
    settings = LedgerSettings(state_dir=tmp_dir / "state", devices=parse_devices("cpu=2GiB"), timings=timings)
    async with await Client.connect(settings, name="test") as client:
        yield client


@pytest.fixture
def sources(tmp_dir: Path) -> Sources:
    """A model, and a manifest that claims far too little for it."""
    (tmp_dir / "manifests").mkdir()
    model = Shape(width=512, inner=1536, layers=4, heads=8, kv_heads=8).write(tmp_dir / "robin.gguf")
    (tmp_dir / "manifests" / "robin.yaml").write_text(f"path: {model}\nvram: 20MiB\ncontext: 2048\n")
    return Sources(manifests=tmp_dir / "manifests")


async def test_what_an_engine_took_is_what_its_model_claims_from_then_on(
    ledger: Client, sources: Sources, llama_server: Path, tmp_dir: Path
) -> None:
    room = Room(2 * GIB, "cpu")
    registry = Registry.load(sources, room)
    model = registry.resolve("robin")
    assert model.claim_bytes == 20 * MIB
    learned = Learned(ledger, registry)
    options = ({"cpu": model.claim_bytes},)
    lease = await ledger.acquire(LeaseRequest(new_request_id(), "slot:robin", HolderKind.SLOT, options, 10))
    with engine(llama_server, model.path, tmp_dir, {"--ctx-size": 2048, "--cache-ram": 0}) as (process, _):
        lease = await ledger.activate(lease, ProcessIdentity.of(process.pid))
        slot = Serving(model, lease, time.monotonic())
        await until(lambda: learned.look([slot]), "the peak to be learned")
        resident = process.memory_info().rss
        (use,) = (await ledger.snapshot()).devices
        assert use.observed_bytes == pytest.approx(resident, rel=0.02)
        assert use.free_bytes <= 2 * GIB - resident * 0.98, "what it uses counts, not what it claims"
    now = registry.resolve("robin")
    assert resident <= now.claim_bytes <= resident * 1.1 + 10 * MIB
    assert "learned: " in now.claim_basis
    assert any("20MiB is less than the" in str(warning) for warning in registry.warnings)
    await ledger.release(lease)
    next_registry = Registry.load(sources, room)
    await Learned(ledger, next_registry).startup()
    assert next_registry.resolve("robin").claim_bytes == now.claim_bytes
