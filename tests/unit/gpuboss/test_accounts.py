from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuboss.accounts import MOST_FOREIGN, QUARANTINE_AFTER_S, account
from gpuboss.devices import Reading
from gpuboss.leases import ForeignUse
from gpuboss.ledger_rows import Debt, LedgerReading, LedgerRow, Prior

GPU = "GPU-1"
EVERYBODY = {pid: f"program-{pid}" for pid in range(100)}


def row(lease_id: str, **shares: int) -> LedgerRow:
    named = {GPU if device == "gpu" else device: size for device, size in shares.items()}
    return LedgerRow(lease_id, 1, 1, f"job:{lease_id}", named, pid=1, start_ticks=1, pid_namespace=1)


def explain(
    reading: Reading,
    rows: list[LedgerRow],
    families: Mapping[str, Collection[int]] | None = None,
    prior: Prior | None = None,
    living: Mapping[int, str] = EVERYBODY,
) -> LedgerReading:
    (found,) = account([reading], rows, families or {}, living, {reading.device_id: prior} if prior else {})
    return found.reading


def whole(used: int, *, at_s: float = 100.0) -> Reading:
    """What a driver says that gives no figures per process."""
    return Reading(GPU, used, {}, at_s, complete=False)


# -- 1: figures per process --------------------------------------------------------------------------------------------


def test_a_leases_processes_are_observed_and_the_rest_is_foreign() -> None:
    found = explain(Reading(GPU, 100, {10: 30, 11: 5, 99: 20}, at_s=7.0), [row("a", gpu=25)], {"a": {10, 11}})
    assert (found.observed, found.foreign_bytes, found.residual_bytes, found.at_s) == ({"a": 35}, 65, 0, 7.0)


def test_use_where_the_lease_has_no_share_is_residual() -> None:
    found = explain(Reading("cpu", 100, {10: 30}, at_s=0.0), [row("a", gpu=25)], {"a": {10}})
    assert (found.observed, found.foreign_bytes, found.residual_bytes) == ({}, 70, 30)


def test_what_one_process_uses_under_several_leases_counts_once() -> None:
    rows = [row("a", gpu=25), row("b", gpu=25), row("c", cpu=5)]
    families = {"a": {10}, "b": {10}, "c": {10}}
    found = explain(Reading(GPU, 100, {10: 30}, at_s=0.0), rows, families)
    assert (found.observed, found.residual_bytes, found.foreign_bytes) == ({"a": 25, "b": 5}, 0, 70)
    found = explain(Reading(GPU, 100, {10: 80}, at_s=0.0), rows, families)
    assert (found.observed, found.residual_bytes, found.foreign_bytes) == ({"a": 25, "b": 55}, 0, 20)


def test_a_holder_that_uses_nothing_yet_is_observed_to_use_nothing() -> None:
    found = explain(Reading(GPU, 40, {99: 40}, at_s=0.0), [row("a", gpu=25)], {"a": {10}})
    assert (found.observed, found.foreign_bytes) == ({"a": 0}, 40)


def test_figures_that_exceed_the_whole_leave_nothing_foreign() -> None:
    found = explain(Reading("cpu", 10, {10: 30}, at_s=0.0), [row("a", cpu=5)], {"a": {10}})
    assert (found.observed, found.foreign_bytes) == ({"a": 30}, 0)


def test_what_nobody_measures_has_no_reading() -> None:
    assert account([Reading("sim0", None, {}, at_s=0.0)], [row("a", sim0=5)], {"a": {10}}, {}, {}) == []


def test_who_uses_a_device_without_a_lease_is_named_largest_first() -> None:
    reading = Reading(GPU, 100, {10: 30, 11: 5, 12: 20, 13: 9}, at_s=7.0, without_figure=(14,))
    (found,) = account([reading], [row("a", gpu=25)], {"a": {10}}, {10: "ours", 11: "xorg", 12: "blender", 14: "?"}, {})
    assert found.foreign == (ForeignUse(12, "blender", 20), ForeignUse(11, "xorg", 5), ForeignUse(14, "?", None))


def test_of_many_foreign_processes_the_largest_are_named() -> None:
    (found,) = account([Reading(GPU, 10_000, {pid: pid for pid in range(50)}, at_s=7.0)], [], {}, EVERYBODY, {})
    assert [use.pid for use in found.foreign] == list(range(49, 49 - MOST_FOREIGN, -1))


