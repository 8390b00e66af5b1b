"""Why a request for a model would wait, and who would go for it: tried out on a copy of the live scheduler.

Called by `pool.py` for `GET /api/v1/explain` and `model-boss explain`; calls `scheduler.py` on a twin, so that what is
said is what would happen. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from gpuboss.priority import name_of
from gpuboss.units import format_bytes
from inference import actions
from inference.breaker import NotBefore
from inference.events import Arrived, Shares, Ticket
from inference.scheduler import Scheduler
from inference.slot_state import HAS_LIFE, HOLDS_MEMORY, LEAVING, SlotState
from inference.slot_view import SlotRecord
from inference.state import State

__all__ = ["Blocker", "DeviceShare", "Explanation", "Verdict", "Victim", "explain"]

TICKET = "explain"
"""The id of the ticket that is tried out."""
OTHERS = "other holders"
"""The name of the blocker that stands for all of them, where nobody asked the ledger for theirs."""


class Verdict(StrEnum):
    """What would become of the request now."""

    READY = "ready"
    """It would have an engine at once."""
    FITS = "fits"
    """Its model would be loaded into free room."""
    EVICTS = "evicts"
    """Its model would be loaded, and others would go for it."""
    LOADING = "loading"
    """Its model is being loaded already, or its memory is on its way."""
    WAITS = "waits"
    """It would wait for its turn, or for memory that nobody gives up yet."""
    REFUSED = "refused"
    """It would be turned away."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A slot that would go."""

    slot_id: str
    model_id: str
    freed_bytes: int
    """What its going frees."""
    priority: int
    """The class it defends itself with."""
    in_flight: int
    """Requests that would finish first."""
    idle_s: float | None
    """Since when it is idle; None while it is not."""
    reload_s: float | None
    """What its last load took."""


