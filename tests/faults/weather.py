"""Faults of a history: of the store, of the clock, of the net between, of whole machines.

Part of `tests.faults.world`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuboss.scripts import Script
from tests.faults.nodes import MIB, Nodes

if TYPE_CHECKING:
    from tests.faults.world import Move, Sent, World

__all__ = ["Weather"]

_HOUR_MS = 3_600_000


class Weather:
    """What goes wrong, and what shows how the store stands."""

    def __init__(self, world: World) -> None:
        self._world = world

    def moves(self) -> list[Move]:
        """What may happen, and how often."""
        shows: list[Move] = [(2, self._snapshot), (1, self._audit)]
        if self._world.calm:
            return shows
        return [
            *shows,
            *((4, self._repeat), (3, self._arrive), (1, self._wipe), (1, self._restart), (1, self._save)),
            *((1, self._roll_back), (1, self._hang), (1, self._jump), (1, self._resize_device), (1, self._come_and_go)),
        ]

    def _snapshot(self) -> None:
        node = self._world.nodes.any_node()
        if node is not None:
            self._world.send(Script.SNAPSHOT, {"node": node.name}, sure=True)

    def _audit(self) -> None:
        self._world.send(Script.AUDIT, {}, sure=True)

    def _repeat(self) -> None:
        """A command comes a second time: one of those sent last, or of all."""
        past = self._world.past
        if not past:
            return
        sent = self._world.chance.choice(past[-15:] if self._world.chance.random() < 0.7 else past)
        # What a client tries again it sends to the server that is there now; a keeper begins anew instead.
        if sent.keeper is None:
            self._world.deliver(sent.script, sent.told, heard=False)
        elif sent.life == self._world.store.life:
            self._arrives(sent)

    def _arrive(self) -> None:
        """A command that was under way comes."""
        late = self._world.late
        if late:
            self._arrives(late.pop(int(self._world.chance.random() * len(late))))

    def _arrives(self, sent: Sent) -> None:
        """As it was sent. An earlier life's connection is gone; something in between that keeps it open is turned away.

        A keeper's command does not outlive its machine.
        """
        life, up = self._world.store.life, self._world.nodes.up.values()
        if sent.keeper is not None and sent.keeper not in up:
            return
        if sent.life == life or (sent.script is not Script.NODE_SYNC and any(node.synced_life == life for node in up)):
            self._world.deliver(sent.script, sent.told, life=sent.life, heard=False)

    def _wipe(self) -> None:
        self._world.store.wipe()
        self._note("wipe")

    def _restart(self) -> None:
        self._world.store.restart()
        self._note("restart")

    def _save(self) -> None:
        self._world.store.save()
        self._note("save")

    def _roll_back(self) -> None:
        if self._world.saved:
            self._world.store.roll_back()
            self._note("roll_back")

    def _note(self, what: str) -> None:
        self._world.saved = self._world.saved or what == "save"
        self._world.see({"t": "store", "what": what, "life": self._world.store.life})

    def _hang(self) -> None:
        """Nobody renews for a while."""
        for _ in range(1 + int(self._world.chance.random() * 11)):
            self._world.wait(2000)
            self._world.send(Script.TICK, {}, sure=True)

    def _jump(self) -> None:
        sign = self._world.chance.choice((-1, 1))
        self._world.store.now_ms += sign * (_HOUR_MS + int(self._world.chance.random() * 1000))
        self._world.see({"t": "jump"})

    def _resize_device(self) -> None:
        """A device gives less than before, or more again; or strangers use some of it."""
        world, node = self._world, self._world.nodes.any_node()
        if node is None:
            return
        device = world.chance.choice(list(node.devices.values()))
        part = world.chance.random()
        if device.measured and part < 0.5:
            device.foreign = int(device.full * part) // MIB * MIB
        else:
            device.total = int(device.full * max(part, 0.3)) // MIB * MIB
            world.nodes.read(node)
            world.see({"t": "device", "device": device.name, "cap": device.total})

    def _come_and_go(self) -> None:
        """A node loses its power, or one comes."""
        nodes: Nodes = self._world.nodes
        down = [name for name in nodes.names if name not in nodes.up]
        if down and (len(nodes.up) == 1 or self._world.chance.random() < 0.6):
            nodes.join(self._world.chance.choice(down))
        elif len(nodes.up) > 1:
            node = nodes.any_node()
            assert node is not None
            nodes.leave(node)
            self._world.askers.leave_with(node)