def test_what_the_driver_keeps_of_the_dead_is_residual_and_after_a_while_quarantined() -> None:
    # 3 of 100 are the driver's own. The holder is gone and 60 of its 80 are not back.
    prior = Prior(foreign_bytes=3, base_bytes=3, per_process=True, debts=(Debt(1, "job:a", 80, 3, since_s=100.0),))
    soon = explain(Reading(GPU, 63, {}, at_s=101.0), [], prior=prior)
    assert (soon.foreign_bytes, soon.residual_bytes, soon.quarantined_bytes, soon.paid) == (3, 60, 0, ())
    later = explain(Reading(GPU, 63, {}, at_s=100.0 + QUARANTINE_AFTER_S), [], prior=prior)
    assert (later.foreign_bytes, later.residual_bytes, later.quarantined_bytes, later.paid) == (3, 60, 60, ())
    assert later.base_bytes == 3, "what is kept of the dead does not become the driver's own"
    back = explain(Reading(GPU, 5, {}, at_s=200.0), [], prior=prior)
    assert (back.foreign_bytes, back.residual_bytes, back.quarantined_bytes, back.paid) == (5, 0, 0, (1,))


def test_a_process_that_is_dead_and_still_listed_by_the_driver_is_not_foreign_use_of_somebody() -> None:
    prior = Prior(base_bytes=3, per_process=True, debts=(Debt(1, "job:a", 80, 3, since_s=1.0),))
    reading = Reading(GPU, 100, {10: 80, 12: 17}, at_s=100.0)
    (found,) = account([reading], [], {}, {12: "blender"}, {GPU: prior})
    assert found.foreign == (ForeignUse(12, "blender", 17),)
    assert (found.reading.foreign_bytes, found.reading.quarantined_bytes) == (20, 80)


def test_while_a_holder_dies_its_memory_does_not_become_the_drivers_own() -> None:
    prior = Prior(base_bytes=3, per_process=True, observed={"a": 80})
    dying = explain(Reading(GPU, 83, {}, at_s=1.0), [row("a", gpu=80)], {"a": {10}}, prior, living={})
    assert dying.base_bytes == 3
    alive = explain(Reading(GPU, 83, {}, at_s=1.0), [row("a", gpu=80)], {"a": {10}}, prior, living={10: "a"})
    assert alive.base_bytes == 83


def test_a_debt_is_no_matter_of_a_reading_from_before_it() -> None:
    prior = Prior(base_bytes=3, per_process=True, debts=(Debt(1, "job:a", 80, 3, since_s=100.0),))
    found = explain(Reading(GPU, 83, {}, at_s=99.0), [], prior=prior)
    assert (found.residual_bytes, found.paid, found.base_bytes) == (0, (), 3)


def test_two_debts_do_not_count_the_same_bytes_twice() -> None:
    debts = (Debt(1, "job:a", 80, 3, since_s=0.0), Debt(2, "job:b", 80, 3, since_s=0.0))
    found = explain(Reading(GPU, 93, {}, at_s=50.0), [], prior=Prior(base_bytes=3, per_process=True, debts=debts))
    assert (found.foreign_bytes, found.residual_bytes, found.quarantined_bytes) == (3, 90, 90)


# -- 2: the device as a whole ------------------------------------------------------------------------------------------


def test_at_first_only_what_exceeds_the_claims_is_foreign() -> None:
    rows = [row("a", gpu=25), row("b", gpu=30)]
    found = explain(whole(60), rows)
    assert (found.observed, found.foreign_bytes, found.per_process) == ({"a": 25, "b": 30}, 5, False)
    assert explain(whole(40), rows).foreign_bytes == 0


def test_what_comes_after_a_holders_admission_is_its_own_and_what_was_there_stays_foreign() -> None:
    before = Prior(foreign_bytes=10, base_bytes=10, per_process=False, new=("a",))
    found = explain(whole(22), [row("a", gpu=40)], prior=before)
    assert (found.observed, found.foreign_bytes, found.base_bytes) == ({"a": 12}, 10, 10)
    # Were it not remembered, all 22 would be within the claim, and the 10 would be given out to the next.
    assert explain(whole(22), [row("a", gpu=40)]).foreign_bytes == 0


def test_a_driver_that_ceases_to_tell_of_processes_leaves_what_it_had_told() -> None:
    before = Prior(foreign_bytes=10, base_bytes=3, per_process=True, observed={"a": 12})
    found = explain(whole(30), [row("a", gpu=40)], prior=before)
    assert (found.observed, found.foreign_bytes, found.base_bytes) == ({"a": 20}, 10, 10)


