from __future__ import annotations

from gpuboss.accounts import account
from gpuboss.devices import Reading
from gpuboss.ledger_rows import LedgerRow

GPU = "GPU-1"


def row(lease_id: str, **shares: int) -> LedgerRow:
    named = {GPU if device == "gpu" else device: size for device, size in shares.items()}
    return LedgerRow(lease_id, 1, 1, f"job:{lease_id}", named, pid=1, start_ticks=1, pid_namespace=1)


def test_a_leases_processes_are_observed_and_the_rest_is_foreign() -> None:
    reading = Reading(GPU, 100, {10: 30, 11: 5, 99: 20}, at_s=7.0)
    (found,) = account([reading], [row("a", gpu=25)], {"a": {10, 11}})
    assert (found.observed, found.foreign_bytes, found.residual_bytes, found.at_s) == ({"a": 35}, 65, 0, 7.0)


def test_use_where_the_lease_has_no_share_is_residual() -> None:
    reading = Reading("cpu", 100, {10: 30}, at_s=0.0)
    (found,) = account([reading], [row("a", gpu=25)], {"a": {10}})
    assert (found.observed, found.foreign_bytes, found.residual_bytes) == ({}, 70, 30)


def test_a_holder_that_uses_nothing_yet_is_observed_to_use_nothing() -> None:
    (found,) = account([Reading(GPU, 40, {99: 40}, at_s=0.0)], [row("a", gpu=25)], {"a": {10}})
    assert (found.observed, found.foreign_bytes) == ({"a": 0}, 40)


def test_without_figures_per_process_only_what_exceeds_the_claims_is_foreign() -> None:
    rows = [row("a", gpu=25), row("b", gpu=30)]
    (found,) = account([Reading(GPU, 60, {}, at_s=0.0, complete=False)], rows, {})
    assert (found.observed, found.foreign_bytes) == ({}, 5)
    (found,) = account([Reading(GPU, 40, {}, at_s=0.0, complete=False)], rows, {})
    assert found.foreign_bytes == 0


def test_figures_that_exceed_the_whole_leave_nothing_foreign() -> None:
    (found,) = account([Reading("cpu", 10, {10: 30}, at_s=0.0)], [row("a", cpu=5)], {"a": {10}})
    assert (found.observed, found.foreign_bytes) == ({"a": 30}, 0)


def test_what_nobody_measures_has_no_reading() -> None:
    assert account([Reading("sim0", None, {}, at_s=0.0)], [row("a", sim0=5)], {"a": {10}}) == []
