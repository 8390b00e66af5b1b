"""Every fault that a history found stays found: its seed is red without the remedy, and green with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuboss.scripts import Script
from tests.faults.history import BrokenHistory, play
from tests.faults.nodes import Node, Nodes
from tests.faults.store import ScriptServer
from tests.regress.seeds import REGRESSIONS, Regression


@pytest.mark.parametrize("regression", REGRESSIONS, ids=lambda regression: str(regression.seed))
def test_it_is_mended(fault_socket: Path, regression: Regression) -> None:
    with ScriptServer(fault_socket) as server:
        play(server, regression.seed)
    with ScriptServer(fault_socket, regression.without) as server, pytest.raises(BrokenHistory) as broken:
        play(server, regression.seed)
    assert re.search(regression.red, broken.value.reason), "another fault: look for another seed, as `seeds` says"


def test_a_keeper_must_judge_by_rows_read_after_the_stores_reply(
    fault_server: ScriptServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a lease that was entered and activated in between looks as if nobody held it."""
    monkeypatch.setattr(Nodes, "_rows_to_judge_by", lambda _self, node: set(node.read_ids))
    monkeypatch.setattr(Nodes, "_bury", _bury_unseen)
    said = [_reason(fault_server, seed) for seed in range(300)]
    assert any("was freed while its holder lives" in reason for reason in said)


def _bury_unseen(self: Nodes, node: Node, *, sure: bool = False) -> None:
    """As a keeper that does not look into its book again."""
    dead, node.to_bury = node.to_bury, []
    if dead:
        self._world.send(Script.CONFIRM_DEAD, {"leases": dead}, sure=sure, keeper=node)


def _reason(server: ScriptServer, seed: int) -> str:
    try:
        play(server, seed)
    except BrokenHistory as broken:
        return broken.reason
    return ""
