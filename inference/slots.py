"""The scheduler's slots: by id, and those of a model. Kept on the board, which alone writes them.

A model's slots are called `model`, `model#2`, and so on; one without life is used again before another is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from inference.model import Model
from inference.slot_state import HAS_LIFE, HOLDS_MEMORY, SlotState
from inference.slot_view import SlotRecord


class Slots(dict[str, SlotRecord]):
    """Every slot that is or was loaded, by id. Slots come by `new` and go by `forget`, never as items."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: dict[str, SlotRecord] = {}
        """Those whose lease waits for memory that others hold."""
        self._of_model: dict[str, list[SlotRecord]] = {}

    def of(self, model_id: str) -> Sequence[SlotRecord]:
        """The slots of a model, the first one first."""
        return self._of_model.get(model_id, ())

    def holders(self) -> Iterator[SlotRecord]:
        """The slots whose claims count."""
        return (slot for slot in self.values() if slot.state in HOLDS_MEMORY)

    def first_of(self, model: Model) -> SlotRecord:
        """The model's first slot, made if there is none."""
        slots = self.of(model.id)
        return slots[0] if slots else self.new(model.id, model)

    def for_load(self, model: Model) -> SlotRecord:
        """A slot that the model may be loaded into: one that is queued, else one without life, else a new one."""
        slots = self.of(model.id)
        for slot in slots:
            if slot.state is SlotState.QUEUED:
                return slot
        for slot in slots:
            if slot.state not in HAS_LIFE:
                return slot
        names = (model.id, *(f"{model.id}#{number}" for number in range(2, len(slots) + 2)))
        return self.new(next(name for name in names if name not in self), model)

    def new(self, slot_id: str, model: Model) -> SlotRecord:
        """Make a slot of that id, which there is none of."""
        slot = self[slot_id] = SlotRecord(slot_id, model)
        self._of_model.setdefault(model.id, []).append(slot)
        return slot

    def move(self, slot: SlotRecord, state: SlotState, at_s: float) -> None:
        """The slot comes into that state."""
        slot.state, slot.moved_at_s = state, at_s
        if state is SlotState.QUEUED:
            self.queued[slot.id] = slot
        else:
            self.queued.pop(slot.id, None)

    def forget(self, slot: SlotRecord) -> None:
        """The slot is of no interest any more."""
        del self[slot.id]
        slots = self._of_model[slot.model.id]
        slots.remove(slot)
        if not slots:
            del self._of_model[slot.model.id]

    def copy(self) -> Slots:
        """The same slots, to be changed apart."""
        twin = Slots()
        for slot in self.values():
            record = twin[slot.id] = replace(
                slot,
                in_flight=dict(slot.in_flight),
                granted_at_s=dict(slot.granted_at_s),
                sessions=dict(slot.sessions),
            )
            twin._of_model.setdefault(slot.model.id, []).append(record)
        twin.queued = {slot_id: twin[slot_id] for slot_id in self.queued}
        return twin
