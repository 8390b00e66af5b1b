"""Whether a model whose engine failed may be started again, and when: one `Breaker` per model.

Owned by the scheduler, which tells it of every SlotFailed that has a fault (`failed`), of every ticket that an engine
of the model served (`served`) and of an operator who loads the model by hand (`pardon`), and asks `state` before it
starts a slot of the model. Pure: time comes as an argument, and the jitter from the model's id. A model whose
definition changed gets a new breaker. What a refused ticket is told stands in `fault_refusals.py`.

1. After a crash or a stall the next start waits 1, 2, 4 .. 60 s, give or take a fifth. The first restart of an engine
   that had been serving is at once. A request served 10 minutes after the last crash takes all of it back.
2. The third crash in 60 s, or the fifth in 10 minutes, opens the breaker: nothing is started for 5 minutes, and then
   one slot alone. A request that it serves closes the breaker, a crash opens it again.
3. Arguments or a file that the engine cannot take stand until the definition changes, or until the pardon.
4. Where memory ran out the claim is raised once (`raise_claim`, performed by `raised.py`), and the next start is at
   once. When that is not enough either it stands like 3. The claim stays raised, also after the pardon.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, assert_never

from inference.fault import Fault

__all__ = ["Breaker", "MayStart", "NotBefore", "Open", "Standing", "State"]

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
JITTER: Final = 0.2
"""Part of a pause by which it may be longer or shorter, so that what failed together does not return together."""
HEALTHY_S: Final = 600.0
"""Between the last crash and a served request, after which the next crash counts as the first."""
BURSTS: Final = ((3, 60.0), (5, 600.0))
"""So many crashes within so many seconds open the breaker."""
OPEN_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class MayStart:
    """Nothing stands against a start now."""

    alone: bool = False
    """It is a try: only while no other slot of the model has a life."""


@dataclass(frozen=True, slots=True)
class NotBefore:
    """The engine crashed a moment ago: tickets wait, and the start is due later."""

    at_s: float
    """When, monotonic."""


@dataclass(frozen=True, slots=True)
class Open:
    """It crashed too often: tickets are refused."""

    until_s: float
    """When one start is tried, monotonic."""
    crashes: int
    """So many since the last request that took earlier ones back."""
    words: str
    """What was said of the last one."""


@dataclass(frozen=True, slots=True)
class Standing:
    """No start can mend it: tickets are refused until the definition changes, or until the pardon."""

    fault: Fault
    words: str
    """What was said of it."""


State = MayStart | NotBefore | Open | Standing


class Breaker:
    """See the module."""

    def __init__(self, model_id: str) -> None:
        self.raise_claim = False
        """Memory ran out once: starts claim more than the model says."""
        self._model_id = model_id
        self._forget()

    def _forget(self) -> None:
        self._crashes = 0
        self._recent: deque[float] = deque(maxlen=max(count for count, _ in BURSTS))
        """When the last crashes were."""
        self._pauses = 0
        self._not_before_s = 0.0
        self._open_until_s: float | None = None
        """Past: the next start is the try that closes or opens it."""
        self._standing: Fault | None = None
        self._words = ""

    # -- facts --------------------------------------------------------------------------------------------------

    def failed(self, fault: Fault, at_s: float, words: str, *, was_ready: bool = False) -> None:
        """A slot of the model failed; `words` is what its error says, `was_ready` that it had been serving."""
        self._words = words
        match fault:
            case Fault.CRASH | Fault.STALL:  # 1 and 2
                self._crashed(at_s, was_ready=was_ready)
            case Fault.BAD_ARGUMENTS | Fault.BAD_MODEL:  # 3
                self._standing = fault
            case Fault.OUT_OF_MEMORY:  # 4
                self._standing = fault if self.raise_claim else self._standing
                self.raise_claim = True
            case _:
                assert_never(fault)

    def served(self, at_s: float) -> None:
        """An engine of the model served a request."""
        tried = self._open_until_s is not None and at_s >= self._open_until_s
        if tried or (self._recent and at_s - self._recent[-1] >= HEALTHY_S):
            self._forget()

    def pardon(self) -> None:
        """An operator loads the model by hand: whatever was, it may be tried now. A claim that was raised stays so."""
        self._forget()

    def _crashed(self, at_s: float, *, was_ready: bool) -> None:
        self._crashes += 1
        self._recent.append(at_s)
        if self._crashes > 1 or not was_ready:
            pause_s = min(FIRST_PAUSE_S * 2 ** min(self._pauses, 10), LONGEST_PAUSE_S)
            self._pauses += 1
            self._not_before_s = at_s + pause_s * _jitter(self._model_id, self._pauses)
        if self._open_until_s is not None or self._burst(at_s):
            self._open_until_s = at_s + OPEN_S

    def _burst(self, at_s: float) -> bool:
        recent = list(self._recent)
        return any(len(recent) >= count and at_s - recent[-count] <= within_s for count, within_s in BURSTS)

    # -- what follows -------------------------------------------------------------------------------------------

    def state(self, now_s: float) -> State:
        """Whether a slot of the model may be started now."""
        if self._standing is not None:
            return Standing(self._standing, self._words)
        if self._open_until_s is not None:
            if now_s < self._open_until_s:
                return Open(self._open_until_s, self._crashes, self._words)
            return MayStart(alone=True)
        if now_s < self._not_before_s:
            return NotBefore(self._not_before_s)
        return MayStart()


def _jitter(model_id: str, count: int) -> float:
    """1 +- `JITTER`, the same for the same model and pause: policy has no dice."""
    residue = int.from_bytes(f"{model_id}/{count}".encode()) % 1009
    return 1 - JITTER + 2 * JITTER * residue / 1008
