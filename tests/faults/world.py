"""A world of nodes, askers and holders around a real store, in which everything goes wrong that can.

Used by `tests.faults.campaign` and the tests; plays clients (`askers`), keepers and node ledgers (`nodes`) and the
weather (`faults`), step by step, by one source of chance, so that a seed gives the same history again. It does not
judge: every step goes into the trace, which `tests.faults.checker` reads. Where a real client or keeper is bound to an
order, such as "enter it into the node's books, then use it", so are those here; between them anything may happen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from gpuboss.scripts import Script
from tests.faults.askers import TTLS_MS, Askers
from tests.faults.nodes import Nodes
from tests.faults.recording import Recorder
from tests.faults.store import VirtualStore
from tests.faults.weather import Weather

__all__ = ["Sent", "World"]

Json = dict[str, Any]
Move = tuple[int, Callable[[], None]]


class Sent(NamedTuple):
    """A command that went out."""

    script: Script
    told: Json
    life: int
    """The life of the server that it was sent to."""
    keeper: object
    """The node whose keeper sent it; None for a client's."""


class World(Recorder):
    """One history. `calm`: without faults. `guard`: whether the nodes' own books refuse what does not fit."""

    def __init__(
        self,
        store: VirtualStore,
        chance: random.Random,
        see: Callable[[Json], None],
        *,
        calm: bool = False,
        guard: bool = True,
    ) -> None:
        super().__init__(store, see, calm=calm)
        self.chance = chance
        self.calm = calm
        self.guard = guard
        self.late: list[Sent] = []
        """Commands that are under way still."""
        self.past: list[Sent] = []
        """Commands that may come a second time."""
        self.saved = False
        """Whether there is a snapshot file."""
        self.nodes = Nodes(self)
        self.askers = Askers(self)
        self.weather = Weather(self)
        moves = [*self.askers.moves(), *self.nodes.moves(), *self.weather.moves()]
        self._moves = [move for _, move in moves]
        self._weights = _sums(weight for weight, _ in moves)

    def run(self, steps: int) -> None:
        """Take so many steps, then see that the ledger comes to rest."""
        self.nodes.begin()
        for _ in range(steps):
            self.step()
        self.settle()

    def step(self) -> None:
        """One step, by chance."""
        chance = self.chance
        self.wait(int(chance.random() * 400))
        (move,) = chance.choices(self._moves, cum_weights=self._weights)
        move()

    def settle(self) -> None:
        """Everybody ends; with beats and time alone the ledger must become empty."""
        self.askers.all_leave()
        self.nodes.all_return()
        for _ in range(3):
            self.nodes.beat_all()
        for _ in range(max(TTLS_MS) // 2000 + 1):
            self.wait(2000)
            self.send(Script.TICK, {}, sure=True)
        for _ in range(2):
            self.nodes.beat_all()
        self.see({"t": "end"})

    def send(self, script: Script, told: Json, *, sure: bool = False, keeper: object = None) -> Json | None:
        """A command and its reply; None when the caller hears nothing: it is lost, or late, or its reply is lost.

        `sure`: no fault may befall it. `keeper`: the node whose keeper sends it.
        """
        if not self.calm and not sure:
            sent = Sent(script, told, self.store.life, keeper)
            self.past.append(sent)
            luck = self.chance.random()
            if luck < 0.12:
                befalls = "lost" if luck < 0.02 else "late" if luck < 0.05 else "reply lost" if luck < 0.09 else "twice"
                self.see({"t": "net", "what": befalls})
                if befalls == "late":
                    self.late.append(sent)
                elif befalls != "lost":
                    self.deliver(script, told, heard=False)
                if befalls != "twice":
                    return None
        return self.deliver(script, told)


def _sums(weights: Any) -> list[int]:
    total, sums = 0, []
    for weight in weights:
        total += weight
        sums.append(total)
    return sums
