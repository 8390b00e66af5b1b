"""What engines were seen to take is told once, read back at the next start, and changes the next load's claim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from gpuboss.devices import Device, DeviceKind
from gpuboss.leases import HolderKind, LeaseRequest, new_request_id
from gpuboss.ledger_rows import SharePeak
from gpuboss.peaks import PeakRecord
from gpuboss.testing import MemoryLedger
from gpuboss.units import GIB, MIB
from inference.discovery import Sources
from inference.estimate import Room
from inference.learned import Learned, Serving, peak_of
from inference.model import Model
from inference.profile import profile_of
from inference.registry import Registry
from tests.unit.inference.gguf_files import write_gguf

CARD = Device("GPU-a", DeviceKind.CUDA, "a card", 0, 24 * GIB, 0, measured=True)
OTHER = Device("GPU-b", DeviceKind.CUDA, "a card", 1, 24 * GIB, 0, measured=True)
RAM = Device("cpu", DeviceKind.CPU, "host RAM", 2, 32 * GIB, 0, measured=True)
KINDS = {device.id: device.kind for device in (CARD, OTHER, RAM)}


class MeasuredLedger(MemoryLedger):
    """The ledger in memory, with drivers that say what the test says."""

    def __init__(self) -> None:
        super().__init__((CARD, OTHER, RAM))
        self.seen: dict[str, tuple[SharePeak, ...]] = {}
        self.told: list[str] = []

    async def peaks(self) -> Mapping[str, tuple[SharePeak, ...]]:
        return self.seen

    async def learn(self, profile: str, lease: object, size_by_kind: Mapping[str, int]) -> PeakRecord:
        self.told.append(profile)
        return await super().learn(profile, lease, size_by_kind)  # type: ignore[arg-type] # any lease will do


@pytest.fixture
def ledger() -> MeasuredLedger:
    return MeasuredLedger()


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    (tmp_path / "models").mkdir()
    write_gguf(tmp_path / "models" / "robin.gguf")
    return Registry.load(Sources((tmp_path / "models",)), Room(24 * GIB, "cuda"))


async def serving(ledger: MeasuredLedger, model: Model, *, ready_at_s: float = 10.0, **shares: int) -> Serving:
    """A slot that holds MiB of the card (`card`) or of host memory (`cpu`)."""
    option = {"GPU-a" if name == "card" else name: size * MIB for name, size in (shares or {"card": 64}).items()}
    lease = await ledger.acquire(LeaseRequest(new_request_id(), "slot:robin", HolderKind.SLOT, (option,), 10))
    return Serving(model, lease, ready_at_s)


def see(ledger: MeasuredLedger, slot: Serving, mib: int, *, at_s: float = 20.0) -> None:
    ledger.seen[slot.lease.id] = (SharePeak("GPU-a", mib * MIB, at_s),)


async def test_a_peak_raises_the_claim_of_the_next_load(ledger: MeasuredLedger, registry: Registry) -> None:
    learned, model = Learned(ledger, registry), registry.resolve("robin")
    slot = await serving(ledger, model)
    see(ledger, slot, 2000)
    assert await learned.look([slot])
    assert registry.resolve("robin").claim_bytes == 2100 * MIB
    assert registry.resolve("robin").claim_basis.startswith("learned: 2GiB at most in its last load")
    assert model.claim_bytes < 1000 * MIB, "what is loaded stays as it was"


async def test_the_next_broker_knows_it_from_its_start(ledger: MeasuredLedger, registry: Registry) -> None:
    slot = await serving(ledger, registry.resolve("robin"))
    see(ledger, slot, 2000)
    await Learned(ledger, registry).look([slot])
    registry.learn({})
    assert registry.resolve("robin").claim_bytes < 1000 * MIB
    await Learned(ledger, registry).startup()
    assert registry.resolve("robin").claim_bytes == 2100 * MIB


async def test_three_loads_that_took_less_lower_it(ledger: MeasuredLedger, registry: Registry) -> None:
    learned, guess = Learned(ledger, registry), registry.resolve("robin").claim_bytes
    for load in range(3):
        assert registry.resolve("robin").claim_bytes == guess, f"after {load} loads"
        slot = await serving(ledger, registry.resolve("robin"))
        see(ledger, slot, 100)
        await learned.look([slot])
    assert registry.resolve("robin").claim_bytes == 108 * MIB < guess


async def test_one_load_that_took_much_is_forgotten_after_five_others(
    ledger: MeasuredLedger, registry: Registry
) -> None:
    learned = Learned(ledger, registry)
    for size in (2000, 600, 600, 600, 600, 600):
        slot = await serving(ledger, registry.resolve("robin"))
        see(ledger, slot, size)
        await learned.look([slot])
        assert registry.resolve("robin").claim_bytes >= size * MIB
    assert registry.resolve("robin").claim_bytes == 630 * MIB


async def test_a_half_loaded_engine_does_not_pass_for_a_small_one(ledger: MeasuredLedger, registry: Registry) -> None:
    learned, slot = Learned(ledger, registry), await serving(ledger, registry.resolve("robin"), ready_at_s=30.0)
    see(ledger, slot, 2000, at_s=29.9)
    assert not await learned.look([slot])
    assert ledger.told == []
    see(ledger, slot, 2000, at_s=30.1)
    assert await learned.look([slot])


async def test_it_is_told_again_only_when_it_has_grown(ledger: MeasuredLedger, registry: Registry) -> None:
    learned, slot = Learned(ledger, registry), await serving(ledger, registry.resolve("robin"))
    for size, told in ((2000, 1), (2000, 1), (2010, 1), (2030, 2)):
        see(ledger, slot, size)
        await learned.look([slot])
        assert len(ledger.told) == told
    (record,) = await ledger.learned()
    assert (record.loads, record.most("cuda")) == (1, 2030 * MIB), "one load, told of twice"


async def test_other_options_are_learned_anew(ledger: MeasuredLedger, registry: Registry) -> None:
    model = registry.resolve("robin")
    assert profile_of(replace(model, claim_bytes=1, claim_basis="", pin=True), "cuda") == profile_of(model, "cuda")
    others: list[dict[str, object]] = [
        {"context": 512},
        {"parallel": 2},
        {"gpu_layers": 1},
        {"file_bytes": 1},
        {"options": {"flash_attn": "off"}},
        {"extra_args": ("--no-mmap",)},
        {"mmproj": Path("p.gguf")},
    ]
    profiles = {profile_of(replace(model, **change), "cuda") for change in others}  # type: ignore[arg-type] # fields
    profiles |= {profile_of(model, "cuda"), profile_of(model, "cpu")}
    assert len(profiles) == len(others) + 2


async def test_shares_of_several_cards_are_one_figure_and_host_memory_another(
    ledger: MeasuredLedger, registry: Registry
) -> None:
    slot = await serving(ledger, registry.resolve("robin"), **{"card": 10, "GPU-b": 10, "cpu": 10})
    peaks = [SharePeak("GPU-a", 3 * MIB, 20.0), SharePeak("GPU-b", 4 * MIB, 20.0), SharePeak("cpu", 5 * MIB, 20.0)]
    assert peak_of(slot, peaks, KINDS) == {"cuda": 7 * MIB, "host": 5 * MIB}
    assert peak_of(slot, peaks[:2], KINDS) is None, "not before all are known"
    alone = await serving(ledger, registry.resolve("robin"), cpu=10)
    assert peak_of(alone, peaks, KINDS) == {"cpu": 5 * MIB}


async def test_nothing_is_learned_where_nobody_measures(ledger: MeasuredLedger, registry: Registry) -> None:
    slot = await serving(ledger, registry.resolve("robin"))
    assert not await Learned(ledger, registry).look([slot])
    assert await ledger.learned() == ()
