"""Who is loaded without a request: pinned and preloaded models, and slots that left for somebody outside.

Called by `scheduler.py` at every tick, after `plan.py` has decided; decides through the moves of `board.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from gpuboss.priority import LEAST_IMPORTANT
from inference.board import Board
from inference.breaker import MayStart
from inference.model import Model
from inference.slot_state import HAS_LIFE
from inference.slot_view import SlotRecord


def bring_back(board: Board, kept_loaded: Sequence[Model], contested: Collection[str]) -> None:
    """They take free room, evicting nobody: pinned ones first; then those that left and those to preload, by class, the
    one used last first.

    They keep off the contested devices, which somebody waits for. After a failure or an unload they wait for a request.
    """
    for slot in sorted(_returners(board, kept_loaded), key=lambda slot: _place_of(board, slot)):
        if _is_up(board, slot.model.id):
            continue  # another slot of it came back just now
        rooms = board.rooms()
        rooms.close(contested)
        host_bytes = board.host_bytes_of(slot.model.id)
        if host_bytes and host_bytes > board.host_room():
            continue
        ways = rooms.place(board.claim_of(slot.model.id))
        if ways and slot.returns:
            board.bring_back(slot, ways)
        elif ways:
            board.start(board.models[slot.model.id], ways, LEAST_IMPORTANT)


def _returners(board: Board, kept_loaded: Sequence[Model]) -> list[SlotRecord]:
    kept = [board.slots.first_of(model) for model in kept_loaded if not _is_up(board, model.id)]
    back = [
        slot
        for slot in board.slots.values()
        if slot.returns
        and slot not in kept
        and not _is_up(board, slot.model.id)
        # It must have something left of its time once it is loaded.
        and board.now_s + (slot.last_load_s or 0.0) < slot.warm_until_s
    ]
    return [slot for slot in (*kept, *back) if _may_return(board, slot)]


def _is_up(board: Board, model_id: str) -> bool:
    return any(slot.state in HAS_LIFE for slot in board.slots.of(model_id))


def _may_return(board: Board, slot: SlotRecord) -> bool:
    model = board.models.get(slot.model.id)
    if model is None or model.problem is not None or slot.stays_out or slot.state in HAS_LIFE:
        return False
    return isinstance(board.breaker_state(model.id), MayStart)


def _place_of(board: Board, slot: SlotRecord) -> tuple[bool, int, float]:
    pin = board.models[slot.model.id].pin
    if slot.last_used_s is None:
        return not pin, LEAST_IMPORTANT, math.inf
    return not pin, board.priority_of(slot), -slot.last_used_s
