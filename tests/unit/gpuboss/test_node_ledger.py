"""The node's book, one process at a time."""

from __future__ import annotations

import sqlite3
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuboss import ledger_file
from gpuboss.devices import Device, DeviceKind
from gpuboss.errors import ActivationRefused, LedgerBusy, LedgerDamaged, StaleFence, StateDirError
from gpuboss.identity import Liveness, ProcessIdentity
from gpuboss.ledger_rows import Prior
from gpuboss.node_ledger import LedgerReading, LedgerRow, NodeLedger
from gpuboss.units import GIB

CARD = Device("GPU-a", DeviceKind.CUDA, "a card", 0, 24 * GIB, 1 * GIB, measured=True)
SIM = Device("sim0", DeviceKind.SIM, "simulated device", 1, 8 * GIB, 0, measured=False)
RAM = Device("cpu", DeviceKind.CPU, "host RAM", 2, 32 * GIB, 0, measured=True)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[NodeLedger]:
    with NodeLedger(tmp_path / "node.sqlite") as opened:
        opened.put_devices([CARD, SIM, RAM])
        yield opened


def row(lease_id: str = "lease-1", *, epoch: int = 5, seq: int = 1, pid: int = 100, **shares: int) -> LedgerRow:
    """A row; `sim0=4` claims 4 GiB of it, `card` is the card."""
    claims = {"GPU-a" if name == "card" else name: size * GIB for name, size in shares.items()}
    return LedgerRow(lease_id, epoch, seq, f"slot:{lease_id}", claims, pid, 77, 1, since_s=1000.0)


def free(ledger: NodeLedger) -> dict[str, float]:
    return {device.id: device.free_bytes / GIB for device in ledger.devices()}


def test_what_fits_is_entered_and_counts(ledger: NodeLedger) -> None:
    ledger.admit(row(sim0=5, cpu=2))
    assert ledger.rows() == [row(sim0=5, cpu=2)]
    assert free(ledger) == {"GPU-a": 23, "sim0": 3, "cpu": 30}


def test_what_does_not_fit_is_refused_with_numbers_and_holders_and_leaves_no_trace(ledger: NodeLedger) -> None:
    ledger.admit(row("robin", sim0=5))
    ledger.admit(row("wren", sim0=1))
    with pytest.raises(
        ActivationRefused, match=r"sim0: 3GiB wanted, 2GiB free; held by slot:robin 5GiB, slot:wren 1GiB"
    ) as caught:
        ledger.admit(row("finch", cpu=1, sim0=3))
    refusal = caught.value
    assert (refusal.device_id, refusal.wanted_bytes, refusal.free_bytes) == ("sim0", 3 * GIB, 2 * GIB)
    assert refusal.holders == (("slot:robin", 5 * GIB), ("slot:wren", 1 * GIB))
    assert [entry.lease_id for entry in ledger.rows()] == ["robin", "wren"]
    assert free(ledger)["cpu"] == 32  # all shares or none


def test_the_reserve_foreign_use_and_residual_use_are_not_given_out(ledger: NodeLedger) -> None:
    ledger.put_devices([CARD], [LedgerReading("GPU-a", 1.0, foreign_bytes=2 * GIB, residual_bytes=3 * GIB)])
    assert free(ledger) == {"GPU-a": 24 - 1 - 2 - 3}
    with pytest.raises(
        ActivationRefused, match=r"19GiB wanted, 18GiB free; held by .*after their leases 3GiB, .*without a lease 2GiB"
    ):
        ledger.admit(row(card=19))
    ledger.admit(row(card=18))


def test_a_holder_counts_for_what_it_claims_or_uses_whichever_is_more(ledger: NodeLedger) -> None:
    ledger.admit(row("robin", card=4))
    ledger.admit(row("wren", card=4))
    ledger.put_devices([CARD, SIM, RAM], [LedgerReading("GPU-a", 1.0, observed={"robin": 9 * GIB, "wren": 1 * GIB})])
    assert free(ledger)["GPU-a"] == 23 - 9 - 4
    (card,) = [device for device in ledger.devices() if device.id == "GPU-a"]
    assert (card.claimed_bytes, card.observed_bytes) == (8 * GIB, 10 * GIB)


