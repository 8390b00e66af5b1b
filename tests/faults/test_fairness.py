"""Order and pre-emption by the thousand: nobody is passed who must not be, and nobody who had to go comes back too
early."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults import events, queue_rules
from tests.faults.books import Violation
from tests.faults.campaign import MUST_HAPPEN, run_many
from tests.faults.fairness import serve_all
from tests.faults.history import BrokenHistory
from tests.faults.mutants import MUTANTS
from tests.faults.store import ScriptServer
from tests.faults.storms import weather_storm


@pytest.mark.slow
@pytest.mark.parametrize("yielding", [False, True], ids=["nobody yields", "half of them yield"])
def test_a_thousand_waiters_are_served_in_their_order(fault_server: ScriptServer, yielding: bool) -> None:
    counts = serve_all(fault_server, 1, yielding=yielding)
    assert counts["queued"] > 900
    assert bool(counts.get("notice")) == yielding


def test_without_earmarks_somebody_is_passed(fault_socket: Path) -> None:
    (off,) = (mutant for mutant in MUTANTS if mutant.off == "earmarks")
    with ScriptServer(fault_socket, off.overrides) as server, pytest.raises(Violation, match="comes first"):
        serve_all(server, 1, waiters=100)


@pytest.mark.slow
def test_two_hundred_storms_come_to_rest_without_ping_pong() -> None:
    outcome = run_many("storm", range(200), workers=2)
    assert not outcome.broken, "\n".join(map(str, outcome.broken))
    assert all(outcome.counts[what] for what in MUST_HAPPEN["storm"]), outcome.counts


def test_ping_pong_is_seen(fault_socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (off,) = (mutant for mutant in MUTANTS if mutant.off == "allowed victims")
    monkeypatch.setattr(events, "check_disturbed", lambda *_: None)  # it would say so before it comes to that
    monkeypatch.setattr(events, "may_have", lambda *_: True)
    monkeypatch.setattr(queue_rules, "first_grantable", lambda *_: None)
    said = ""
    with ScriptServer(fault_socket, off.overrides) as server:
        for seed in range(100):
            try:
                weather_storm(server, seed)
            except BrokenHistory as broken:
                said = broken.reason
                break
    assert re.search("and now .* must go for", said), said
