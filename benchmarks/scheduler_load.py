"""A busy pool for the scheduler to decide about: every device full, a backlog that never ends.

Used by `scheduler.py`. What the scheduler decides comes true in the simulator's world (`inference/simulation/world.py`)
on a virtual clock, so its state is one that it got itself into: slots that are busy, idle, loading and leaving, models
over two devices, further slots of crowded models, pinned models, idle slots that a better class defends, claims that
are overdue, models that were just loaded. A ticket that has had its turn is followed by another one for the same model,
so as many wait for each at the end as at the beginning, and ten times the tickets are the same pool with longer lines.
"""

from __future__ import annotations

import gc
import random
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from gpuboss.priority import CLASSES
from inference import actions, events
from inference.queue import QueueLimits
from inference.scheduler import Scheduler
from inference.simulation.devices import parse_devices
from inference.simulation.trace import Request, TraceModel
from inference.simulation.world import Times, World
from inference.slot_state import SlotState

GIB = 1 << 30
DEVICES = "8x8x24GiB"
SETTLED_S = 60.0
"""Seconds of the virtual clock after which no trace of the beginning is left."""
TICK_S = 0.1
"""As often as a broker looks while somebody waits; it reads the devices then."""
RARE = 0.15
"""This part of the models is asked for now and then only, by more important callers: their slots are mostly idle."""
PASSING_S = 0.1
"""While nobody is missing in the queue, one comes in so long for a pinned model, and is served at once."""
RARELY = 0.02
"""The part of those that is for one of the rare models instead."""
_PINNED = "m20"


@dataclass(frozen=True, slots=True)
class Decision:
    """One call of `Scheduler.handle`."""

    kind: str
    """The event's."""
    took_s: float
    collecting_s: float
    """Of it, what Python's garbage collector took."""


class TimedScheduler:
    """A scheduler whose decisions are timed. Before a tick it reads the devices, as the pool does."""

    def __init__(self, limits: QueueLimits, rng: random.Random) -> None:
        self.scheduler = Scheduler(limits)
        self.decisions: list[Decision] = []
        self.granted: deque[str] = deque()
        """The models of the tickets that had their turn, for whoever replaces them."""
        self._rng = rng
        self._devices: tuple[events.DeviceRoom, ...] = ()
        self._collecting_s = self._collection_began_s = 0.0

    def handle(self, event: events.Event) -> list[actions.Action]:
        """Decide; see `Scheduler.handle`."""
        if isinstance(event, events.DevicesRead):
            self._devices = event.devices
        if not isinstance(event, events.Tick):
            return self._decide(event)
        return [*self._decide(events.DevicesRead(event.at_s, self._look())), *self._decide(event)]

    @property
    def waiting_count(self) -> int:
        """Tickets in the queue."""
        return self.scheduler.waiting_count

    def _decide(self, event: events.Event) -> list[actions.Action]:
        collected_s, began_s = self._collecting_s, time.thread_time()
        decided = self.scheduler.handle(event)
        took_s = time.thread_time() - began_s
        self.granted.extend(action.slot_id.partition("#")[0] for action in decided if isinstance(action, actions.Grant))
        self.decisions.append(Decision(type(event).__name__, took_s, self._collecting_s - collected_s))
        return decided

    def _look(self) -> tuple[events.DeviceRoom, ...]:
        """Somebody's screen takes a little more or less of one of the GPUs every second or so."""
        if self._devices and self._rng.random() < TICK_S:
            index = self._rng.randrange(len(self._devices))
            moved = replace(self._devices[index], others_bytes=self._rng.randrange(64) << 20)
            self._devices = (*self._devices[:index], moved, *self._devices[index + 1 :])
        return self._devices

    def watch_collector(self, phase: str, _info: dict[str, int]) -> None:
        """For `gc.callbacks`."""
        if phase == "start":
            self._collection_began_s = time.thread_time()
        else:
            self._collecting_s += time.thread_time() - self._collection_began_s