def test_a_device_may_hold_more_than_it_should_and_then_nothing_more_is_admitted(ledger: NodeLedger) -> None:
    ledger.admit(row("robin", card=20))
    ledger.put_devices([CARD], [LedgerReading("GPU-a", 1.0, foreign_bytes=10 * GIB)])
    assert free(ledger)["GPU-a"] == -7
    with pytest.raises(ActivationRefused, match="-7GiB free"):
        ledger.admit(row("wren", card=1))
    with pytest.raises(ActivationRefused):
        ledger.admit(row("nothing", card=0))


def test_a_device_that_the_keeper_has_not_written_is_refused(tmp_path: Path) -> None:
    with (
        NodeLedger(tmp_path / "empty.sqlite") as empty,
        pytest.raises(ActivationRefused, match=r"no such device.*keeper"),
    ):
        empty.admit(row(sim0=1))


def test_entering_the_same_row_again_changes_nothing(ledger: NodeLedger) -> None:
    ledger.admit(row(sim0=8))
    ledger.set_engine("lease-1", 101, 78)
    before = ledger.rows()
    ledger.admit(row(sim0=8))
    assert ledger.rows() == before


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (row(seq=2, sim0=1), r"runs with fence \(5, 1\): \(5, 2\) is refused"),
        (row(epoch=6, sim0=1), r"runs with fence \(5, 1\): \(6, 1\) is refused"),
        (row(pid=200, sim0=1), "is held by process 100: process 200 is refused"),
        (row(sim0=2), "has shares"),
    ],
)
def test_a_lease_has_one_row_and_another_fence_process_or_size_is_refused(
    ledger: NodeLedger, second: LedgerRow, words: str
) -> None:
    ledger.admit(row(sim0=1))
    with pytest.raises(StaleFence, match=words):
        ledger.admit(second)
    assert ledger.rows() == [row(sim0=1)]


def test_only_the_rows_own_fence_removes_it(ledger: NodeLedger) -> None:
    ledger.admit(row(sim0=8))
    assert not ledger.remove("lease-1", 5, 2)
    assert not ledger.remove("lease-1", 4, 1)
    assert not ledger.remove("lease-2", 5, 1)
    assert free(ledger)["sim0"] == 0
    assert ledger.remove("lease-1", 5, 1)
    assert not ledger.remove("lease-1", 5, 1)
    assert ledger.rows() == []
    assert free(ledger)["sim0"] == 8


def test_a_row_counts_until_it_is_removed_though_its_process_is_dead(ledger: NodeLedger) -> None:
    dead = LedgerRow(
        "lease-1", 5, 1, "slot:dead", {"sim0": 8 * GIB}, (1 << 22) - 1, 1, ProcessIdentity.current().pid_namespace
    )
    assert dead.process.is_alive() is Liveness.DEAD
    ledger.admit(dead)
    with pytest.raises(ActivationRefused, match="slot:dead 8GiB"):
        ledger.admit(row("lease-2", sim0=1))


def test_the_engine_is_recorded_beside_its_holder(ledger: NodeLedger) -> None:
    ledger.admit(row(sim0=1))
    assert ledger.rows()[0].engine is None
    ledger.set_engine("lease-1", 101, 78)
    (found,) = ledger.rows()
    assert found.engine is not None
    assert (found.engine.pid, found.engine.start_ticks, found.engine.pid_namespace) == (101, 78, 1)
    assert (found.process.pid, found.process.start_ticks) == (100, 77)
    ledger.remove("lease-1", 5, 1)
    with pytest.raises(StaleFence, match=r"lease-1 has no row.*engine 101 is not recorded"):
        ledger.set_engine("lease-1", 101, 78)


def test_memory_of_a_removed_holder_settles_until_a_later_reading(ledger: NodeLedger) -> None:
    ledger.admit(row("robin", card=10))
    ledger.put_devices([CARD, SIM, RAM], [LedgerReading("GPU-a", time.monotonic(), observed={"robin": 9 * GIB})])
    asked_before = time.monotonic()
    ledger.remove("robin", 5, 1)
    # 10 and not the 9 it was seen to use: it may have grown to its claim after that.
    assert free(ledger)["GPU-a"] == 23 - 10
    with pytest.raises(ActivationRefused, match=r"10GiB of ended holders, not yet read to be back") as caught:
        ledger.admit(row("wren", card=20))
    assert caught.value.settling_bytes == 10 * GIB

    # The driver was asked before the end, so it proves nothing about it.
    ledger.put_devices([CARD, SIM, RAM], [LedgerReading("GPU-a", asked_before)])
    assert free(ledger)["GPU-a"] == 23 - 10
    # It still shows 2 GiB: they are residual now.
    ledger.put_devices([CARD, SIM, RAM], [LedgerReading("GPU-a", time.monotonic(), residual_bytes=2 * GIB)])
    assert free(ledger)["GPU-a"] == 23 - 2
    ledger.admit(row("wren", card=20))


