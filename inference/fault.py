"""Why an engine failed: named by its backend (`Backend.diagnose`) and `engine_run.py`, treated by `breaker.py`.

A failure that is not the engine's doing (no room, the ledger away, no engine installed) has no fault.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Fault"]


class Fault(StrEnum):
    """What was wrong, which is what decides whether another try is worth anything."""

    BAD_ARGUMENTS = "bad_arguments"
    """It does not understand its command line: not started again until the model's definition changes."""
    BAD_MODEL = "bad_model"
    """It cannot read the model's file: not started again until the model's definition changes."""
    OUT_OF_MEMORY = "out_of_memory"
    """It did not get the memory it wanted: its claim is raised once, then it is refused with both numbers."""
    CRASH = "crash"
    """It ended by itself for any other reason: started again, at growing distances, until the breaker opens."""
    STALL = "stall"
    """It lives and does not get on: it is killed, and treated like a crash."""

    @property
    def words(self) -> str:
        """For messages: completes "its engine .."."""
        return _WORDS[self]


_WORDS = {
    Fault.BAD_ARGUMENTS: "does not understand its arguments",
    Fault.BAD_MODEL: "cannot read the model's file",
    Fault.OUT_OF_MEMORY: "ran out of memory",
    Fault.CRASH: "crashed",
    Fault.STALL: "made no progress",
}
