"""The same world and checker, driven by hypothesis, which looks for the shortest history that breaks a promise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.faults.books import Violation
from tests.faults.checker import Checker
from tests.faults.server import ServerError
from tests.faults.store import ScriptServer, VirtualStore
from tests.faults.world import World


class LedgerMachine(RuleBasedStateMachine):
    """A rule for each thing that may happen; hypothesis also decides every choice in it."""

    server: ScriptServer

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    @initialize(chance=st.randoms(use_true_random=False))
    def begin(self, chance: Random) -> None:
        self.world = World(VirtualStore(self.server), chance, Checker().see)
        self.world.nodes.begin()

    @precondition(lambda self: self.world is not None)
    @rule(
        part=st.sampled_from(("askers", "askers", "nodes", "weather")), move=st.integers(0, 15), ms=st.integers(0, 2500)
    )
    def happen(self, part: str, move: int, ms: int) -> None:
        assert self.world is not None
        moves = getattr(self.world, part).moves()
        self.world.wait(ms)
        moves[move % len(moves)][1]()

    def teardown(self) -> None:
        if self.world is not None:
            self.world.settle()


@pytest.mark.slow
def test_no_machine_breaks_a_promise(fault_server: ScriptServer) -> None:
    LedgerMachine.server = fault_server
    run_state_machine_as_test(LedgerMachine, settings=_settings(100))


def test_the_machine_finds_what_the_histories_find(fault_socket: Path) -> None:
    with ScriptServer(fault_socket, {"if known then": "if false then"}) as server:
        LedgerMachine.server = server
        with pytest.raises((Violation, ServerError)):
            run_state_machine_as_test(LedgerMachine, settings=_settings(100, phases=[Phase.generate]))


def _settings(examples: int, phases: Sequence[Phase] = tuple(Phase)) -> settings:
    return settings(
        phases=phases,
        max_examples=examples,
        stateful_step_count=60,
        derandomize=True,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