def test_the_next_holder_begins_where_the_one_before_it_had_come_to() -> None:
    before = Prior(foreign_bytes=10, base_bytes=10, per_process=False, observed={"a": 12}, new=("b",))
    found = explain(whole(52), [row("a", gpu=40), row("b", gpu=40)], prior=before)
    assert (found.observed, found.foreign_bytes) == ({"a": 12, "b": 30}, 10)


def test_growth_beyond_the_claims_is_foreign_as_long_as_it_lasts() -> None:
    before = Prior(foreign_bytes=10, base_bytes=10, per_process=False, observed={"a": 40})
    grown = explain(whole(65), [row("a", gpu=40)], prior=before)
    assert (grown.observed, grown.foreign_bytes, grown.base_bytes) == ({"a": 40}, 25, 10)
    after = Prior(grown.foreign_bytes, grown.base_bytes, per_process=False, observed=grown.observed)
    assert explain(whole(50), [row("a", gpu=40)], prior=after).foreign_bytes == 10


def test_with_nobody_there_everything_is_foreign() -> None:
    found = explain(whole(17), [], prior=Prior(foreign_bytes=30, base_bytes=30, per_process=False))
    assert (found.foreign_bytes, found.base_bytes, found.observed) == (17, 17, {})


def test_what_does_not_come_back_is_not_taken_for_the_growth_of_another() -> None:
    debts = (Debt(1, "job:b", 30, 10, since_s=10.0),)
    before = Prior(foreign_bytes=10, base_bytes=10, per_process=False, observed={"a": 12}, debts=debts)
    kept = explain(whole(52, at_s=20.0), [row("a", gpu=40)], prior=before)
    assert (kept.observed, kept.foreign_bytes, kept.residual_bytes, kept.quarantined_bytes) == ({"a": 12}, 10, 30, 30)
    back = explain(whole(22, at_s=20.0), [row("a", gpu=40)], prior=before)
    assert (back.observed, back.foreign_bytes, back.residual_bytes, back.paid) == ({"a": 12}, 10, 0, (1,))


def test_a_reading_from_before_an_end_does_not_call_the_ended_holders_memory_foreign() -> None:
    before = Prior(foreign_bytes=10, base_bytes=10, per_process=False, debts=(Debt(1, "job:b", 30, 10, since_s=10.0),))
    found = explain(whole(40, at_s=9.0), [], prior=before)
    assert (found.foreign_bytes, found.residual_bytes, found.paid) == (10, 0, ())


SIZES = st.integers(min_value=0, max_value=50)


@pytest.mark.parametrize("complete", [True, False])
@given(
    used=SIZES,
    claims=st.lists(SIZES, max_size=3),
    by_pid=st.dictionaries(st.integers(0, 5), SIZES),
    observed=st.lists(SIZES, max_size=3),
    foreign=SIZES,
    base=SIZES,
    debts=st.lists(st.tuples(SIZES, SIZES, st.integers(0, 20)), max_size=3),
    living=st.sets(st.integers(0, 5)),
)
def test_every_byte_in_use_is_somebodys_and_counted_against_what_is_free(
    complete: bool,
    used: int,
    claims: list[int],
    by_pid: dict[int, int],
    observed: list[int],
    foreign: int,
    base: int,
    debts: list[tuple[int, int, int]],
    living: set[int],
) -> None:
    rows = [row(str(number), gpu=claim) for number, claim in enumerate(claims)]
    prior = Prior(
        foreign,
        base,
        per_process=complete,
        observed={str(number): size for number, size in enumerate(observed)},
        debts=tuple(Debt(n, "x", size, floor, since_s) for n, (size, floor, since_s) in enumerate(debts)),
    )
    reading = Reading(GPU, used, by_pid if complete else {}, at_s=10.0, complete=complete)
    families = {str(number): {number} for number in range(len(claims))}
    found = explain(reading, rows, families, prior, living=dict.fromkeys(living, ""))
    settling = sum(debt.bytes for debt in prior.debts if debt.since_s >= reading.at_s)
    counted = found.foreign_bytes + found.residual_bytes + settling
    counted += sum(max(claims[n], found.observed[str(n)]) for n in range(len(claims)))
    assert counted >= used
    assert 0 <= found.quarantined_bytes <= found.residual_bytes
    assert min(found.foreign_bytes, found.base_bytes) >= 0
    if not complete:
        assert all(found.observed[str(n)] <= claim for n, claim in enumerate(claims))
        assert found.foreign_bytes + found.residual_bytes + sum(found.observed.values()) <= used
