"""Clients of a fault history: who asks, waits, changes its mind, gives up, dies. Played as the real ones behave.

Part of `tests.faults.world`; its base, `tests.faults.holders`, plays what is granted to them. Three sorts: runners of
jobs, brokers with slots, and doors, through which programs lease that nobody can see and that renew by their word.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gpuboss.scripts import Script
from tests.faults.holders import Holders
from tests.faults.nodes import MIB, Node, Row
from tests.faults.people import Client, Want

if TYPE_CHECKING:
    from tests.faults.world import Move, World

__all__ = ["TTLS_MS", "Askers"]

Json = dict[str, Any]
_SORTS = ("runner", "runner", "broker", "broker", "door")
TTLS_MS = (3000, 6000, 20_000)
"""Of leases that are held by word alone."""
_PRIORITIES = {"runner": (1, 10, 10, 20, 50), "broker": (5, 10, 10, 20), "door": (10, 50)}


class Askers(Holders):
    """All clients, and what they do."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._numbers = 0
        self._leases = 0
        self._fill()

    def moves(self) -> list[Move]:
        """What may happen, and how often."""
        return [
            *(
                (12, self._ask),
                (10, self._enter),
                (8, self._begin),
                (5, self._end),
                (1, self._crash),
                (2, self._give_up),
            ),
            *(
                (10, self._look_one),
                (1, self._die),
                (4, self._renew),
                (2, self._resize_waiter),
                (2, self._resize_holder),
            ),
            *((7, self._yield), (1, self._preempt), (1, self._impostor)),
        ]

    def is_dead(self, owner: str) -> bool:
        """Whether the process is seen to be gone."""
        return owner not in self._clients

    def leave_with(self, node: Node) -> None:
        """The node is gone, and its clients with it."""
        for client in [client for client in self._clients.values() if client.node is node]:
            del self._clients[client.owner]
        self._fill()

    def all_leave(self) -> None:
        """Every client and every holder dies."""
        for client in list(self._clients.values()):
            self._kill(client)

    def lose(self, row: Row) -> None:
        """A lease by word is over, and its row goes: its program learns it and ends, or goes on as a stranger."""
        for want in self.wants(lambda want: want.row is row):
            del want.client.wants[want.id]
        if row.uses:
            self._world.see({"t": "foreign", "lease": row.lease})

    def _ask(self) -> None:
        world = self._world
        client = world.chance.choice(list(self._clients.values()))
        self._leases += 1
        told = self._terms(client, f"l{self._leases}")
        options = self._options(client.node)
        told["options"] = json.dumps(options)
        adopts = {
            name: min(size, client.node.devices[name].foreign)
            for name, size in options[0].items()
            if client.node.devices[name].foreign
        }
        if adopts and world.chance.random() < 0.5:
            told["adopts"] = json.dumps(adopts)
        want = client.wants[told["id"]] = Want(client, told)
        self._hear(want, world.send(Script.ACQUIRE, told))

    def _terms(self, client: Client, lease_id: str) -> Json:
        chance, sort = self._world.chance, client.sort
        kind = "slot" if sort == "broker" else "job"
        return {
            "id": lease_id,
            "holder": f"{kind}:{lease_id}",
            "kind": kind,
            "priority": chance.choice(_PRIORITIES[sort]),
            "node": client.node.name,
            "owner": client.owner,
            "preemptible": kind == "slot" or chance.random() < 0.5,
            "grace_ms": chance.choice((1000, 3000, 8000)),
            "lease_ttl_ms": chance.choice(TTLS_MS) if sort == "door" else 0,
        }

    def _options(self, node: Node) -> list[dict[str, int]]:
        """One or two device sets, each of one or two devices of the node."""
        chance, names = self._world.chance, list(node.devices)
        options = []
        for _ in range(1 if chance.random() < 0.6 else 2):
            chosen = chance.sample(names, 2 if len(names) > 1 and chance.random() < 0.3 else 1)
            options.append({name: (1 + int(chance.random() * node.devices[name].full / MIB)) * MIB for name in chosen})
        return options

    def _resize_waiter(self) -> None:
        """It wants something else, or is more or less important now, and keeps its place."""
        want = self._any(lambda want: want.view and want.view["state"] == "queued")
        if want is None:
            return
        told: Json = {"id": want.id}
        if self._world.chance.random() < 0.7:
            told["options"] = json.dumps(self._options(want.client.node))
        else:
            told["priority"] = self._world.chance.choice(_PRIORITIES[want.client.sort])
        reply = self._world.send(Script.RESIZE, told)
        if reply is not None and reply["status"] == "ok":
            want.told = want.told | told
            self._hear(want, reply)

    def _give_up(self) -> None:
        want = self._any(lambda want: want.row is None)
        if want is not None:
            del want.client.wants[want.id]
            self._world.send(Script.CANCEL, {"id": want.id})

    def _look_one(self) -> None:
        """A client looks how its leases stand, and asks again for what the store forgot."""
        found = [client for client in self._clients.values() if client.wants]
        if not found:
            return
        client = self._world.chance.choice(found)
        self._look(client, list(client.wants))

    def _die(self) -> None:
        """A client dies, and its holders with it; another comes."""
        self._kill(self._world.chance.choice(list(self._clients.values())))
        self._fill()

    def _fill(self) -> None:
        nodes = list(self._world.nodes.up.values())
        here = [client.sort for client in self._clients.values()]
        for sort in _SORTS:
            if sort in here:
                here.remove(sort)
                continue
            self._numbers += 1
            client = Client(self._numbers, sort, self._world.chance.choice(nodes))
            self._clients[client.owner] = client
