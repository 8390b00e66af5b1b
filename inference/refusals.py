"""The errors the scheduler refuses tickets with: sentences for the caller, with numbers and the setting to change.

Called by `scheduler.py` and `plan.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuboss.priority import name_of
from gpuboss.units import format_bytes
from inference import errors, fault_refusals
from inference.breaker import Open, Standing
from inference.demand import Demand
from inference.events import DeviceRoom
from inference.model import Model
from inference.placement import MARGIN_BYTES, largest
from inference.queue import Entry
from inference.raised import why_refused
from inference.slot_state import SlotState
from inference.slot_view import SlotRecord
from inference.state import State

_NAMED = 4
"""Devices and models a message names; of the others it says how many."""
RETRY_PREEMPTED_S = 5.0
"""Asked again, the request queues for what memory there is."""


def not_found(model_id: str) -> errors.ModelNotFound:
    """The model left the registry while the ticket waited."""
    return errors.ModelNotFound(f"model '{model_id}' is not, or no longer, among the known models")


def broken(model: Model) -> errors.ModelBroken:
    """The model's file or manifest cannot be used."""
    return errors.ModelBroken(f"model '{model.id}' cannot be served: {model.problem}")


def shut_off(board: State, model: Model, shut: Open | Standing) -> errors.LoadFailed:
    """Its engine failed in a way, or so often, that it is not started again for now."""
    if isinstance(shut, Open):
        return fault_refusals.crashes_too_often(model, shut, board.now_s)
    return fault_refusals.stands(
        model, shut, out_of_memory=why_refused(model, board.as_raised(model.id), board.rooms().total())
    )


def never_fits(board: State, model: Model, need: int, host_bytes: int) -> errors.WillNeverFit | None:
    """Why the model could not be loaded if nothing else were, with what it needs; None where it could be."""
    if need > board.largest_bytes:
        return _larger_than_devices(board, model)
    if host_bytes and board.host is not None and host_bytes > board.host.capacity_bytes:
        return _larger_than_host(model, board.host, host_bytes)
    return None


def _larger_than_devices(board: State, model: Model) -> errors.WillNeverFit:
    several = bool(board.groups)
    need = board.claim_of(model.id)
    where = f"{len(board.usable)} devices together" if several else f"'{board.usable[0].id}'"
    devices = _some(
        f"{device.id} {format_bytes(device.capacity_bytes)} ({format_bytes(device.total_bytes)} less "
        f"{format_bytes(device.reserve_bytes)} reserve)"
        for device in board.usable
    )
    margin = f", of each {format_bytes(MARGIN_BYTES)} left free for a model over several" if several else ""
    return errors.WillNeverFit(
        f"model '{model.id}' needs {format_bytes(need)} ({_basis(board, model)}), but {where} can hold "
        f"at most {format_bytes(largest(board.usable))} when empty: {devices}{margin}. "
        "Set a smaller `vram` in the model's manifest if the estimate is too large, use a smaller model or context, "
        "or change `devices` or `reserve` in model-boss.yaml"
    )


def _larger_than_host(model: Model, host: DeviceRoom, host_bytes: int) -> errors.WillNeverFit:
    return errors.WillNeverFit(
        f"model '{model.id}' needs {format_bytes(host_bytes)} of host memory beside the accelerator, but '{host.id}' "
        f"can hold at most {format_bytes(host.capacity_bytes)} when empty. Raise `gpu_layers` in its manifest, or use "
        "a smaller model"
    )


def all_pinned(board: State, model: Model) -> errors.NoRoom:
    """What holds the room is pinned."""
    pinned = _some(
        f"'{slot.model.id}' {format_bytes(sum(slot.shares.values()))}"
        for slot in board.slots.holders()
        if slot.model.pin
    )
    return errors.NoRoom(
        f"model '{model.id}' needs {format_bytes(board.claim_of(model.id))}, and that room is held by pinned models, "
        f"which are never evicted: {pinned}; {_room_text(board)}. "
        "Unload one of them, or take `pin` out of its manifest"
    )