class BusyPool:
    """A pool with so many tickets waiting. `run` it for as many decisions as are wanted."""

    def __init__(self, tickets: int, *, models: int, seed: int = 1) -> None:
        self._rng = random.Random(seed)
        self._tickets = tickets
        self._models = [_model(number, self._rng) for number in range(models)]
        ids = [model.id for model in self._models]
        rare = max(1, round(models * RARE))
        self._rare, self._asked = ids[:rare], [one for one in ids[rare:] if one != _PINNED]
        self._closed = frozenset(self._asked)
        """The models of which as many tickets wait at the end as at the beginning."""
        self._popularity = list(accumulate(1.0 / rank**0.8 for rank in range(1, len(self._asked) + 1)))
        limits = QueueLimits(max_waiting=10 * tickets, max_wait_s=1e9)
        self._timed = TimedScheduler(limits, self._rng)
        self._world = World(
            self._timed,
            devices=parse_devices(DEVICES),
            models={model.id: model.as_model() for model in self._models},
            times=Times(
                load_s={model.id: model.load_s or 0.0 for model in self._models},
                service_s={model.id: self._rng.uniform(0.5, 4.0) for model in self._models} | {_PINNED: PASSING_S},
            ),
            requests=self._requests(),
            tick_s=TICK_S,
        )

    def settle(self) -> None:
        """Let the tickets come, and wait until the pool is as it will go on."""
        self._world.begin()
        self._world.run(SETTLED_S)

    def run(self, decisions: int) -> list[Decision]:
        """The next decisions."""
        self._timed.decisions = []
        gc.callbacks.append(self._timed.watch_collector)
        try:
            while len(self._timed.decisions) < decisions:
                self._world.step()
        finally:
            gc.callbacks.remove(self._timed.watch_collector)
        return self._timed.decisions

    @property
    def waiting(self) -> int:
        """Tickets in the queue."""
        return self._timed.waiting_count

    def described(self) -> str:
        """What there is to decide about, in numbers."""
        board = self._timed.scheduler.board
        states: Counter[str] = Counter()
        for slot in board.slots.values():
            if slot.state is SlotState.READY:
                states["busy" if slot.in_flight else "idle"] += 1
            elif slot.state is not SlotState.IDLE:
                states[slot.state.value] += 1
        further = sum("#" in slot.id and slot.state is not SlotState.IDLE for slot in board.slots.values())
        split = sum(len(slot.shares) > 1 for slot in board.slots.values())
        overdue = sum(claim.overdue(board.now_s, board.limits) for claim in board.claims.values())
        slots = ", ".join(f"{count} {name}" for name, count in states.most_common())
        return (
            f"{self.waiting} tickets for {len(board.line.models())} models, {len(board.usable)} devices; "
            f"slots: {slots} ({further} further ones, {split} split); {len(board.claims)} claims, {overdue} overdue"
        )

    def _requests(self) -> Iterator[Request]:
        """First the backlog, then for each ticket that has had its turn another one for the same model."""
        at_s = 0.0
        for _ in range(self._tickets):
            yield self._request(at_s, self._any_model())
        while True:
            at_s = max(at_s, self._world.now_s)  # the world asks for the next request before it is at this one's moment
            if not self._timed.granted:  # nobody is missing
                at_s += PASSING_S
                yield self._request(at_s, self._rng.choice(self._rare) if self._rng.random() < RARELY else _PINNED)
                continue
            model = self._timed.granted.popleft()
            if model in self._closed:
                yield self._request(at_s, model)

    def _any_model(self) -> str:
        return self._rng.choices(self._asked, cum_weights=self._popularity)[0]

    def _request(self, at_s: float, model: str) -> Request:
        rng = self._rng
        client = rng.randrange(500)
        common = rng.choices(list(CLASSES.values()), (1, 2, 20, 6, 3))[0]
        return Request(
            at_s=at_s,
            model=model,
            priority=CLASSES["high"] if model in self._rare else common,
            client=f"c{client}",
            session=f"s{client}" if rng.random() < 0.3 else None,
        )


def _model(number: int, rng: random.Random) -> TraceModel:
    name, over_two = f"m{number}", number % 10 == 9
    return TraceModel(
        id=name,
        claim_bytes=int(rng.uniform(30, 44) if over_two else rng.choice((14, 17, 20, 22, 23))) * GIB,
        load_s=rng.uniform(2.0, 20.0),
        parallel=rng.choice((1, 2, 4)) if name != _PINNED else 16,
        replicas=rng.choice((1, 1, 1, 2, 3)),
        pin=name == _PINNED or number % 40 == 30,
        preload=number % 25 == 24,
    )
