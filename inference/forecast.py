"""When waiting requests will have their turn: the live scheduler's twin is run ahead on a virtual clock.

Made by `forecaster.py` (for everybody who waits) and by `pool.py` (for an explanation). Runs the very scheduler in the
very simulator, with what was measured of each model (`habits.py`): how long requests and loads take, and how often the
model is asked for, so that those who will overtake are counted too. Whoever has no turn within `HORIZON_S`, or not
before `MOST_STEPS` things happened, gets no estimate: better none than a wrong one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

from gpuboss.priority import NORMAL
from inference import actions, events
from inference.events import Purpose
from inference.scheduler import Scheduler
from inference.simulation.trace import Request
from inference.simulation.world import Standing, Times, World
from inference.slot_state import HAS_LIFE, SlotState
from inference.state import State

__all__ = ["Forecast"]

HORIZON_S = 900.0
MOST_STEPS = 20_000
_TICK_S = 0.2
"""Of the virtual clock; the live one ticks ten times a second while somebody waits."""


class Forecast:
    """One look ahead. `run` it, in slices if need be, then read `turns_s`."""

    def __init__(self, twin: Scheduler, now_s: float) -> None:
        """`twin` is a copy that nobody else uses."""
        board = twin.board
        self.turns_s: dict[str, float] = {}
        """By ticket, the moment (of the clock of `now_s`) at which it would have its engine."""
        self._open = {entry.ticket.id for entry in board.line.in_order(now_s)}
        self._steps = 0
        self._until_s = now_s + HORIZON_S
        self._world = World(
            twin,
            devices=board.devices,
            models=board.models,
            times=_times(board),
            requests=_expected(board, now_s) if board.habits.measured else (),
            standing=_standing(board),
            now_s=now_s,
            tick_s=_TICK_S,
            watcher=self._watch,
        )

    @property
    def over(self) -> bool:
        """Is there nothing more to find out?"""
        return not self._open or self._steps >= MOST_STEPS or self._world.now_s >= self._until_s

    def run(self, most_steps: int = MOST_STEPS) -> bool:
        """Look ahead by so many steps at most; True when all is found out."""
        for _ in range(most_steps):
            if self.over or not self._world.step():
                self._open.clear()
                return True
            self._steps += 1
        return self.over

    def _watch(self, _: events.Event, decided: Sequence[actions.Action]) -> None:
        for action in decided:
            if isinstance(action, actions.Grant) and action.ticket_id in self._open:
                self.turns_s[action.ticket_id] = self._world.now_s
            if isinstance(action, actions.Grant | actions.Refuse):
                self._open.discard(action.ticket_id)


def _times(board: State) -> Times:
    habits = board.habits
    return Times(
        load_s={model_id: habits.load_s(model) for model_id, model in board.models.items()},
        service_s={model_id: habits.service_s(model_id) for model_id in board.models},
        stop_s=habits.stop_s,
    )


def _standing(board: State) -> Iterator[Standing]:
    for slot in board.slots.values():
        if slot.state in HAS_LIFE and slot.model.id in board.models:
            yield Standing(
                slot_id=slot.id,
                model_id=slot.model.id,
                state=slot.state,
                shares=slot.shares,
                options=slot.asked or (slot.shares,),
                leased=slot.leased or slot.state not in (SlotState.QUEUED, SlotState.LOADING),
                priority=slot.lease_priority,
                since_s=slot.moved_at_s,
                in_flight=dict(slot.granted_at_s),
            )


def _expected(board: State, now_s: float) -> Iterator[Request]:
    """The requests that will come if everybody goes on asking as before; without end."""
    gaps: Mapping[str, float] = {
        model_id: max(gap_s, 0.001)
        for model_id, gap_s in board.habits.gaps_s(now_s).items()
        if model_id in board.models
    }
    coming = [(gap_s, model_id) for model_id, gap_s in gaps.items()]
    heapq.heapify(coming)
    while coming:
        at_s, model_id = heapq.heappop(coming)
        yield Request(at_s=at_s, model=model_id, priority=NORMAL, purpose=Purpose.INFER)
        heapq.heappush(coming, (at_s + gaps[model_id], model_id))