def test_nothing_settles_where_nobody_measures(ledger: NodeLedger) -> None:
    ledger.admit(row("robin", sim0=4))
    ledger.remove("robin", 5, 1)
    assert free(ledger)["sim0"] == 8


def test_host_memory_settles_too_but_what_stays_in_use_is_foreign_and_no_debt(ledger: NodeLedger) -> None:
    ledger.admit(row("robin", cpu=4))
    ledger.put_devices([CARD, SIM, RAM], [LedgerReading("cpu", time.monotonic(), observed={"robin": 5 * GIB})])
    ledger.remove("robin", 5, 1)
    assert free(ledger)["cpu"] == 32 - 5
    assert not ledger.priors()["cpu"].debts
    ledger.put_devices([CARD, SIM, RAM], [LedgerReading("cpu", time.monotonic(), foreign_bytes=3 * GIB)])
    assert free(ledger)["cpu"] == 32 - 3


def test_an_admission_is_remembered_with_what_it_rested_on(ledger: NodeLedger) -> None:
    ledger.admit(row("first", sim0=1, card=10))
    (card, sim) = ledger.grounds()["first"]
    assert (card.device_id, card.free_bytes, card.read_age_s, card.after) == ("GPU-a", 23 * GIB, None, "")
    assert sim.words == "sim0 8GiB free, not measured"
    ledger.put_devices([CARD, SIM, RAM], [LedgerReading("GPU-a", time.monotonic(), observed={"first": 9 * GIB})])
    ledger.remove("first", 5, 1)
    assert "first" not in ledger.grounds()
    # It fits beside what has not been read to be back, so it rests on the reading before the end, without that memory.
    ledger.admit(row("second", card=10))
    (ground,) = ledger.grounds()["second"]
    assert ground.free_bytes == 13 * GIB
    assert ground.after == "slot:first"
    assert not ground.is_read_since
    ledger.put_devices([CARD, SIM, RAM], [LedgerReading("GPU-a", time.monotonic(), observed={"second": 0})])
    ledger.admit(row("third", card=13))
    (ground,) = ledger.grounds()["third"]
    assert ground.free_bytes == 13 * GIB
    assert ground.is_read_since
    assert ground.words.startswith("GPU-a 13GiB free, read 0.0")
    assert "slot:first ended 0.0" in ground.words


def test_the_most_a_holder_was_seen_to_use_is_told_where_it_is_measured(ledger: NodeLedger) -> None:
    ledger.admit(row("robin", sim0=4, cpu=4, card=1))
    assert ledger.peaks() == {}
    for used in (3, 5, 2):
        at_s = time.monotonic()
        ledger.put_devices([CARD, SIM, RAM], [LedgerReading("cpu", at_s, observed={"robin": used * GIB})])
    (peak,) = ledger.peaks()["robin"]
    assert (peak.device_id, peak.bytes, peak.read_at_s) == ("cpu", 5 * GIB, at_s)
    ledger.remove("robin", 5, 1)
    assert ledger.peaks() == {}


def test_a_file_of_the_release_before_is_taken_over_with_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "node.sqlite"
    with NodeLedger(path) as ledger:
        ledger.put_devices([SIM])
        ledger.admit(row("robin", sim0=4))
    with sqlite3.connect(path) as older:
        older.executescript("DROP TABLE ground; DROP TABLE stop; PRAGMA user_version = 2")
    older.close()
    with NodeLedger(path) as ledger:
        assert [found.lease_id for found in ledger.rows()] == ["robin"]
        assert ledger.grounds() == {}
        assert ledger.remove("robin", 5, 1)
        ledger.admit(row("wren", sim0=4))
        assert [ground.after for ground in ledger.grounds()["wren"]] == ["slot:robin"]


WHOLE = Device("GPU-w", DeviceKind.ROCM, "a card read as a whole", 3, 24 * GIB, 0, measured=True)


