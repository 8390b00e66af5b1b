"""When waiting requests will have their turn: the live scheduler's twin is run ahead on a virtual clock.

Run by `forecaster.py`, for everybody who waits and for an explanation. Runs the very scheduler in the
very simulator, with what was measured of each model (`habits.py`): how long requests and loads take, how often and in
which classes it is asked for. That is done twice: as if everybody went on asking as before, for those who come later
may pass who waits, and as if nobody else came. Where the two agree, their mean is the estimate. Where they do not, it
hinges on who will come; whoever that is true of, or who has no turn within `HORIZON_S`, or not before `MOST_STEPS`
things happened, gets no estimate: better none than a wrong one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

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
AGREED, AGREED_S = 0.3, 0.5
"""By so much of the time left, or by so little, the two may differ."""
_TICK_S = 0.2
"""Of the virtual clock; the live one ticks ten times a second while somebody waits."""
_SHORTEST_GAP_S = 0.001
"""Between two expected requests for a model."""


class Forecast:
    """One look ahead. `run` it, in slices if need be, then read `turns_s`: whose turn comes soon is found first."""

    def __init__(self, twin: Scheduler, now_s: float) -> None:
        """`twin` is a copy that nobody else uses."""
        self._now_s = now_s
        self._alone = _Course(twin.copy(), now_s, ())
        self._among_others = _Course(twin, now_s, _expected(twin.board, now_s) if twin.board.habits.measured else ())

    @property
    def turns_s(self) -> Mapping[str, float]:
        """By ticket, the moment (of the clock of `now_s`) at which it would have its engine."""
        found: dict[str, float] = {}
        for ticket_id, alone_s in self._alone.turns_s.items():
            among_s = self._among_others.turns_s.get(ticket_id)
            if among_s is not None:
                unsure_s = abs(among_s - alone_s)
                if unsure_s <= max(AGREED * (max(among_s, alone_s) - self._now_s), AGREED_S):
                    found[ticket_id] = (among_s + alone_s) / 2
        return found

    def run(self, most_steps: int = 2 * MOST_STEPS) -> bool:
        """Look ahead by so many steps at most; True when all is found out."""
        for _ in range(most_steps):
            courses = [course for course in (self._alone, self._among_others) if not course.over]
            if not courses:
                return True
            min(courses, key=lambda course: course.now_s).step()
        return self._alone.over and self._among_others.over


class _Course:
    """What would happen if these requests came."""

    def __init__(self, twin: Scheduler, now_s: float, coming: Iterable[Request]) -> None:
        board = twin.board
        self.turns_s: dict[str, float] = {}
        self._open = {entry.ticket.id for entry in board.line.in_order(now_s)}
        self._steps = 0
        self._until_s = now_s + HORIZON_S
        self._world = World(
            twin,
            devices=board.devices,
            models=board.models,
            times=_times(board),
            requests=coming,
            standing=_standing(board),
            now_s=now_s,
            tick_s=_TICK_S,
            watcher=self._watch,
        )

    @property
    def now_s(self) -> float:
        """How far it has come."""
        return self._world.now_s

    @property
    def over(self) -> bool:
        """Is there nothing more to find out?"""
        return not self._open or self._steps >= MOST_STEPS or self._world.now_s >= self._until_s

    def step(self) -> None:
        """The next thing that happens."""
        self._steps += 1
        if not self._world.step():
            self._open.clear()

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
    expected = {model_id: one for model_id, one in board.habits.expected(now_s).items() if model_id in board.models}
    coming = [(one.gap_s, model_id, 0) for model_id, one in expected.items()]
    heapq.heapify(coming)
    while coming:
        at_s, model_id, count = heapq.heappop(coming)
        one = expected[model_id]
        yield Request(at_s=at_s, model=model_id, priority=one.classes[count % len(one.classes)], purpose=Purpose.INFER)
        heapq.heappush(coming, (at_s + max(one.gap_s, _SHORTEST_GAP_S), model_id, count + 1))