@dataclass(frozen=True, slots=True)
class Blocker:
    """Something that keeps its memory, or keeps the request from its turn."""

    name: str
    """A slot's id, or another holder's name; else what it is: `queue`, `other holders`, `cool-down`, `back-off`."""
    held_bytes: int
    """Memory it has; 0 for what is not about memory."""
    why: str
    """In words, with numbers."""


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """One device the model could be put on."""

    id: str
    total_bytes: int
    reserve_bytes: int
    others_bytes: int
    claimed_bytes: int
    """By this broker's slots."""
    free_bytes: int
    """What is left; with what is on its way back."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """See the module."""

    model_id: str
    priority: int
    verdict: Verdict
    need_bytes: int
    """What the model claims; 0 for one that is not known."""
    options: tuple[Shares, ...]
    """Where it would be loaded, bytes by device, best first; empty unless it would be."""
    victims: tuple[Victim, ...]
    """Who would go for it."""
    blocked_by: tuple[Blocker, ...]
    """What it would wait for."""
    position: int
    """Its place in the queue; 0 when it would not wait."""
    waiting: int
    """Requests in the queue, itself included."""
    devices: tuple[DeviceShare, ...]
    """As they are before it comes."""
    refusal: str | None = None
    """What it would be told, if it would be turned away."""
    eta_s: float | None = None
    """Seconds until it would have its engine; None where nobody can tell."""

    def with_eta(self, eta_s: float | None) -> Explanation:
        """The same, with the forecast."""
        return replace(self, eta_s=eta_s)

    @property
    def waits_for_others(self) -> bool:
        """Is there something that other holders lease in the way?"""
        return any(blocker.name == OTHERS for blocker in self.blocked_by)

    def naming(self, holders: tuple[Blocker, ...]) -> Explanation:
        """The same, with these other holders in the place of their sum."""
        rest = tuple(blocker for blocker in self.blocked_by if blocker.name != OTHERS)
        return replace(self, blocked_by=(*rest, *holders)) if holders else self


def explain(
    scheduler: Scheduler, model_id: str, priority: int, at_s: float, *, client_id: str | None = None
) -> tuple[Explanation, Scheduler]:
    """What would become of a request for the model in that class, and the twin in which it was tried.

    In the twin the ticket is called `TICKET`, so that a forecast can say when its turn would be.
    """
    twin = scheduler.copy()
    devices = tuple(_devices(scheduler.board))
    before = {slot.id: replace(slot, in_flight=dict(slot.in_flight)) for slot in twin.board.slots.values()}
    ticket = Ticket(TICKET, model_id, priority, at_s, client_id=client_id)
    decided = twin.handle(Arrived(at_s, ticket))
    return replace(_told(twin.board, before, ticket, decided), devices=devices), twin


def _told(
    board: State, before: dict[str, SlotRecord], ticket: Ticket, decided: Sequence[actions.Action]
) -> Explanation:
    model_id = ticket.model_id
    starts = [one for one in decided if isinstance(one, actions.Start | actions.Ask) and one.model_id == model_id]
    gone = {one.slot_id for one in decided if isinstance(one, actions.Drain | actions.Stop)}
    victims = tuple(_victim(board, before[slot_id]) for slot_id in gone if board.slots[slot_id].beneficiary == model_id)
    refusal = next(
        (one.error.message for one in decided if isinstance(one, actions.Refuse) and one.ticket_id == TICKET), None
    )
    verdict = _verdict(board, model_id, starts, victims, refused=refusal is not None)
    waits = verdict in (Verdict.WAITS, Verdict.LOADING)
    position, waiting = board.line.position(TICKET)
    return Explanation(
        model_id=model_id,
        priority=ticket.priority,
        verdict=verdict,
        need_bytes=board.claim_of(model_id) if model_id in board.models else 0,
        options=starts[0].options if starts else (),
        victims=victims,
        blocked_by=tuple(_blockers(board, ticket, verdict)) if waits else (),
        position=position,
        waiting=waiting,
        devices=(),
        refusal=refusal,
    )


def _verdict(
    board: State,
    model_id: str,
    starts: Sequence[actions.Start | actions.Ask],
    victims: Sequence[Victim],
    *,
    refused: bool,
) -> Verdict:
    if refused:
        return Verdict.REFUSED
    if TICKET in board.running:
        return Verdict.READY
    if any(isinstance(one, actions.Start) for one in starts):
        return Verdict.EVICTS if victims else Verdict.FITS
    coming = any(slot.state is SlotState.LOADING for slot in board.slots.of(model_id))
    return Verdict.LOADING if coming else Verdict.WAITS


def _victim(board: State, slot: SlotRecord) -> Victim:
    return Victim(
        slot_id=slot.id,
        model_id=slot.model.id,
        freed_bytes=sum(slot.shares.values()),
        priority=slot.priority_at(board.now_s, board.limits.aging_s),
        in_flight=len(slot.in_flight),
        idle_s=None if slot.in_flight or slot.state is SlotState.LOADING else max(0.0, board.now_s - slot.idle_since_s),
        reload_s=slot.last_load_s,
    )


def _devices(board: State) -> Iterator[DeviceShare]:
    free = board.rooms().total()
    for device in board.usable:
        yield DeviceShare(
            id=device.id,
            total_bytes=device.total_bytes,
            reserve_bytes=device.reserve_bytes,
            others_bytes=device.others_bytes,
            claimed_bytes=sum(slot.shares.get(device.id, 0) for slot in board.slots.holders()),
            free_bytes=max(0, free[device.id]),
        )


# -- what it would wait for -------------------------------------------------------------------------------------------


def _blockers(board: State, ticket: Ticket, verdict: Verdict) -> Iterator[Blocker]:
    model_id = ticket.model_id
    yield from _about_the_turn(board, ticket)
    for slot in board.slots.values():
        own = slot.model.id == model_id
        if own and slot.state in HAS_LIFE:
            yield Blocker(slot.id, sum(slot.shares.values()), _own_words(slot))
        elif not own and verdict is not Verdict.LOADING and slot.state in HOLDS_MEMORY:
            yield Blocker(slot.id, sum(slot.shares.values()), _words(board, slot, ticket.priority))
    held = sum(board.held_outside().values())
    if held and verdict is Verdict.WAITS:
        yield Blocker(OTHERS, held, f"jobs and other brokers lease {format_bytes(held)}")


def _about_the_turn(board: State, ticket: Ticket) -> Iterator[Blocker]:
    """What has nothing to do with memory."""
    if ticket.client_id in board.resting:
        left_s = board.resting[ticket.client_id] - board.now_s
        yield Blocker("cool-down", 0, f"client '{ticket.client_id}' rests for another {left_s:.1f} s")
    state = board.breaker_state(ticket.model_id)
    if isinstance(state, NotBefore):
        yield Blocker("back-off", 0, f"its engine failed, and is started again in {state.at_s - board.now_s:.1f} s")
    ahead = board.line.position(TICKET)[0] - 1
    if ahead > 0:
        yield Blocker("queue", 0, f"{ahead} waiting requests come first")


def _own_words(slot: SlotRecord) -> str:
    """Why a slot of the wanted model is of no use yet."""
    match slot.state:
        case SlotState.READY:
            return f"all its {slot.model.parallel} places are taken"
        case SlotState.LOADING if slot.leased:
            return "it is being loaded"
        case SlotState.LOADING:
            return "its lease waits until the memory is free"
        case SlotState.QUEUED:
            return "its lease is queued behind other holders of the memory"
        case SlotState.WEDGED:
            return "its processes survive SIGKILL; the memory is not to be had"
        case _:
            return f"it is {slot.state}, and is loaded again when it is gone"


def _words(board: State, slot: SlotRecord, priority: int) -> str:
    """Why another model's slot keeps its memory."""
    own = board.priority_of(slot)
    if slot.state is SlotState.WEDGED:
        return "its processes survive SIGKILL; the memory is not to be had"
    if slot.state in LEAVING:
        left = f" once {len(slot.in_flight)} in flight are done" if slot.in_flight else ""
        return f"it is leaving{left}"
    if slot.model.pin:
        return "it is pinned"
    if slot.state is SlotState.LOADING:
        return f"it is being loaded for a request of class {name_of(own)}"
    if slot.in_flight:
        return f"it is busy: {len(slot.in_flight)} in flight, class {name_of(own)}"
    if own < priority:
        return f"it is idle, but served class {name_of(own)}, which is more important than {name_of(priority)}"
    stays_s = slot.resident_until_s(board.limits.min_residency_s) - board.now_s
    if stays_s > 0:
        return f"it was just loaded and stays for {stays_s:.1f} s more (`min_residency_s`)"
    return "it is idle and may go, which alone would not make enough room"