def read(device: str, used: int = 0, *, at_s: float | None = None, **more: Any) -> LedgerReading:
    """A reading of now by which `used` GiB are foreign."""
    return LedgerReading(device, time.monotonic() if at_s is None else at_s, used * GIB, **more)


def test_terms_are_kept_as_they_stand(ledger: NodeLedger) -> None:
    entry = row(sim0=1).replace(terms='{"priority": 5}')
    ledger.admit(entry)
    ledger.admit(entry.replace(terms="other words for the same row"))
    assert ledger.rows() == [entry]


def test_a_lease_may_be_held_by_word_alone(ledger: NodeLedger) -> None:
    entry = LedgerRow("lease-1", 5, 1, "job:notebook", {"GPU-a": 4 * GIB}, since_s=1000.0)
    assert entry.process is None
    ledger.admit(entry)
    assert ledger.rows() == [entry]
    with pytest.raises(StaleFence, match="is held by process None: process 100 is refused"):
        ledger.admit(row(card=4))
    assert ledger.remove("lease-1", 5, 1)
    # Nobody owes it: who used the memory may go on to, as somebody without a lease.
    assert ledger.priors()["GPU-a"].debts == ()
    assert free(ledger)["GPU-a"] == 19
    ledger.put_devices([CARD, SIM, RAM], [read("GPU-a", 4)])
    assert free(ledger)["GPU-a"] == 19


def test_a_process_named_by_half_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="together, or none"):
        LedgerRow("lease-1", 5, 1, "job:x", {"sim0": 1}, pid=7)


def test_what_the_holder_uses_already_counts_as_available_to_it_and_to_nobody_else(ledger: NodeLedger) -> None:
    ledger.put_devices([CARD, SIM, RAM], [read("GPU-a", 20)])
    with pytest.raises(ActivationRefused, match="10GiB wanted, 3GiB free; held by processes without a lease 20GiB"):
        ledger.admit(row("adopter", card=10))
    with pytest.raises(ActivationRefused):
        ledger.admit(row("adopter", card=10), {"GPU-a": 6 * GIB})
    ledger.admit(row("adopter", card=10), {"GPU-a": 9 * GIB, "sim0": GIB})
    card = ledger.devices()[0]
    assert (card.foreign_bytes, card.observed_bytes, card.free_bytes) == (11 * GIB, 9 * GIB, 2 * GIB)
    with pytest.raises(ActivationRefused):
        ledger.admit(row("next", card=3))


def test_nobody_adopts_more_than_is_foreign(ledger: NodeLedger) -> None:
    ledger.put_devices([CARD, SIM, RAM], [read("GPU-a", 4)])
    with pytest.raises(ActivationRefused):
        ledger.admit(row("adopter", card=24), {"GPU-a": 24 * GIB})
    ledger.admit(row("adopter", card=23), {"GPU-a": 24 * GIB})
    assert ledger.devices()[0].foreign_bytes == 0
    assert free(ledger)["GPU-a"] == 0


def test_a_holder_grows_where_it_fits_and_shrinks_at_once_where_nobody_measures(ledger: NodeLedger) -> None:
    ledger.admit(row("robin", sim0=4, cpu=1))
    ledger.admit(row("wren", sim0=2))
    with pytest.raises(ActivationRefused, match=r"7GiB wanted, 2GiB free; held by slot:robin 4GiB, slot:wren 2GiB"):
        ledger.resize("robin", 5, 1, {"sim0": 7 * GIB, "cpu": GIB})
    assert ledger.rows()[0].shares == {"sim0": 4 * GIB, "cpu": GIB}
    ledger.resize("robin", 5, 1, {"sim0": 6 * GIB, "cpu": 3 * GIB}, terms="new")
    assert free(ledger) == {"GPU-a": 23, "sim0": 0, "cpu": 29}
    ledger.resize("robin", 5, 1, {"sim0": 1 * GIB, "cpu": 3 * GIB})
    assert free(ledger)["sim0"] == 5
    assert ledger.rows()[0].terms == "new"


