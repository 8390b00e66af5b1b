"""Small traces and worlds for the tests of the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inference import actions, events
from inference.events import DeviceRoom
from inference.queue import QueueLimits
from inference.simulation.journal import Journal
from inference.simulation.replay import Outcome, replay
from inference.simulation.trace import Request, Trace, TraceModel

GIB = 1 << 30
NORMAL = 10


def a_device(name: str = "d0", gib: int = 10, *, node: str = "") -> DeviceRoom:
    return DeviceRoom(name, gib * GIB, 0, 0, accelerator=True, node=node)


def a_model(name: str, gib: float = 8, *, load_s: float | None = 10.0, **more: object) -> TraceModel:
    return TraceModel(name, int(gib * GIB), load_s, **more)  # type: ignore[arg-type]  # fields by name


def ask(at_s: float, model: str, service_s: float | None = 2.0, priority: int = NORMAL, **more: object) -> Request:
    return Request(at_s, model, priority, service_s=service_s, **more)  # type: ignore[arg-type]  # fields by name


def a_trace(
    requests: Iterable[Request],
    models: Sequence[TraceModel] = (a_model("a"), a_model("b")),
    devices: Sequence[DeviceRoom] = (a_device(),),
    **limits: float,
) -> Trace:
    """Two models, room for one, unless told otherwise."""
    return Trace(tuple(devices), tuple(models), tuple(requests), QueueLimits(**limits))  # type: ignore[arg-type]


def played(trace: Trace, policy: str = "ours", **more: int) -> Outcome:
    return replay(trace, policy, models_max=more.get("models_max"))


def waits(outcome: Outcome) -> list[float | None]:
    """Seconds each request waited, in the order they came."""
    return [turn.waited_s for turn in outcome.journal.turns.values()]


class Story(Journal):
    """A journal that also tells in words what was decided: `0 start a`, `12 drain a`."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def __call__(self, event: events.Event, decided: Sequence[actions.Action]) -> None:
        super().__call__(event, decided)
        for action in decided:
            match action:
                case actions.Start(slot_id) | actions.Drain(slot_id) | actions.Stop(slot_id):
                    self.words.append(f"{event.at_s:g} {type(action).__name__.lower()} {slot_id}")
                case actions.Grant(ticket_id, slot_id):
                    self.words.append(f"{event.at_s:g} grant {slot_id} to {self.turns[ticket_id].ticket.client_id}")
                case _:
                    pass
