from __future__ import annotations

import pytest

from gpuboss.identity import Liveness, ProcessIdentity
from gpuboss.leases import Fence, LeaseState
from gpuboss.ledger_rows import LedgerRow
from gpuboss.sweep import StoredLease, dead_leases, dead_rows

OWNER = ProcessIdentity("boot", 7, 1, 1)


def lease(state: LeaseState) -> StoredLease:
    return StoredLease("a", state, None if state is LeaseState.QUEUED else Fence(1, 1), OWNER)


def is_dead(state: LeaseState, owner: Liveness, *, row: bool = False, vanished: bool = False) -> bool:
    rows, gone = ({"a"} if row else set()), ({"a"} if vanished else set())
    return bool(dead_leases([lease(state)], rows, gone, lambda _: owner))


@pytest.mark.parametrize("state", [LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.ENDING, LeaseState.QUEUED])
def test_1_a_lease_whose_row_stands_is_never_dead(state: LeaseState) -> None:
    assert not is_dead(state, Liveness.DEAD, row=True)


@pytest.mark.parametrize("state", [LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.ENDING])
def test_2_a_lease_whose_row_has_vanished_is_over_though_its_asker_lives(state: LeaseState) -> None:
    assert is_dead(state, Liveness.ALIVE, vanished=True)


@pytest.mark.parametrize("state", [LeaseState.ACTIVE, LeaseState.ENDING])
def test_3_without_a_row_it_is_over(state: LeaseState) -> None:
    assert is_dead(state, Liveness.ALIVE)


@pytest.mark.parametrize("state", [LeaseState.QUEUED, LeaseState.GRANTED])
@pytest.mark.parametrize(("owner", "dead"), [(Liveness.ALIVE, False), (Liveness.UNKNOWN, False), (Liveness.DEAD, True)])
def test_4_before_it_is_active_its_asker_counts(state: LeaseState, owner: Liveness, dead: bool) -> None:
    assert is_dead(state, owner) is dead


def test_a_row_is_dead_when_its_process_is_known_to_be() -> None:
    row = LedgerRow("a", 1, 1, "job:a", {"sim0": 1}, pid=7, start_ticks=1, pid_namespace=1)
    assert dead_rows([row], lambda _, __: Liveness.DEAD) == [row]
    assert dead_rows([row], lambda _, __: Liveness.UNKNOWN) == []
    assert dead_rows([row], lambda _, __: Liveness.ALIVE) == []


def test_a_lease_held_by_word_has_no_process_that_could_be_dead() -> None:
    row = LedgerRow("a", 1, 1, "job:a", {"sim0": 1})
    assert dead_rows([row], lambda _, __: Liveness.DEAD) == []