def test_a_claim_follows_what_is_used_but_never_beyond_the_device(ledger: NodeLedger) -> None:
    ledger.admit(row("robin", card=5))
    ledger.put_devices([CARD, SIM, RAM], [LedgerReading("GPU-a", time.monotonic(), observed={"robin": 9 * GIB})])
    ledger.resize("robin", 5, 1, {"GPU-a": 9 * GIB})
    ledger.put_devices([CARD, SIM, RAM], [LedgerReading("GPU-a", time.monotonic(), observed={"robin": 30 * GIB})])
    with pytest.raises(ActivationRefused, match="25GiB wanted, -7GiB free"):
        ledger.resize("robin", 5, 1, {"GPU-a": 25 * GIB})
    ledger.resize("robin", 5, 1, {"GPU-a": 5 * GIB})


def test_a_resize_that_fails_on_one_device_changes_none(ledger: NodeLedger) -> None:
    ledger.admit(row("robin", cpu=1, sim0=4))
    with pytest.raises(ActivationRefused):
        ledger.resize("robin", 5, 1, {"cpu": 2 * GIB, "sim0": 9 * GIB})
    assert ledger.rows()[0].shares == {"sim0": 4 * GIB, "cpu": GIB}


@pytest.mark.parametrize(
    ("name", "epoch", "shares", "raised"),
    [
        ("wren", 5, {"sim0": 1}, StaleFence),
        ("robin", 4, {"sim0": 1}, StaleFence),
        ("robin", 5, {"sim0": 1, "cpu": 1}, ValueError),
        ("robin", 5, {}, ValueError),
        ("robin", 5, {"sim0": -1}, ValueError),
    ],
)
def test_only_the_row_of_the_fence_is_resized_and_only_on_its_devices(
    ledger: NodeLedger, name: str, epoch: int, shares: dict[str, int], raised: type[Exception]
) -> None:
    ledger.admit(row("robin", sim0=4))
    with pytest.raises(raised):
        ledger.resize(name, epoch, 1, shares)
    assert free(ledger)["sim0"] == 4


def test_what_a_holder_claims_no_more_is_free_when_a_reading_says_so(ledger: NodeLedger) -> None:
    ledger.admit(row("robin", card=10))
    ledger.put_devices([CARD, SIM, RAM], [read("GPU-a", observed={"robin": 8 * GIB})])
    ledger.resize("robin", 5, 1, {"GPU-a": 4 * GIB})
    # It is seen to use 8, and nobody knows of the other 2 before the next reading.
    assert free(ledger)["GPU-a"] == 13
    ledger.put_devices([CARD, SIM, RAM], [read("GPU-a", observed={"robin": 8 * GIB})])
    assert free(ledger)["GPU-a"] == 15
    ledger.resize("robin", 5, 1, {"GPU-a": 8 * GIB})
    assert free(ledger)["GPU-a"] == 15, "it counted for that already"


def test_a_holders_end_leaves_a_debt_of_the_most_it_was_seen_to_use(ledger: NodeLedger) -> None:
    ledger.admit(row("robin", card=10, sim0=1))
    for size in (8, 2):
        ledger.put_devices(
            [CARD, SIM, RAM], [read("GPU-a", observed={"robin": size * GIB}, base_bytes=GIB, per_process=True)]
        )
    ledger.remove("robin", 5, 1)
    priors = ledger.priors()
    (debt,) = priors["GPU-a"].debts
    assert (debt.holder, debt.bytes, debt.floor_bytes) == ("slot:robin", 8 * GIB, GIB)
    assert priors["sim0"] == Prior()
    ledger.put_devices([CARD, SIM, RAM], [read("GPU-a", residual_bytes=8 * GIB, quarantined_bytes=8 * GIB)])
    card = ledger.devices()[0]
    assert (card.quarantined_bytes, card.residual_bytes, card.settling_bytes) == (8 * GIB, 8 * GIB, 0)
    assert free(ledger)["GPU-a"] == 15
    with pytest.raises(ActivationRefused, match="ended holders, not given back by the driver 8GiB"):
        ledger.admit(row("next", card=16))
    ledger.put_devices([CARD, SIM, RAM], [read("GPU-a", paid=(debt.id,))])
    assert ledger.priors()["GPU-a"].debts == ()
    assert free(ledger)["GPU-a"] == 23


