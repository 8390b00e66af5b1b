"""What was measured of every model: how long its requests take, its loads, and how often it is asked for.

Written by `scheduler.py` with what events tell, on the board; read by `forecast.py`, which says when somebody's turn
will be. Means that forget: each new figure counts for a fifth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from inference.model import Model

_WEIGHT = 0.2
_UNKNOWN_SERVICE_S = 2.0
"""Assumed of requests before any was measured."""
_UNKNOWN_STOP_S = 0.3
"""Assumed from a stop to the memory's being back, before any was measured."""
_UNKNOWN_RATE = 1e9
"""Bytes per second assumed of loads before any was measured."""
_RECENT = 8
"""So many of its last arrivals say in which classes a model is asked for."""
_FORGOTTEN_S = 60.0
"""A model that nobody asked for in this time, or in five times its usual gap, is not expected to be asked for."""


@dataclass(slots=True)
class _Habit:
    service_s: float | None = None
    load_s: float | None = None
    gap_s: float | None = None
    """Between two arrivals."""
    arrived_at_s: float | None = None
    classes: tuple[int, ...] = ()
    """Of the last arrivals."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The requests that a model may be expected to get."""

    gap_s: float
    """Seconds between two of them."""
    classes: tuple[int, ...]
    """Theirs, by turns."""


class Habits:
    """The habits of all models. One writer: the scheduler."""

    def __init__(self) -> None:
        self._habits: dict[str, _Habit] = {}
        self._any_service_s: float | None = None
        self._rate: float | None = None
        """Bytes per second of loads, whichever."""
        self._stop_s: float | None = None

    def arrived(self, model_id: str, priority: int, at_s: float) -> None:
        """Somebody asked for the model."""
        habit = self._of(model_id)
        habit.classes = (*habit.classes, priority)[-_RECENT:]
        if habit.arrived_at_s is not None:
            habit.gap_s = _mean(habit.gap_s, at_s - habit.arrived_at_s)
        habit.arrived_at_s = at_s

    def served(self, model_id: str, service_s: float) -> None:
        """A request had the engine for so long."""
        habit = self._of(model_id)
        habit.service_s = _mean(habit.service_s, service_s)
        self._any_service_s = _mean(self._any_service_s, service_s)

    def loaded(self, model: Model, load_s: float) -> None:
        """A load took so long."""
        habit = self._of(model.id)
        habit.load_s = _mean(habit.load_s, load_s)
        if load_s > 0:
            self._rate = _mean(self._rate, model.claim_bytes / load_s)

    def stopped(self, stop_s: float) -> None:
        """A slot's memory was back so long after its stop."""
        self._stop_s = _mean(self._stop_s, stop_s)

    @property
    def stop_s(self) -> float:
        """Seconds from a stop to the memory's being back."""
        return _UNKNOWN_STOP_S if self._stop_s is None else self._stop_s

    def service_s(self, model_id: str) -> float:
        """Seconds a request of the model may be expected to take."""
        habit = self._habits.get(model_id)
        if habit is not None and habit.service_s is not None:
            return habit.service_s
        return self._any_service_s if self._any_service_s is not None else _UNKNOWN_SERVICE_S

    def load_s(self, model: Model) -> float:
        """Seconds its load may be expected to take; of one that never was loaded, by its size and others' loads."""
        habit = self._habits.get(model.id)
        if habit is not None and habit.load_s is not None:
            return habit.load_s
        return model.claim_bytes / (self._rate or _UNKNOWN_RATE)

    @property
    def measured(self) -> bool:
        """Was any request served? Before that, every forecast is a guess."""
        return self._any_service_s is not None

    def expected(self, now_s: float) -> Mapping[str, Expected]:
        """What is to come, of the models that somebody is expected to ask for."""
        return {
            model_id: Expected(habit.gap_s, habit.classes)
            for model_id, habit in self._habits.items()
            if habit.gap_s is not None
            and habit.arrived_at_s is not None
            and now_s - habit.arrived_at_s < min(_FORGOTTEN_S, 5 * habit.gap_s + 1.0)
        }

    def forget(self, model_id: str) -> None:
        """The model is not known any more."""
        self._habits.pop(model_id, None)

    def copy(self) -> Habits:
        """The same habits, to be changed apart."""
        twin = Habits()
        twin._habits = {model_id: replace(habit) for model_id, habit in self._habits.items()}
        twin._any_service_s, twin._rate, twin._stop_s = self._any_service_s, self._rate, self._stop_s
        return twin

    def _of(self, model_id: str) -> _Habit:
        habit = self._habits.get(model_id)
        if habit is None:
            habit = self._habits[model_id] = _Habit()
        return habit


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + _WEIGHT * (value - before)
