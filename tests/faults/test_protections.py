"""Each protection of the ledger, switched off: the histories must go wrong, and the checker must say why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.checker import MemoryChecker
from tests.faults.history import BrokenHistory, play
from tests.faults.mutants import MUTANTS, Mutant
from tests.faults.store import ScriptServer

_HISTORIES = 400


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.off)
def test_without_it_a_history_goes_wrong(fault_socket: Path, mutant: Mutant) -> None:
    others: set[str] = set()
    with ScriptServer(fault_socket, mutant.overrides) as server:
        for seed in range(_HISTORIES):
            try:
                play(server, seed, guard=mutant.guard, judge=mutant.judge)
            except BrokenHistory as broken:
                if re.search(mutant.red, broken.reason):
                    return
                others.add(broken.reason)
    raise AssertionError(f"{_HISTORIES} histories without it, and none said {mutant.red!r}, but {sorted(others)[:5]}")


def test_a_mutant_that_changes_nothing_is_an_error(fault_socket: Path) -> None:
    with pytest.raises(AssertionError, match="no script says"):
        ScriptServer(fault_socket, {"what no script ever said": ""})


def test_the_nodes_books_alone_keep_memory_safe(fault_socket: Path) -> None:
    """So histories that look at memory alone do not miss `ending`; the whole checker does, and `test_targeted`."""
    (off,) = (mutant for mutant in MUTANTS if mutant.off == "ending")
    with ScriptServer(fault_socket, off.overrides) as server:
        for seed in range(100):
            play(server, seed, judge=MemoryChecker)
