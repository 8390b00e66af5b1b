"""Everything that can go wrong between a request and its engine.

    InferenceError
    |- ModelNotFound          no model, alias or pattern of that name
    |- ModelBroken            the model is known, but its file or manifest is not usable
    |- WillNeverFit           larger than any device would be when empty
    |- NoRoom                 everything that holds the memory may not be evicted
    |- QueueFull              too many tickets wait already
    |- TooManyRecordings      as many recordings run as may
    |- TooManyQuestions       as many questions for an explanation wait as may
    |- QueueTimeout           waited longer than queue.max_wait_s
    |- LoadFailed             the engine could not be started, or ended before it was ready
    |- LoadTimeout            the engine did not become ready in time
    |- EngineDied             the engine ended while it served
    |- EngineStalled          the engine made no progress with what it was asked, and was killed
    |- Preempted              something more important took the memory
    |- Unloaded               an operator unloaded the model while the request waited
    |- ShuttingDown           the broker is on its way out
    |- EngineMissing          no engine program is installed for this model's backend
    '- IllegalTransition      a slot was asked to make a move its state table forbids (a bug)

`coordinator/errors.py` maps each to an HTTP status and code in one table; a test finds every subclass there.
Messages are written for the caller, carry numbers, and name the setting to change.
"""

from __future__ import annotations

from collections.abc import Mapping

from inference.fault import Fault


class InferenceError(Exception):
    """Base of all errors of this package; the message is fit to be shown to the caller."""

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float | None = None,
        fault: Fault | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        """Seconds after which asking again may succeed; None when that is not known or pointless."""
        self.fault = fault
        """What was wrong with the engine; None where it was not the engine."""
        self.facts: Mapping[str, object] = facts or {}
        """The message's numbers, for programs."""


class ModelNotFound(InferenceError):
    """No model, alias or pattern of that name."""


class ModelBroken(InferenceError):
    """The model is known, but its file or manifest cannot be used."""


class WillNeverFit(InferenceError):
    """The model is larger than any device would be when empty."""


class NoRoom(InferenceError):
    """Everything that holds the memory may not be evicted."""


class QueueFull(InferenceError):
    """Too many tickets wait already (`queue.max_waiting`)."""


class TooManyRecordings(InferenceError):
    """As many recordings of the requests run as may (`simulation/recorder.py`)."""


class TooManyQuestions(InferenceError):
    """As many questions for an explanation wait as may (`forecaster.py`)."""


class QueueTimeout(InferenceError):
    """The ticket waited longer than `queue.max_wait_s`."""


class LoadFailed(InferenceError):
    """The engine could not be started, or ended before it was ready."""


class LoadTimeout(InferenceError):
    """The engine did not become ready in time."""


class EngineDied(InferenceError):
    """The engine ended while it served."""

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, fault: Fault | None = None, reached: bool = True
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s, fault=fault)
        self.reached = reached
        """False when the engine was dead before it got the request: another one may serve it."""


class EngineStalled(InferenceError):
    """The engine lives but made no progress for `stall_s` with what it was asked, and was killed."""


class Preempted(InferenceError):
    """Something more important took the engine's memory, and the request was not done when its grace was over."""


class Unloaded(InferenceError):
    """An operator unloaded the model while the request waited."""


class ShuttingDown(InferenceError):
    """The broker is on its way out."""


class EngineMissing(InferenceError):
    """No engine program is installed for this model's backend."""


class IllegalTransition(InferenceError):
    """A slot was asked to make a move its state table forbids; the message holds the slot's story."""