def test_a_holder_that_was_never_seen_owes_what_it_claimed_and_floors_are_below_other_debts(ledger: NodeLedger) -> None:
    for name in ("robin", "wren"):
        ledger.admit(row(name, card=5))
    ledger.put_devices([CARD, SIM, RAM], [read("GPU-a", base_bytes=GIB)])
    ledger.remove("robin", 5, 1)
    # What robin left is loose now: it must not become the floor that wren's memory is measured from.
    ledger.put_devices([CARD, SIM, RAM], [read("GPU-a", base_bytes=6 * GIB)])
    ledger.remove("wren", 5, 1)
    assert [(debt.bytes, debt.floor_bytes) for debt in ledger.priors()["GPU-a"].debts] == [(5 * GIB, GIB)] * 2


def test_where_only_the_whole_is_measured_one_holder_begins_at_a_time(ledger: NodeLedger) -> None:
    devices = [CARD, SIM, RAM, WHOLE]
    ledger.put_devices(devices, [read("GPU-w", per_process=False)])
    ledger.admit(LedgerRow("robin", 5, 1, "slot:robin", {"GPU-w": 4 * GIB}, 100, 77, 1))
    with pytest.raises(
        ActivationRefused,
        match=r"GPU-w: 4GiB wanted, 20GiB free; held by slot:robin 4GiB; its driver gives no figures per process, so "
        r"one holder begins at a time: slot:robin began 0\.\d s ago, the last reading is 0\.\d s old$",
    ) as caught:
        ledger.admit(LedgerRow("wren", 5, 2, "slot:wren", {"GPU-w": 4 * GIB}, 101, 77, 1))
    assert caught.value.settling_bytes == 4 * GIB, "a reading is due, and then it is worth another try"
    assert ledger.priors()["GPU-w"].new == ("robin",)
    before = time.monotonic() - 60
    ledger.put_devices(devices, [read("GPU-w", per_process=False, at_s=before)])
    with pytest.raises(ActivationRefused):
        ledger.admit(LedgerRow("wren", 5, 2, "slot:wren", {"GPU-w": 4 * GIB}, 101, 77, 1))
    ledger.put_devices(devices, [read("GPU-w", per_process=False, observed={"robin": GIB})])
    ledger.admit(LedgerRow("wren", 5, 2, "slot:wren", {"GPU-w": 4 * GIB}, 101, 77, 1))
    assert ledger.priors()["GPU-w"].new == ("wren",)
    assert ledger.priors()["GPU-w"].observed == {"robin": GIB}


def test_where_processes_are_measured_holders_begin_as_they_come(ledger: NodeLedger) -> None:
    ledger.put_devices([CARD, SIM, RAM], [read("GPU-a")])
    for number in range(3):
        ledger.admit(row(f"lease-{number}", seq=number, card=2))


def test_a_device_without_a_reading_keeps_its_last_and_a_lease_without_one_is_unmeasured(ledger: NodeLedger) -> None:
    ledger.admit(row("robin", card=1))
    ledger.put_devices(
        [CARD], [LedgerReading("GPU-a", 1.0, foreign_bytes=GIB, observed={"robin": 2 * GIB, "unknown": GIB})]
    )
    ledger.put_devices([CARD])
    (card,) = ledger.devices()
    assert (card.foreign_bytes, card.observed_bytes, card.read_at_s) == (GIB, 2 * GIB, 1.0)
    ledger.put_devices([CARD], [LedgerReading("GPU-a", 2.0)])
    (card,) = ledger.devices()
    assert (card.foreign_bytes, card.observed_bytes, card.read_at_s) == (0, None, 2.0)


def test_a_device_that_comes_back_still_knows_its_holders(ledger: NodeLedger) -> None:
    ledger.admit(row("robin", card=20))
    ledger.put_devices([SIM])
    assert free(ledger) == {"sim0": 8}
    ledger.put_devices([CARD, SIM])
    assert free(ledger)["GPU-a"] == 3


def test_devices_come_in_index_order_with_all_they_are(ledger: NodeLedger) -> None:
    devices = ledger.devices()
    assert [device.id for device in devices] == ["GPU-a", "sim0", "cpu"]
    card = devices[0]
    assert (card.kind, card.name, card.index, card.measured) == ("cuda", "a card", 0, True)
    assert (card.total_bytes, card.reserve_bytes, card.read_at_s) == (24 * GIB, GIB, None)