def no_free_room(board: State, model: Model) -> errors.NoRoom:
    """A ticket that may not evict anybody found no free room."""
    return errors.NoRoom(
        f"model '{model.id}' is not loaded and needs {format_bytes(board.claim_of(model.id))}, but there is "
        f"{_room_text(board)}; this kind of request never evicts another model. "
        "Send an inference request, or load the model first",
        retry_after_s=board.pace_s(len(board.line) + 1),
    )


def queue_full(board: State) -> errors.QueueFull:
    """Too many tickets wait."""
    return errors.QueueFull(
        f"{len(board.line)} requests are waiting and at most {board.limits.max_waiting} may (`queue.max_waiting` in "
        "model-boss.yaml)",
        retry_after_s=board.pace_s(1),
    )


def queue_timeout(board: State, entry: Entry) -> errors.QueueTimeout:
    """The ticket waited too long."""
    ticket = entry.ticket
    position, waiting = board.line.position(ticket.id)
    slot = board.slots.get(ticket.model_id)
    model = board.models.get(ticket.model_id)
    need = f", which needs {format_bytes(board.claim_of(model.id))}" if model is not None else ""
    return errors.QueueTimeout(
        f"waited {board.now_s - ticket.submitted_at_s:.0f} s for model '{ticket.model_id}'{need} and was number "
        f"{position} of {waiting} in the queue; the model {_state_text(slot)}; there is {_room_text(board)}. "
        f"`model-boss explain {ticket.model_id}` tells what is in the way. The limit is {board.limits.max_wait_s:g} s "
        "(`queue.max_wait_s` in model-boss.yaml)",
        retry_after_s=board.pace_s(position),
        facts={"position": position, "waiting": waiting, "eta_s": None},
    )


def _state_text(slot: SlotRecord | None) -> str:
    if slot is None:
        return "is not loaded"
    match slot.state:
        case SlotState.QUEUED:
            return "waits for memory that other holders lease"
        case SlotState.LOADING:
            return "is being loaded"
        case SlotState.READY:
            return f"is loaded, with {len(slot.in_flight)} in flight"
        case SlotState.DRAINING | SlotState.STOPPING:
            return "is leaving the memory"
        case SlotState.WEDGED:
            return "is held by an engine that cannot be ended"
        case SlotState.IDLE | SlotState.FAILED:
            return "is not loaded"


def preempted(model_id: str, demand: Demand) -> errors.Preempted:
    """The engine's memory goes to somebody more important."""
    named = "a person" if not demand.by else f"{demand.holder} (class {name_of(demand.priority)})"
    return errors.Preempted(
        f"the memory of model '{model_id}' was taken for {named}, and the request was not done when the grace was over "
        "(`preempt_grace_s` in model-boss.yaml)",
        retry_after_s=RETRY_PREEMPTED_S,
    )


def unloaded(model_id: str) -> errors.Unloaded:
    """An operator took the model out."""
    return errors.Unloaded(f"model '{model_id}' was unloaded by an operator while the request waited for it")


def shutting_down() -> errors.ShuttingDown:
    """Nothing is started any more."""
    return errors.ShuttingDown("the broker is shutting down and takes no more requests")


def cut_by_shutdown(shutdown_s: float) -> errors.ShuttingDown:
    """It was running, and was not done in time."""
    return errors.ShuttingDown(
        f"the broker shut down, and the request was not done {shutdown_s:g} s later (`shutdown_s` in model-boss.yaml)"
    )


def _basis(board: State, model: Model) -> str:
    if board.claim_of(model.id) > model.claim_bytes:
        return f"it ran out of memory with {format_bytes(model.claim_bytes)}: {model.claim_basis}"
    return model.claim_basis


def _room_text(board: State) -> str:
    rooms = board.rooms().total()
    if not rooms:
        return "no device known yet"
    return _some(
        f"{format_bytes(max(0, rooms[device.id]))} of {format_bytes(device.capacity_bytes)} free on {device.id}"
        for device in board.usable
    )


def _some(texts: Iterable[str]) -> str:
    every: Sequence[str] = list(texts)
    if len(every) <= _NAMED:
        return ", ".join(every)
    return f"{', '.join(every[:_NAMED])} and {len(every) - _NAMED} more"
