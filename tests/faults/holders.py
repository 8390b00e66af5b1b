"""Holders of a fault history: who begins, renews, grows, yields, ends, crashes. Played as the real ones behave.

The base of `tests.faults.askers`. A client that heard of its grant enters the holder into its node's book, if that has
room, tells the store (`activate`), and only then the holder uses memory. A holder dies first, then its row goes, then
the lease is released; a crash leaves the row to the keeper.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpuboss.scripts import Script
from tests.faults.nodes import MIB, Row
from tests.faults.people import OVER, Client, Want

if TYPE_CHECKING:
    from tests.faults.world import World

__all__ = ["Holders"]

Json = dict[str, Any]
_FENCED = (Script.RELEASE, Script.ACTIVATE, Script.ACK, Script.RESIZE, Script.RENEW_MANY, Script.CONFIRM_DEAD)


class Holders:
    """What becomes of leases that were granted."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._clients: dict[str, Client] = {}
        """By owner; only those that live."""

    def wants(self, wanted: Callable[[Want], object]) -> list[Want]:
        """Everybody's, of this sort."""
        return [want for client in self._clients.values() for want in client.wants.values() if wanted(want)]

    def _any(self, wanted: Callable[[Want], object]) -> Want | None:
        found = self.wants(wanted)
        return self._world.chance.choice(found) if found else None

    def _look(self, client: Client, lease_ids: list[str]) -> bool:
        """Whether the store answered."""
        reply = self._world.send(Script.LOOK, {"ids": lease_ids})
        if reply is None or reply["status"] != "ok":
            return False
        for view in reply["leases"]:
            if view["id"] in client.wants:
                self._hear(client.wants[view["id"]], {"status": "ok", "lease": view})
        for lease_id in reply["unknown"]:
            want = client.wants[lease_id]
            if want.row is None:
                kept = {"order": want.view["order"]} if want.view is not None else {}
                self._hear(want, self._world.send(Script.ACQUIRE, want.told | kept))
        return True

    def _hear(self, want: Want, reply: Json | None) -> None:
        if reply is None:
            return
        if reply["status"] == "ok" and "holder" in reply["lease"]:
            want.view, want.heard_ms = reply["lease"], self._world.mono_ms
        over = reply["status"] == "refused" or (reply["status"] == "ok" and reply["lease"]["state"] in OVER)
        if over and want.row is None:
            want.client.wants.pop(want.id, None)

    def _enter(self) -> None:
        """A granted lease's holder is entered into the node's book, if there is room."""
        want = self._any(lambda want: want.is_granted)
        if want is not None and self._world.calm:  # nobody is so slow that its lease may be over
            self._look(want.client, [want.id])
        if want is None or not want.is_granted:
            return
        view, node, world = want.view, want.client.node, self._world
        assert view is not None
        if want.id in node.buried:
            del want.client.wants[want.id]
            return
        shares = json.loads(view["shares"])
        adopted = self._adopted(want, shares)
        if world.guard and not node.has_room(shares, adopted):
            world.nodes.sweep(node)
            adopted = self._adopted(want, shares)
            if not node.has_room(shares, adopted):
                world.see({"t": "refused", "lease": want.id, "settling": node.is_settling(shares)})
                del want.client.wants[want.id]
                world.send(Script.CANCEL, {"id": want.id})
                return
        terms = {name: want.told[name] for name in ("holder", "kind", "priority", "owner", "preemptible", "grace_ms")}
        terms |= {"lease_ttl_ms": want.told["lease_ttl_ms"], "order": view["order"]}
        by_word = want.client.sort == "door"
        want.row = Row(want.id, (view["epoch"], view["seq"]), shares, terms, by_word=by_word)
        node.admit(want.row, adopted)
        self._note_entry(want)
        for name, size in adopted.items():
            node.devices[name].foreign -= min(size, node.devices[name].foreign)
        if want.client.sort == "broker" and world.chance.random() < 0.5:
            self._use(want)  # a shim asks nobody else

    def _adopted(self, want: Want, shares: dict[str, int]) -> dict[str, int]:
        """What its holder uses already, as a stranger."""
        adopts, devices = json.loads(want.told.get("adopts", "{}")), want.client.node.devices
        return {
            name: min(adopts[name], size, devices[name].read_foreign) for name, size in shares.items() if name in adopts
        }

    def _begin(self) -> None:
        """The store is told, and the holder uses memory, unless the store says that the lease is over."""
        want = self._any(lambda want: want.row is not None and not want.holds)
        if want is None or want.row is None:
            return
        reply = self._world.send(Script.ACTIVATE, want.fence())
        view = (reply or {}).get("lease")
        if view is not None and view["state"] in OVER:
            want.client.node.remove(want.row)
            del want.client.wants[want.id]
            return
        if reply is not None and reply["status"] == "ok":
            self._hear(want, reply)
        self._use(want)

    def _use(self, want: Want) -> None:
        assert want.row is not None
        want.holds = True
        want.row.uses = dict(want.row.shares)
        if (
            not self._world.calm and self._world.chance.random() < 0.1
        ):  # it uses more than it claims, where that is seen
            measured = {name for name, device in want.client.node.devices.items() if device.measured}
            want.row.uses |= {name: size * 5 // 4 for name, size in want.row.shares.items() if name in measured}
        self._world.see({"t": "start", "lease": want.id, "uses": want.row.shares})

    def _renew(self) -> None:
        """Programs that nobody can see renew by their word."""
        found = self.wants(lambda want: want.row is not None and want.row.by_word)
        if not found:
            return
        reply = self._world.send(Script.RENEW_MANY, {"leases": [want.fence() for want in found]})
        if reply is not None and reply["status"] == "ok":
            by_id = {want.id: want for want in found}
            for view in reply["renewed"]:
                self._hear(by_id[view["id"]], {"status": "ok", "lease": view})

    def _resize_holder(self) -> None:
        """A holder shrinks: itself, then in the book, then in the store; or grows: the other way round."""
        want = self._any(lambda want: want.holds and want.view is not None and "revision" in want.view)
        if want is None or want.row is None or want.view is None:
            return
        chance, shrinks = self._world.chance, self._world.chance.random() < 0.5
        shares = {
            name: max(MIB, int(size * (chance.random() if shrinks else 1 + chance.random())) // MIB * MIB)
            for name, size in want.row.shares.items()
        }
        if shrinks:
            self._shrink(want, want.row, shares)
        else:
            self._grow(want, want.row, shares)

    def _shrink(self, want: Want, row: Row, shares: dict[str, int]) -> None:
        devices = want.client.node.devices
        for name, size in row.shares.items():
            if devices[name].measured:
                devices[name].settling += max(size, row.observed.get(name, 0)) - shares[name]
        self._now_uses(want, shares)
        self._tell_resized(want, shares)

    def _grow(self, want: Want, row: Row, shares: dict[str, int]) -> None:
        node = want.client.node
        if not self._tell_resized(want, shares):
            return

        def more() -> dict[str, int]:
            """What it must still be given room for; less than nothing where it uses more than it claims."""
            claims = {name: size for name, size in shares.items() if size > row.shares[name]}
            return {name: size - max(row.shares[name], row.observed.get(name, 0)) for name, size in claims.items()}

        if self._world.guard and not node.has_room(more(), {}):
            self._world.nodes.sweep(node)
            if not node.has_room(more(), {}):
                self._world.see({"t": "refused", "lease": want.id, "settling": node.is_settling(shares)})
                self._tell_resized(want, row.shares)
                return
        self._now_uses(want, shares)

    def _tell_resized(self, want: Want, shares: dict[str, int]) -> bool:
        """Whether the store is known to have done it."""
        assert want.view is not None
        told = want.fence() | {"options": json.dumps([shares]), "revision": want.view["revision"]}
        reply = self._world.send(Script.RESIZE, told)
        if reply is None or reply["status"] != "ok":
            return False
        self._hear(want, reply)
        return True

    def _note_entry(self, want: Want) -> None:
        assert want.row is not None
        node = want.client.node.name
        self._world.see({"t": "enter", "lease": want.id, "node": node, "fence": list(want.row.fence)})

    def _now_uses(self, want: Want, shares: dict[str, int]) -> None:
        assert want.row is not None
        want.row.shares, want.row.uses = shares, dict(shares)
        self._note_entry(want)
        self._world.see({"t": "use", "lease": want.id, "uses": shares})

    def _preempt(self) -> None:
        """A person asks a holder to yield."""
        want = self._any(lambda want: want.view and want.view["state"] in ("granted", "active"))
        if want is not None:
            told: Json = {"id": want.id, "by": "a person"}
            if self._world.chance.random() < 0.5:
                told["grace_ms"] = 2000
            self._world.send(Script.PREEMPT, told)

    def _yield(self) -> None:
        """A holder with notice says that it heard, ends by itself, or is ended once its grace is over."""
        want = self._any(lambda want: want.holds and want.notice)
        if want is None or want.notice is None:
            return
        luck, notice = self._world.chance.random(), want.notice
        if luck < 0.6:
            if not notice["acked"]:
                self._hear(want, self._world.send(Script.ACK, want.fence()))
        elif luck < 0.75:
            self._finish(want, "yielded")
        elif notice["outranks"] and self._world.mono_ms - want.heard_ms >= notice["left_ms"]:
            self._end_by_force(want)

    def _end_by_force(self, want: Want) -> None:
        """The notice may have been taken back or forgotten: who ends somebody else looks first."""
        is_shown = self._look(want.client, [want.id]) and want.heard_ms == self._world.mono_ms
        if is_shown and want.notice is not None and want.notice["left_ms"] <= 0:
            self._finish(want, "forced")

    def _impostor(self) -> None:
        """Somebody sends a command with a fence that the lease never had, or has no more."""
        want = self._any(lambda want: want.row is not None)
        if want is None or want.row is None:
            return
        chance, told = self._world.chance, want.fence()
        told["seq" if chance.random() < 0.5 else "epoch"] += chance.choice((-1, 1))
        script = chance.choice(_FENCED)
        if script in (Script.RENEW_MANY, Script.CONFIRM_DEAD):
            told = {"leases": [told]}
        elif script is Script.RESIZE:
            told["options"] = json.dumps([{name: max(1, size // 2) for name, size in want.row.shares.items()}])
        self._world.send(script, told)

    def _end(self) -> None:
        want = self._any(lambda want: want.holds)
        if want is not None:
            self._finish(want, "ended")

    def _finish(self, want: Want, why: str) -> None:
        assert want.row is not None
        self._stop(want, why)
        want.client.node.remove(want.row)
        del want.client.wants[want.id]
        if self._world.chance.random() < 0.7:  # else the release is lost, and the keeper finds out
            reply = self._world.send(Script.RELEASE, want.fence())
            again = (reply or {}).get("lease", {})
            if reply is not None and reply["status"] == "stale" and "epoch" in again:
                # A store that had forgotten it granted it anew meanwhile.
                self._world.send(Script.RELEASE, {"id": want.id, "epoch": again["epoch"], "seq": again["seq"]})

    def _crash(self) -> None:
        """A holder dies; its keeper finds its row."""
        want = self._any(lambda want: want.holds and want.row is not None and not want.row.by_word)
        if want is not None and want.row is not None:
            self._stop(want, "crashed")
            want.row.dead = True
            del want.client.wants[want.id]

    def _kill(self, client: Client) -> None:
        for want in client.wants.values():
            if want.holds:
                self._stop(want, "killed")
            if want.row is not None and not want.row.by_word:  # nobody sees that a program elsewhere is gone
                want.row.dead = True
        del self._clients[client.owner]

    def _stop(self, want: Want, why: str) -> None:
        """Its processes die; on a device that is measured the memory may come back later."""
        assert want.row is not None
        lingers = []
        for name, size in want.row.uses.items():
            device = want.client.node.devices[name]
            if device.measured and not want.row.by_word and self._world.chance.random() < 0.5:
                device.lingering[want.id] = size
                lingers.append(name)
        self._world.stopped(want.id, why, lingers)
