"""The rules by which others decide what is loaded, so that ours can be compared with them on the same requests.

Made by `policies.py`; each is a `Peer`. They follow what those programs' documentation and logs say they do, on devices
and with limits of waiting that are the same for all.
"""

from __future__ import annotations

from inference.events import DeviceRoom
from inference.model import Model
from inference.placement import groups_of, spread
from inference.queue import QueueLimits
from inference.simulation.peer import Peer, PeerSlot
from inference.slot_state import LEAVING, SlotState

__all__ = ["Fifo", "LruCount", "ShortestKeepAlive"]


def _least_recently_used(slot: PeerSlot) -> tuple[float, str]:
    return slot.used_s, slot.model.id


class Fifo(Peer):
    """Strict order: the first in line has its turn before anybody behind it is looked at, whatever model they want.

    What is idle goes to make room, the least recently used first. The plainest rule there is, and a fair one; the line
    stands still during every load.
    """

    def plan(self) -> None:
        """Serve the line from its head until somebody has to wait."""
        while self.line:
            ticket = next(iter(self.line.values()))
            slot = self.slots.get(ticket.model_id)
            if slot is None:
                self.load(self.models[ticket.model_id], sorted(self.idle_slots(), key=_least_recently_used))
                return
            if not self.has_place(slot):
                return
            self.assign(ticket, slot)


class LruCount(Peer):
    """llama-server's router mode: so many models may be loaded (`--models-max`), whatever their size.

    A request for another one unloads the least recently used; requests wait for their own model only. Nothing leaves
    by itself. That program ends a model also while it works; here it is waited for until it is idle, which is kinder.
    Without a number it is as many as would fit if all were as large as the largest: more could run out of memory.
    """

    def __init__(self, limits: QueueLimits, models_max: int | None = None) -> None:
        super().__init__(limits)
        self._models_max = models_max

    def expires_by_itself(self, slot: PeerSlot) -> bool:  # noqa: ARG002 - none does
        """Only another model drives one out."""
        return False

    def plan(self) -> None:
        """Give everybody to their model's slot, and load what has none, by arrival."""
        hopeless: set[str] = set()
        for ticket in list(self.line.values()):
            slot = self.slots.get(ticket.model_id)
            if slot is None and ticket.model_id not in hopeless and self._load(self.models[ticket.model_id]):
                slot = self.slots[ticket.model_id]
            if slot is None or slot.state in LEAVING:
                hopeless.add(ticket.model_id)
            else:
                self.assign(ticket, slot)

    def _load(self, model: Model) -> bool:
        count = sum(slot.state not in LEAVING for slot in self.slots.values())
        too_many = max(0, count + 1 - self._most())
        idle = sorted(self.idle_slots(), key=_least_recently_used)
        return too_many <= len(idle) and self.load(model, idle, at_least=too_many)

    def _most(self) -> int:
        if self._models_max is None:
            sizes = [model.claim_bytes for model in self.models.values()]
            self._models_max = max(1, how_many_fit(self.devices, max(sizes, default=1)))
        return self._models_max


def how_many_fit(devices: tuple[DeviceRoom, ...], size: int) -> int:
    """Models of that size that fit: whole ones, or where no device holds one, ones split over the devices of a node."""
    whole = sum(device.capacity_bytes // size for device in devices)
    if whole:
        return whole
    capacity = {device.id: device.capacity_bytes for device in devices}
    return sum(spread(capacity[device] for device in group) // size for group in groups_of(devices))


class ShortestKeepAlive(Peer):
    """Ollama: requests are looked at in order, and those behind one that needs room wait until it has that.

    What is loaded, or loading, takes its requests at once into a line of its own. For a model that does not fit, the
    idle one goes that was to stay for the shortest time, of equals the one whose time runs out first; if none is idle,
    the one that comes first by that rule takes no more requests and goes when it is done. While another model is on its
    way in, a request that does not fit lets those behind it pass.
    """

    def plan(self) -> None:
        """Go down the line until somebody blocks it."""
        for ticket in list(self.line.values()):
            slot = self.slots.get(ticket.model_id)
            if slot is not None:
                if slot.expiring or slot.state in LEAVING:
                    return
                self.assign(ticket, slot)
                continue
            model = self.models[ticket.model_id]
            if self.load(model):
                self.assign(ticket, self.slots[model.id])
            elif not any(one.state is SlotState.LOADING for one in self.slots.values()):
                if not self.load(model, sorted(self.idle_slots(), key=_first_to_run_out)):
                    self._expire_one()
                    return
                self.assign(ticket, self.slots[model.id])

    def _expire_one(self) -> None:
        """Nobody idle would make room: the first that works is to go once it has finished; one at a time."""
        working = [slot for slot in self.slots.values() if slot.state is SlotState.READY and not slot.idle]
        able = [slot for slot in working if not slot.model.pin]
        if able and not any(slot.expiring for slot in able):
            min(able, key=_first_to_run_out).expiring = True


def _first_to_run_out(slot: PeerSlot) -> tuple[float, float, str]:
    return 0.0 if slot.expiring else slot.keep_alive_s, slot.expires_s, slot.model.id