def test_the_highest_epoch_is_remembered_from_rows_and_from_the_store(ledger: NodeLedger) -> None:
    assert ledger.highest_epoch() == 0
    ledger.admit(row(epoch=7, sim0=1))
    ledger.remove("lease-1", 7, 1)
    assert ledger.highest_epoch() == 7
    ledger.note_epoch(9)
    ledger.note_epoch(8)
    assert ledger.highest_epoch() == 9


def test_a_refusal_by_a_few_bytes_is_told_in_bytes(ledger: NodeLedger) -> None:
    with pytest.raises(
        ActivationRefused, match=r"sim0: 8589934593 bytes wanted, 8589934592 bytes free; held by nobody"
    ):
        ledger.admit(LedgerRow("lease-1", 5, 1, "slot:x", {"sim0": 8 * GIB + 1}, 100, 77, 1))


def test_a_negative_claim_is_a_mistake_and_not_room_for_others(ledger: NodeLedger) -> None:
    with pytest.raises(ValueError, match="wants -"):
        ledger.admit(row(sim0=-1))


def test_rows_outlive_the_connection(tmp_path: Path) -> None:
    for expected in range(3):
        with NodeLedger(tmp_path / "node.sqlite") as ledger:
            ledger.put_devices([SIM])
            assert len(ledger.rows()) == expected
            ledger.admit(row(f"lease-{expected}", sim0=2))


def test_the_file_is_its_owners_alone_unless_a_group_shares_the_directory(tmp_path: Path) -> None:
    for mode, expected in ((0o700, 0o600), (0o2770, 0o660)):
        directory = tmp_path / f"{mode:o}"
        directory.mkdir()
        directory.chmod(mode)
        with NodeLedger(directory / "node.sqlite") as ledger:
            ledger.put_devices([SIM])
            files = list(directory.iterdir())
            assert len(files) == 3  # the file, its log and the log's index
            assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {expected}


def test_a_file_that_is_no_ledger_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "node.sqlite").write_bytes(b"certainly no database, " * 100)
    with pytest.raises(LedgerDamaged, match=r"node\.sqlite is not a ledger or is damaged"):
        NodeLedger(tmp_path / "node.sqlite")


def test_a_ledger_of_another_version_is_refused_with_both_numbers(tmp_path: Path) -> None:
    NodeLedger(tmp_path / "node.sqlite").close()
    with sqlite3.connect(tmp_path / "node.sqlite") as other:
        other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(LedgerDamaged, match=r"its schema is 99, this is 3"):
        NodeLedger(tmp_path / "node.sqlite")


def test_a_file_that_another_process_is_just_making_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SQLite itself does not wait here: the change to a write-ahead log fails at once while somebody writes.
    maker = sqlite3.connect(tmp_path / "node.sqlite", isolation_level=None)
    maker.execute("BEGIN IMMEDIATE")
    pauses: list[float] = []

    def meanwhile_it_ends(pause_s: float) -> None:
        pauses.append(pause_s)
        maker.execute("ROLLBACK")

    monkeypatch.setattr(time, "sleep", meanwhile_it_ends)
    with NodeLedger(tmp_path / "node.sqlite") as ledger:
        assert ledger.rows() == []
    assert len(pauses) == 1
    maker.close()


def test_a_ledger_locked_by_another_process_for_too_long_is_said_to_be_busy(
    ledger: NodeLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "BUSY_TIMEOUT_S", 0.05)
    with NodeLedger(ledger.path) as other:
        ledger._db.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerBusy, match=r"stayed locked by another process for 0\.05 s"):
            other.admit(row(sim0=1))
        assert other.rows() == []  # reading needs no lock
        ledger._db.execute("ROLLBACK")
        other.admit(row(sim0=1))


def test_a_full_disk_is_said_and_what_was_entered_stays_and_can_be_removed(ledger: NodeLedger) -> None:
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages + 1}")

    def fill() -> None:
        for number in range(10_000):
            ledger.admit(LedgerRow(f"lease-{number}", 5, number, "slot:" + "x" * 500, {"sim0": 1}, 100, 77, 1))

    with pytest.raises(StateDirError, match=r"node\.sqlite cannot grow: its disk is full; make room"):
        fill()
    entered = ledger.rows()
    assert entered
    assert free(ledger)["sim0"] == 8 - len(entered) / GIB
    assert ledger.remove("lease-0", 5, 0)


