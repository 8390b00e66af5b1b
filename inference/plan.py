"""One pass of decisions over the whole state: grants, loads and evictions that are right now.

Called by `scheduler.py` after every event; calls `queue.py` (who is next), `placement.py` (where it goes),
`eviction.py` (who must go), `overtaking.py` (who was passed long enough) and `yielding.py` (who gives way to holders
outside); decides through the moves of `board.py`. Looks only at the heads of the models' queues. A second pass decides
nothing.

0. Slots that have notice from outside yield if they should; leases nobody wants any more are asked for no longer.
1. Overdue claims hold their rivals.
2. Heads in order: class, models that are ready before those that are not, submission.
3. A ready model's tickets are granted, up to `parallel` at a time on each of its slots; those that only wanted it
   loaded, all. Of several slots a ticket gets the one that had its session's last request, else the one with the least
   to do. When none has a place, a further slot is loaded, up to `replicas` of them: into free room alone, when nobody
   waits who has none.
4. A model that is not loaded is started if it fits into what is free or is becoming free, and its engine has not failed
   so often or so lately that this must wait (`breaker.py`),
5. else if a set of victims makes room: the start comes first, for it queues the lease; then the victims drain;
6. else it waits, and lays claim to its rivals. Later heads may use the room it waits for until the claim is overdue.
7. It is refused if it can never fit, or only pinned models stand in its way, or it may not evict and nothing is free.
8. A load whose lease waits for room that somebody else took is given up after `SHORT_S`, the least important first:
   it would keep everybody from what room is left. Its tickets wait on, and may go elsewhere.
9. A model that waits (6) while nobody here would make room for it, and would fit if others' leases were not there, gets
   its place in the ledger's queue, in its class: what they give back is granted in fair order then, and those that
   declared it are asked to yield. While they do, what the model needs is kept for it. The lease of a slot that waits
   in the ledger has the class of who leads its model's line.
"""

from __future__ import annotations

import math

from gpuboss.priority import LEAST_IMPORTANT
from inference import refusals
from inference.board import Board
from inference.breaker import MayStart, NotBefore, Open, Standing
from inference.claim import Claim
from inference.errors import InferenceError
from inference.events import Purpose, Shares
from inference.eviction import Activity, Candidate, choose
from inference.model import Model
from inference.overtaking import Overtaking
from inference.placement import once_gone, place
from inference.queue import Aged, Entry
from inference.sight import Sight
from inference.slot_state import HAS_LIFE, SlotState
from inference.slot_view import SlotRecord
from inference.yielding import Yielding

SHORT_S = 5.0
"""Seconds a queued load may be short of room before it is given up; readings of a stopping engine lag that long."""

_MAY_SERVE = HAS_LIFE - {SlotState.WEDGED}

_Head = tuple[int, bool, float, int, Entry]
"""Class, not ready, submission, sequence, ticket: sorts as case 2 says."""


