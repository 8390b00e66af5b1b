"""Nodes of a fault history: their devices, their own books, their keepers. Played as the real ones behave.

Part of `tests.faults.world`. A node's book is what `gpuboss.node_ledger` is: before a holder uses memory it is entered
here, if it fits; what the store believes does not matter. Its keeper reads (devices and rows), syncs, and confirms the
dead, each at a moment of its own, so that everything can happen in between.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from gpuboss.scripts import Script

if TYPE_CHECKING:
    from tests.faults.world import Move, World

__all__ = ["MIB", "Device", "Node", "Nodes", "Row"]

MIB = 1 << 20
Json = dict[str, Any]

_SHAPES = {
    "n0": {"sim0": (100, False), "sim1": (60, False), "gpu0": (80, True)},
    "n1": {"sim0": (80, False), "gpu0": (60, True)},
    "n2": {"sim0": (60, False)},
}
"""Node -> device -> (MiB, whether a driver measures it)."""


class Device:
    """One device."""

    def __init__(self, name: str, total: int, *, measured: bool) -> None:
        self.name = name
        """With its node's."""
        self.full = total
        self.total = total
        """What it gives now; less than in full at times."""
        self.foreign = 0
        """What strangers use at this moment."""
        self.measured = measured
        self.read_total = total
        """What the keeper read last, as the next three."""
        self.read_foreign = 0
        self.residual = 0
        self.settling = 0
        """What rows counted for that were taken out since."""
        self.lingering: dict[str, int] = {}
        """Lease -> what the driver has not given back yet."""

    def told(self) -> Json:
        """As the store is told it."""
        return {
            "total": self.read_total,
            "reserve": 0,
            "foreign": self.read_foreign,
            "residual": self.residual + self.settling,
            "settles": self.measured,
        }


class Row:
    """A holder in a node's book."""

    __slots__ = ("by_word", "dead", "fence", "lease", "observed", "shares", "terms", "uses")

    def __init__(
        self, lease: str, fence: tuple[int, int], shares: dict[str, int], terms: Json, *, by_word: bool
    ) -> None:
        self.lease = lease
        self.fence = fence
        self.shares = shares
        self.uses: dict[str, int] = {}
        """What its processes really use."""
        self.observed: dict[str, int] = {}
        """What the keeper read last."""
        self.terms = terms
        self.by_word = by_word
        """It has no process."""
        self.dead = False

    def told(self, *, insist: bool = False) -> Json:
        """As the store is told it."""
        return self.terms | {
            "id": self.lease,
            "epoch": self.fence[0],
            "seq": self.fence[1],
            "shares": json.dumps(self.shares),
            "observed": json.dumps(self.observed),
            "insist": insist,
        }


class Node:
    """One machine; of each start anew, for its book does not outlive it."""

    def __init__(self, name: str, boot: int) -> None:
        self.name = name
        self.boot = f"{name}-boot{boot}"
        self.devices = {
            f"{name}/{short}": Device(f"{name}/{short}", total * MIB, measured=measured)
            for short, (total, measured) in _SHAPES[name].items()
        }
        self.rows: dict[str, Row] = {}
        self.seen_epoch = 0
        self.read: list[Json] = []
        """The rows as the keeper read them last."""
        self.read_ids: set[str] = set()
        self.vanished: set[str] = set()
        """Leases whose rows were here and are gone."""
        self.buried: set[str] = set()
        """Leases that its keeper has declared dead: nobody is entered for them any more."""
        self.to_bury: list[Json] = []
        self.synced_life = 0
        """In which life of the store it synced last."""

    def room(self, name: str) -> int:
        """Effective free of a device by the node's own book."""
        device = self.devices[name]
        free = device.read_total - device.read_foreign - device.residual - device.settling
        for row in self.rows.values():
            free -= max(row.shares.get(name, 0), row.observed.get(name, 0))
        return free

    def has_room(self, shares: Json, adopted: Json) -> bool:
        """Whether all of this fits."""
        return all(self.room(name) + adopted.get(name, 0) >= size for name, size in shares.items())

    def is_settling(self, names: Iterable[str]) -> bool:
        """Whether nobody has seen yet that memory of the dead is back on one of these devices."""
        return any(self.devices[name].settling or self.devices[name].residual for name in names)

    def admit(self, row: Row, adopts: Json) -> None:
        """Enter a holder; the book knows its epoch from now on."""
        self.rows[row.lease] = row
        self.seen_epoch = max(self.seen_epoch, row.fence[0])
        for name, size in adopts.items():
            self.devices[name].read_foreign -= min(size, self.devices[name].read_foreign)

    def remove(self, row: Row) -> None:
        """Its processes are dead: take it out."""
        del self.rows[row.lease]
        for name in row.shares:
            device = self.devices[name]
            if device.measured:
                device.settling += max(row.shares[name], row.observed.get(name, 0))