def test_a_connection_used_by_another_thread_is_the_callers_mistake_and_stays_one(ledger: NodeLedger) -> None:
    raised: list[BaseException] = []

    def use() -> None:
        try:
            ledger.rows()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert isinstance(raised[0], sqlite3.ProgrammingError)


class CheckedBefore(NodeLedger):
    """A ledger that checks first and writes in another transaction."""

    def admit(self, row: LedgerRow, adopts: Mapping[str, int] | None = None) -> None:
        with self._transaction(write=False):
            self._check_room(row, {})
        self.between()
        with self._transaction():
            self._insert(row)

    def between(self) -> None:
        """Where another process may get in."""


class InterruptedLedger(NodeLedger):
    """The real one, which lets another process try to get in between check and entry."""

    def _insert(self, row: LedgerRow) -> None:
        self.between()
        super()._insert(row)

    def between(self) -> None:
        """Where another process may try."""


@pytest.mark.parametrize(("kind", "oversubscribed"), [(InterruptedLedger, False), (CheckedBefore, True)])
def test_nobody_gets_in_between_the_check_and_the_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[InterruptedLedger | CheckedBefore], oversubscribed: bool
) -> None:
    monkeypatch.setattr(ledger_file, "BUSY_TIMEOUT_S", 0.05)
    tries = []
    with kind(tmp_path / "node.sqlite") as ours, NodeLedger(tmp_path / "node.sqlite") as theirs:
        ours.put_devices([SIM])

        def intrude() -> None:
            try:
                theirs.admit(row("theirs", sim0=8))
                tries.append("entered")
            except LedgerBusy:
                tries.append("waited")

        monkeypatch.setattr(ours, "between", intrude)
        ours.admit(row("ours", sim0=8))
        assert tries == ["entered" if oversubscribed else "waited"]
        assert (free(ours)["sim0"] < 0) is oversubscribed


SIZES = st.integers(min_value=0, max_value=10)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, 5), SIZES, SIZES),
        st.tuples(st.just("remove"), st.integers(0, 5)),
        st.tuples(st.just("read"), SIZES, SIZES, st.dictionaries(st.integers(0, 5), SIZES)),
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_happens_the_books_agree_with_a_simple_account(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, ...]]
) -> None:
    card, sim = (Device(name, DeviceKind.CUDA, name, n, 20, 2, measured=True) for n, name in enumerate(("card", "sim")))
    rows: dict[str, dict[str, int]] = {}
    seen: dict[str, int] = {}
    foreign = residual = 0
    settling = {"card": 0, "sim": 0}
    with NodeLedger(tmp_path_factory.mktemp("ledger") / "node.sqlite") as ledger:
        ledger.put_devices([card, sim])
        for step in steps:
            held = {
                "card": sum(max(claims["card"], seen.get(lease, 0)) for lease, claims in rows.items())
                + settling["card"],
                "sim": sum(claims["sim"] for claims in rows.values()) + settling["sim"],
            }
            expected = {"card": 18 - foreign - residual - held["card"], "sim": 18 - held["sim"]}
            assert {device.id: device.free_bytes for device in ledger.devices()} == expected
            match step:
                case ("admit", number, on_card, on_sim):
                    lease, claims = f"lease-{number}", {"card": on_card, "sim": on_sim}
                    entry = LedgerRow(lease, 1, 1, lease, claims, 1, 1, 1)
                    if lease in rows:
                        if rows[lease] == claims:
                            ledger.admit(entry)
                        else:
                            with pytest.raises(StaleFence):
                                ledger.admit(entry)
                    elif on_card <= expected["card"] and on_sim <= expected["sim"]:
                        ledger.admit(entry)
                        rows[lease] = claims
                    else:
                        with pytest.raises(ActivationRefused):
                            ledger.admit(entry)
                case ("remove", number):
                    lease = f"lease-{number}"
                    assert ledger.remove(lease, 1, 1) is (lease in rows)
                    if (gone := rows.pop(lease, None)) is not None:
                        settling["card"] += max(gone["card"], seen.pop(lease, 0))
                        settling["sim"] += gone["sim"]
                case ("read", foreign, residual, observed):
                    observed = {f"lease-{number}": size for number, size in observed.items()}
                    seen = {lease: size for lease, size in observed.items() if lease in rows}
                    settling["card"] = 0
                    reading = LedgerReading("card", time.monotonic(), foreign, residual, observed)
                    ledger.put_devices([card, sim], [reading])
