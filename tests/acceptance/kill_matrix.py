"""The rounds of one kind of kill: when to strike, what was hit, what it led to.

Used by `test_kills.py`. A round waits for a random moment in which some slot is in the state that was hit least so far.
What counts as hit is what the broker's own log says of the moment of the kill.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tests.acceptance.broker import Broker

KILLS = int(os.environ.get("MODEL_BOSS_KILLS", "10"))
"""Of each kind; 50 for the whole matrix."""
ENOUGH = max(1, KILLS // 10)
"""How often each state has to be hit."""
STATES = ("loading", "ready", "draining", "stopping")
AIM_S = 15.0
"""How long a round waits for its state before it takes what there is."""
DWELL_S = {"loading": 0.06, "ready": 0.3, "draining": 0.03, "stopping": 0.002}
"""The longest that a kill waits inside the state it aims at, so that it falls anywhere in it."""

Slots = dict[str, dict[str, Any]]
"""By model, as /api/v1/slots shows them."""


@dataclass
class Tally:
    """What all rounds of one kind came to."""

    target: str
    moments_s: list[float] = field(default_factory=list)
    """When each kill was done, monotonic."""
    hits: Counter[str] = field(default_factory=Counter)
    """Kills that found a slot in the state."""
    times_s: dict[str, list[float]] = field(default_factory=dict)
    """How long things took, by what it was."""
    adopted: int = 0
    """Engines that the next broker took over."""

    @property
    def kills(self) -> int:
        """How many so far."""
        return len(self.moments_s)

    def took(self, what: str, seconds: float) -> float:
        """Note how long it took; returns it."""
        self.times_s.setdefault(what, []).append(seconds)
        return seconds

    def __str__(self) -> str:
        hits = ", ".join(f"{state} {self.hits[state]}" for state in STATES)
        times = (f"{what} {median(took):.2f} s, at worst {max(took):.2f} s" for what, took in self.times_s.items())
        adopted = f"; {self.adopted} engines were adopted" if self.adopted else ""
        return f"{self.kills} kills of the {self.target}; hit: {hits}; {'; '.join(times)}{adopted}"


class Looker:
    """Asks for the slots over one connection, as fast as the broker answers."""

    def __init__(self, subject: Broker) -> None:
        self._subject = subject
        self._connection: http.client.HTTPConnection | None = None

    def slots(self) -> Slots:
        """The slots now; OSError while the broker does not answer."""
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection("127.0.0.1", self._subject.port, timeout=10)
            self._connection.request("GET", "/api/v1/slots")
            answer = json.loads(self._connection.getresponse().read())
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ConnectionError(f"no slots to be seen: {error}") from error
        return {slot["model"]: slot for slot in answer["slots"]}

    def close(self) -> None:
        """Close the connection; the next look opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Matrix:
    """See the module."""

    def __init__(self, subject: Broker, target: str, *, seed: int) -> None:
        self.tally = Tally(target)
        self._subject = subject
        self._looker = Looker(subject)
        self._rng = random.Random(seed)

    def rounds(self) -> Iterator[int]:
        """One number per kill: as many as wanted, and then more while a state was hit too rarely."""
        while self.tally.kills < KILLS or (self._rarest()[1] < ENOUGH and self.tally.kills < 2 * KILLS):
            yield self.tally.kills

    def aim(self, *, running: str | None = None) -> tuple[str, Slots]:
        """Wait for the moment; a model that is in the wanted state, and all slots.

        `running`: the key of the pid that the model's slot must show.
        """
        time.sleep(self._rng.uniform(0, 0.2))
        wanted = self._rarest()[0] if self.tally.kills % 5 else None
        deadline_s = time.monotonic() + AIM_S
        while True:
            if time.monotonic() > deadline_s:
                wanted = None
            model, _ = self._sight(wanted, running)
            if model is None:
                continue
            time.sleep(self._rng.uniform(0, DWELL_S.get(wanted or "", 0.0)))
            again, slots = self._sight(wanted, running, model)
            if again is not None:
                return again, slots

    def strike(self, pid: int, slots: Slots, model: str | None = None) -> float:
        """kill -9; the moment just before, monotonic. `model`: whose state counts, where not every slot's does.

        ProcessLookupError when it is gone already: no kill.
        """
        at_s, killed_s = time.time(), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self._looker.close()
        self.tally.moments_s.append(killed_s)
        states = self._subject.states_at(at_s)
        if not states:
            states = {name: slot["state"] for name, slot in slots.items()}
        self.tally.hits.update({states[model]} if model else set(states.values()))
        told = " ".join(f"{name}={state}" for name, state in sorted(states.items()))
        print(f"kill {self.tally.kills} of the {self.tally.target}{f' of {model}' if model else ''}: {told}")
        return killed_s

    def check(self) -> None:
        """Every state was hit often enough."""
        self._looker.close()
        print(self.tally)
        state, hits = self._rarest()
        assert hits >= ENOUGH, f"{state} was hit {hits} times only, of {ENOUGH}: {self.tally}"

    def _rarest(self) -> tuple[str, int]:
        hits = self.tally.hits
        state = min(STATES, key=lambda state: (hits[state], state == "ready"))
        return state, hits[state]

    def _sight(self, wanted: str | None, running: str | None, only: str | None = None) -> tuple[str | None, Slots]:
        slots = self._looker.slots()
        fitting = [
            model
            for model, slot in slots.items()
            if (only is None or model == only)
            and (slot["state"] == wanted if wanted else slot["state"] in STATES)
            and (running is None or slot[running] is not None)
        ]
        return (self._rng.choice(fitting) if fitting else None), slots