class Nodes:
    """All nodes, and what their keepers do."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._boots = 0
        self.names = tuple(_SHAPES)
        self.up: dict[str, Node] = {}
        for name in ("n0", "n1"):
            self.join(name)

    def moves(self) -> list[Move]:
        """What may happen, and how often."""
        return [(4, self._read_one), (9, self._sync_one), (4, self._bury_one), (5, self._tick), (2, self._give_back)]

    def begin(self) -> None:
        """Every keeper begins."""
        for node in self.up.values():
            self.sync(node)

    def join(self, name: str) -> Node:
        """A node starts, with an empty book."""
        self._boots += 1
        node = self.up[name] = Node(name, self._boots)
        self._world.see({"t": "boot", "node": name, "boot": node.boot})
        for device in node.devices.values():
            self._world.see({"t": "device", "device": device.name, "cap": device.total})
        self.read(node)
        return node

    def leave(self, node: Node) -> None:
        """A node loses its power."""
        del self.up[node.name]
        for row in node.rows.values():
            if row.uses and not row.dead:
                self._world.stopped(row.lease, "power")
        for device in node.devices.values():
            self._all_back(device)

    def all_return(self) -> None:
        """Every node is up."""
        for name in _SHAPES:
            if name not in self.up:
                self.join(name)

    def beat_all(self) -> None:
        """A whole beat of every keeper, without faults."""
        for node in self.up.values():
            for device in node.devices.values():
                self._all_back(device)
            self.read(node)
            self.sync(node, sure=True)
            self._bury(node, sure=True)

    def sweep(self, node: Node) -> None:
        """Its keeper beats because a client asks it to."""
        self.read(node)
        self.sync(node)
        self._bury(node)

    # One keeper's work -----------------------------------------------------------------------------------------------

    def read(self, node: Node) -> None:
        """It takes out the rows of the dead, asks the drivers, and looks at its book."""
        for row in [row for row in node.rows.values() if row.dead]:
            node.remove(row)
        for device in node.devices.values():
            device.read_total, device.read_foreign = device.total, device.foreign
            device.residual = sum(device.lingering.values())
            device.settling = 0
        for row in node.rows.values():
            row.observed = {name: size for name, size in row.uses.items() if node.devices[name].measured}
        self._look_at_rows(node)

    def _look_at_rows(self, node: Node) -> None:
        node.read = [row.told() for row in node.rows.values()]
        node.vanished |= node.read_ids - node.rows.keys()
        node.read_ids = set(node.rows)

    def sync(self, node: Node, *, sure: bool = False) -> None:
        """It tells the store what it read; then it knows who is dead."""
        reply = self._world.send(Script.NODE_SYNC, _told(node, node.read), sure=sure, keeper=node)
        for _ in range(3):
            if reply is None or reply["status"] != "over":
                break
            # Leases that are over while their rows stood a moment ago: a row that stands still is the truth, unless it
            # stands for no process.
            over = set(reply["ids"])
            for row in [row for row in node.rows.values() if row.by_word and row.lease in over]:
                self._world.askers.lose(row)
                node.remove(row)
            self.read(node)
            rows = [row.told(insist=row.lease in over) for row in node.rows.values()]
            reply = self._world.send(Script.NODE_SYNC, _told(node, rows), sure=sure, keeper=node)
        if reply is None or reply["status"] != "ok":
            return
        node.seen_epoch = max(node.seen_epoch, reply["epoch"])
        node.synced_life = self._world.store.life
        rows = self._rows_to_judge_by(node)
        found = list(reply["leases"])
        node.to_bury = [_dead(lease) for lease in found if self._is_dead(node, lease, rows)]
        node.vanished &= {lease["id"] for lease in found}

    def _rows_to_judge_by(self, node: Node) -> Collection[str]:
        """Looked at after the store's reply: whoever activated a lease had entered it before."""
        self._look_at_rows(node)
        return node.rows

    def _is_dead(self, node: Node, lease: Json, rows: Collection[str]) -> bool:
        """As `gpuboss.sweep` judges."""
        if lease["id"] in rows:
            return False
        if lease["id"] in node.vanished or lease["state"] in ("active", "ending"):
            return True
        return self._world.askers.is_dead(lease["owner"])

    def _bury(self, node: Node, *, sure: bool = False) -> None:
        """First in its own book, which nobody can be entered in any more for them, then in the store."""
        dead = [lease for lease in node.to_bury if lease["id"] not in node.rows]
        node.to_bury = []
        node.buried.update(lease["id"] for lease in dead)
        if dead:
            self._world.send(Script.CONFIRM_DEAD, {"leases": dead}, sure=sure, keeper=node)

    # Moves -----------------------------------------------------------------------------------------------------------

    def any_node(self, wanted: Callable[[Node], object] = lambda _node: True) -> Node | None:
        """One of those that are up, by chance."""
        found = [node for node in self.up.values() if wanted(node)]
        return self._world.chance.choice(found) if found else None

    def _read_one(self) -> None:
        node = self.any_node()
        if node is not None:
            self.read(node)

    def _sync_one(self) -> None:
        life = self._world.store.life
        node = self.any_node(lambda node: node.synced_life != life) or self.any_node()
        if node is not None:
            if self._world.chance.random() < 0.5:
                self.read(node)
            self.sync(node)

    def _bury_one(self) -> None:
        node = self.any_node(lambda node: node.to_bury)
        if node is not None:
            self._bury(node)

    def _tick(self) -> None:
        self._world.wait(int(self._world.chance.random() * 2000))
        self._world.send(Script.TICK, {})

    def _give_back(self) -> None:
        """A driver has the memory of the dead again."""
        found = [device for node in self.up.values() for device in node.devices.values() if device.lingering]
        if found:
            self._all_back(self._world.chance.choice(found))

    def _all_back(self, device: Device) -> None:
        for lease in device.lingering:
            self._world.see({"t": "back", "lease": lease, "device": device.name})
        device.lingering.clear()


def _told(node: Node, rows: Iterable[Json]) -> Json:
    devices = {name: device.told() for name, device in node.devices.items()}
    return {"node": node.name, "seen_epoch": node.seen_epoch, "devices": devices, "rows": list(rows)}


def _dead(lease: Json) -> Json:
    return {name: lease[name] for name in ("id", "epoch", "seq", "state") if name in lease}
