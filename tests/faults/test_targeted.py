"""The two layers that cover for each other, one by one: what only the store's `ending` prevents, what only a node's
book does."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from gpuboss.scripts import Script
from tests.faults.checker import Checker, Violation
from tests.faults.mutants import MUTANTS
from tests.faults.nodes import MIB
from tests.faults.people import Client, Want
from tests.faults.store import ScriptServer, VirtualStore
from tests.faults.world import World

Json = dict[str, Any]


class _QuietWorld(World):
    """Nothing is lost on its way."""

    def send(self, script: Script, told: Json, *, sure: bool = False, keeper: object = None) -> Json | None:
        return self.deliver(script, told)


class _Scene:
    """A world in which nothing happens by chance."""

    def __init__(self, server: ScriptServer, *, guard: bool = True) -> None:
        self.checker = Checker()
        self.world = _QuietWorld(VirtualStore(server), random.Random(1), self.checker.see, guard=guard)
        self.node = self.world.nodes.up["n0"]
        self.client = Client(99, "runner", self.node)
        self.world.askers._clients = {self.client.owner: self.client}
        self.world.nodes.begin()

    def ask(self, lease_id: str) -> Want:
        """For most of one device."""
        told = self.world.askers._terms(self.client, lease_id)
        told |= {"priority": 10, "preemptible": False, "options": json.dumps([{"n0/sim0": 80 * MIB}])}
        want = self.client.wants[lease_id] = Want(self.client, told)
        self.world.askers._hear(want, self.world.deliver(Script.ACQUIRE, told))
        return want

    def enter_and_use(self, want: Want) -> None:
        """Its holder is entered into the node's book, and begins."""
        assert want.is_granted
        self.world.askers._enter()
        if want.row is not None:
            self.world.askers._begin()

    def nobody_renews(self) -> None:
        """For longer than a lease stands without it."""
        for _ in range(10):
            self.world.wait(2000)
            self.world.deliver(Script.TICK, {})


def test_without_ending_the_store_frees_what_lives(fault_socket: Path) -> None:
    (off,) = (mutant for mutant in MUTANTS if mutant.off == "ending")
    with ScriptServer(fault_socket, off.overrides) as server:
        scene = _Scene(server)
        scene.enter_and_use(scene.ask("a"))
        with pytest.raises(Violation, match="time made freed of a, which is active"):
            scene.nobody_renews()


def test_with_ending_it_counts_on_and_is_revived(fault_server: ScriptServer) -> None:
    scene = _Scene(fault_server)
    scene.enter_and_use(scene.ask("a"))
    scene.nobody_renews()
    assert scene.checker.books.leases["a"].state == "ending"
    waiting = scene.ask("b")
    assert waiting.view is not None
    assert waiting.view["state"] == "queued"
    scene.world.nodes.sweep(scene.node)
    assert scene.checker.books.leases["a"].state == "active"


@pytest.mark.parametrize("guard", [True, False])
def test_only_the_nodes_book_stops_a_grant_that_a_store_forgot(fault_server: ScriptServer, guard: bool) -> None:
    scene = _Scene(fault_server, guard=guard)
    forgotten = scene.ask("a")
    scene.world.weather._wipe()
    scene.world.nodes.begin()  # nothing runs yet, so the node has nothing to tell
    second = scene.ask("b")
    assert second.is_granted
    second.view, view = None, second.view
    scene.enter_and_use(forgotten)
    second.view = view
    if guard:
        scene.world.askers._enter()
        assert second.row is None
        assert scene.checker.counts["refused by the node"] == 1
    else:
        with pytest.raises(Violation, match="n0/sim0 is physically oversubscribed"):
            scene.enter_and_use(second)