class Plan:
    """One pass; `run` it once."""

    __slots__ = (
        *("_aged", "_board", "_forlorn_bytes", "_hopeless_bytes", "_overtaking", "_sight", "_waiters", "_yielding"),
        *("_cramped_bytes", "_wide", "again", "contested"),
    )

    def __init__(self, board: Board) -> None:
        self._board = board
        self._sight = Sight(board)
        self._overtaking = Overtaking(board, self._sight)
        self._aged: Aged = board.line.aged(board.now_s)
        self._yielding = Yielding(board, self._overtaking, self._aged)
        self._hopeless_bytes = {False: math.inf, True: math.inf}
        """The least that found no victims, by whether its claim was overdue: heads come by falling importance, so none
        after it finds any for as much."""
        self._forlorn_bytes: float = math.inf
        """The least that found no rivals, likewise."""
        self._waiters: list[tuple[Model, Entry, bool]] = []
        """The models that wait for room (case 6), with who leads their lines, and whether their claims stand."""
        self._wide: list[Model] = []
        """Models that tickets wait for, and that may have further slots (case 3)."""
        self._cramped_bytes: float = math.inf
        """The least that found no room for a further slot; there is never more of it later in a pass."""
        self.contested: set[str] = set()
        """Devices with room that somebody waits for."""
        self.again = False
        """Has something been decided that may change what is right for an earlier head? Then another pass is due."""

    def run(self) -> None:
        """Decide."""
        board = self._board
        if board.claims:
            board.end_claims()
        heads = self._heads()
        if board.claims:
            self._overtaking.hold_rivals()
        if board.demands and self._yielding.run():
            self.again = True
            return  # rooms and candidates are others now
        self._withdraw_the_unwanted()
        heads.sort()
        for head in heads:
            self._consider(head[-1])
        for head in reversed(heads):
            slot = self._coming_slot(head[-1].ticket.model_id)
            if slot is not None and slot.state is SlotState.LOADING and not slot.leased:
                self._give_up_if_short(slot)
        self.again = self.again or self._overtaking.unsettled
        if self.again:
            return  # the next pass knows better
        for model, entry, stands in self._waiters:
            self._queue_outside(model, entry, stands=stands)
        for *_, entry in heads:
            slot = self._coming_slot(entry.ticket.model_id)
            if slot is not None and slot.state is SlotState.LOADING and not self._is_ready(entry.ticket.model_id):
                board.reprice_load(slot, entry.priority)
        if self._wide and not self.again:
            self._sight.rooms.close(self.contested)
            for model in self._wide:
                self._widen(model)

    def _consider(self, entry: Entry) -> None:
        """One head."""
        model_id = entry.ticket.model_id
        coming = self._coming_slot(model_id)
        if self._is_ready(model_id):
            self._serve(model_id)
        elif any(slot.settled for slot in self._board.slots.of(model_id)):
            return  # it has just been sent away for an earlier head
        elif coming is None or (coming.state is SlotState.QUEUED and not coming.coming):
            self._load(entry)
        elif coming.state is SlotState.QUEUED:
            for option in coming.asked:
                self.contested |= option.keys()  # what it waits for is on its way
            self._board.reprice(coming, entry.priority)

    def _is_ready(self, model_id: str) -> bool:
        return any(slot.state is SlotState.READY for slot in self._board.slots.of(model_id))

    def _coming_slot(self, model_id: str) -> SlotRecord | None:
        """The slot of the model that is being loaded, or waits to be; None where there is none."""
        for slot in self._board.slots.of(model_id):
            if slot.state in (SlotState.LOADING, SlotState.QUEUED):
                return slot
        return None

    def _heads(self) -> list[_Head]:
        """The tickets for whom something may be done now: of each model the first."""
        board, line = self._board, self._board.line
        heads: list[_Head] = []
        for model_id in list(line.models()):
            ready, settled = None, False
            for slot in board.slots.of(model_id):
                if slot.state is SlotState.READY:
                    ready = slot
                    break
                settled = settled or slot.settled
            if ready is not None:
                self._ready_head(ready, heads)
            elif self._is_known(model_id) and not settled and self._may_start(model_id):
                entry = line.leader(model_id, self._aged)
                if (claim := board.claims.get(model_id)) is not None:
                    claim.lead(entry, line)
                heads.append((entry.priority, True, entry.submitted_at_s, entry.seq, entry))
        return heads

    def _ready_head(self, ready: SlotRecord, heads: list[_Head]) -> None:
        """What waits for a model that has a ready slot."""
        board, model_id = self._board, ready.model.id
        for load in board.line.loads(model_id, self._aged) if board.line.wants(model_id) else ():
            board.grant(ready, load)
            self._less_wanted(ready)
        entry = board.line.next_for_ready(model_id, self._aged)
        if entry is None:
            return
        if any(slot.has_place for slot in board.slots.of(model_id)):
            heads.append((entry.priority, False, entry.submitted_at_s, entry.seq, entry))
        if ready.model.replicas > 1:
            self._wide.append(ready.model)

    def _is_known(self, model_id: str) -> bool:
        """Refuses everybody who waits for a model that does not exist or cannot be loaded."""
        model = self._board.models.get(model_id)
        if model is not None and model.problem is None:
            return True
        self._refuse_all(model_id, refusals.not_found(model_id) if model is None else refusals.broken(model))
        return False

    def _may_start(self, model_id: str) -> bool:
        """Refuses everybody who waits for a model whose engine fails."""
        board = self._board
        if model_id not in board.breakers:
            return True
        match board.breaker_state(model_id):
            case MayStart():
                return True
            case NotBefore():
                return False
            case (Open() | Standing()) as shut:
                self._refuse_all(model_id, refusals.shut_off(board, board.models[model_id], shut))
                return False

    def _refuse_all(self, model_id: str, error: InferenceError) -> None:
        for entry in self._board.line.waiting_for(model_id):
            self._board.refuse(entry, error)
        self.again = True

    # -- case 3: ready models -------------------------------------------------------------------------------------

    def _serve(self, model_id: str) -> None:
        board = self._board
        while (entry := board.line.next_for_ready(model_id, self._aged)) is not None:
            slot = self._slot_for(entry)
            if slot is None:
                return
            board.grant(slot, entry)
            self._less_wanted(slot)
            self._yielding.granted(slot, entry)
            self._sight.forget_candidates()
            if board.claims:
                self._overtaking.granted(slot, entry)

    def _less_wanted(self, granted: SlotRecord) -> None:
        """A ticket was granted: other slots of its model may have lost what kept them."""
        for slot in self._board.slots.of(granted.model.id):
            if slot is not granted and (slot.notice is not None or slot.state in (SlotState.LOADING, SlotState.QUEUED)):
                self.again = True

    def _slot_for(self, entry: Entry) -> SlotRecord | None:
        """Of the ready slots that may take the ticket now, the one that suits it best."""
        free = [
            slot
            for slot in self._board.slots.of(entry.ticket.model_id)
            if slot.has_place and not self._overtaking.forbids(slot, entry) and not self._yielding.forbids(slot, entry)
        ]
        session = entry.ticket.session_id
        return min(free, key=lambda slot: (session not in slot.sessions, len(slot.in_flight)), default=None)

    def _widen(self, model: Model) -> None:
        """Load a further slot of a model, if nothing stands against it."""
        board = self._board
        known = board.models.get(model.id)
        if known is None or (need := board.claim_of(model.id)) >= self._cramped_bytes:
            return
        alive = [slot for slot in board.slots.of(model.id) if slot.state in _MAY_SERVE]
        crowded = board.line.next_for_ready(model.id, self._aged) is not None and not any(
            slot.has_place or slot.state is not SlotState.READY for slot in alive
        )
        if not crowded or len(alive) >= model.replicas:
            return
        if model != known or board.breaker_state(model.id) != MayStart():
            return
        rooms, host_bytes = self._sight.rooms, board.host_bytes_of(model.id)
        if host_bytes and host_bytes > board.host_room():
            return
        if ways := rooms.place(need):
            board.start(model, ways, LEAST_IMPORTANT)
            rooms.take(ways[0])
        else:
            self._cramped_bytes = need

    # -- cases 4 to 7: models that are not loaded -------------------------------------------------------------------

    def _load(self, entry: Entry) -> None:
        board = self._board
        if not board.usable:
            return
        model, rooms = board.models[entry.ticket.model_id], self._sight.rooms
        need, may_evict = board.claim_of(model.id), entry.ticket.purpose is not Purpose.PEEK
        claim = board.claims.get(model.id)
        overdue = claim is not None and claim.overdue(board.now_s, board.limits)
        host_bytes = board.host_bytes_of(model.id)
        if (never := refusals.never_fits(board, model, need, host_bytes)) is not None:
            self._refuse_all(model.id, never)
        elif host_bytes and host_bytes > board.host_room():
            self.contested |= rooms.total().keys()  # whoever went for it on an accelerator would go in vain
        elif need < min(self._hopeless_bytes.values()) and (ways := rooms.place(need)):
            self._start(model, ways, entry, ())
        elif not may_evict:
            self._refuse_all(model.id, refusals.no_free_room(board, model))
        elif need < self._hopeless_bytes[overdue] and (victims := self._victims(need, entry.priority, overdue=overdue)):
            ways = place(need, once_gone(rooms.total(), victims), rooms.groups)
            self._start(model, ways[:1], entry, victims)
        elif need > self._sight.reach_unpinned:  # it would not fit if no other model were there (programs may leave)
            self._refuse_all(model.id, refusals.all_pinned(board, model))
        else:
            self._wait(model, entry, was_overdue=overdue)

    def _victims(self, need: int, priority: int, *, overdue: bool) -> tuple[Candidate, ...]:
        rooms = self._sight.rooms
        victims = choose(need, rooms.total(), self._sight.willing(priority, overdue=overdue), rooms.groups)
        if victims is None:
            self._hopeless_bytes[overdue] = need
        return victims or ()

    def _start(self, model: Model, ways: tuple[Shares, ...], entry: Entry, victims: tuple[Candidate, ...]) -> None:
        board, rooms = self._board, self._sight.rooms
        board.start(model, ways, entry.priority)
        rooms.take(ways[0])
        for victim in victims:
            slot = board.slots[victim.slot_id]
            rooms.expect(slot.shares)
            unwanted = ", and nobody waits for it any more" if victim.activity is Activity.UNWANTED else ""
            reason = f"makes room for '{model.id}' (class {entry.priority}){unwanted}"
            board.remove(slot, reason, beneficiary=model.id)
        self._sight.forget_candidates()
        self.again = True

    def _wait(self, model: Model, entry: Entry, *, was_overdue: bool) -> None:
        board, need = self._board, self._board.claim_of(model.id)
        claim = board.claims.get(model.id)
        if claim is None:
            claim = board.claims[model.id] = Claim(model.id, entry, entry.ticket.id)
        stands, hopeful = self._overtaking.stands(claim), need < self._forlorn_bytes
        if not stands and (hopeful or claim.version != board.version):
            if not self._overtaking.find_rivals(claim, search=hopeful):
                self._forlorn_bytes = min(self._forlorn_bytes, need)
            stands = self._overtaking.stands(claim)
        if self._sight.resident >= entry.priority:
            claim.wait(board.now_s)
        overdue = claim.overdue(board.now_s, board.limits)
        if overdue and not was_overdue:
            self.again = True  # what was just loaded is not safe from it
        if stands and overdue and claim.shares is not None:
            self._sight.rooms.keep(claim.shares)
        self.contested |= claim.shares.keys() if stands and claim.shares else self._sight.rooms.total().keys()
        self._waiters.append((model, entry, stands))

    # -- case 9: memory that others hold ------------------------------------------------------------------------------

    def _queue_outside(self, model: Model, entry: Entry, *, stands: bool) -> None:
        """Have a place in the ledger's queue, if that is what helps: if no slot here would make room."""
        board, slot = self._board, self._coming_slot(model.id)
        queued = slot if slot is not None and slot.state is SlotState.QUEUED else None
        if queued is not None:
            board.reprice(queued, entry.priority)
        if stands:
            return
        rooms, held = self._sight.rooms.total(kept=True), board.held_outside()
        there = {device: room + held[device] for device, room in rooms.items()}
        # Where others hold nothing, what is missing is held here, and the ledger cannot say more than that.
        ways = place(board.claim_of(model.id), there, self._sight.rooms.groups) if any(held.values()) else ()
        if ways and not (queued is not None and _same_places(queued.asked, ways)):
            board.ask(model, ways, entry.priority)
        elif queued is not None and not ways:
            board.stop(queued, "others hold nothing any more that would help")
            self.again = True

    def _withdraw_the_unwanted(self) -> None:
        board = self._board
        for slot in list(board.slots.queued.values()):
            if not board.line.wants(slot.model.id):
                board.stop(slot, "nobody waits for it any more")

    # -- case 8: loads whose lease does not come --------------------------------------------------------------------

    def _give_up_if_short(self, slot: SlotRecord) -> None:
        board, rooms = self._board, self._sight.rooms
        if not rooms.overdrawn(slot.shares):
            slot.short_since_s = None
            return
        self.contested |= slot.shares.keys()
        if slot.short_since_s is None:
            slot.short_since_s = board.now_s
        elif board.now_s - slot.short_since_s >= SHORT_S:
            board.stop(slot, "the room its lease waits for was taken; it waits for its turn again")
            rooms.expect(slot.shares)
            self.again = True


def _same_places(asked: tuple[Shares, ...], ways: tuple[Shares, ...]) -> bool:
    """Do they name the same devices, in whatever order? What is split would move a little with every reading."""
    return {frozenset(option) for option in asked} == {frozenset(option) for option in ways}
