"""Why an engine is no more: the fault, and the sentence that callers and logs get.

Used by `engine_run.py`, one per life of an engine. Asks the backend what its engine's last lines mean (`diagnose`), and
the system whether it killed for want of memory.
"""

from __future__ import annotations

import signal

from gpuboss.units import format_bytes
from inference import engine_log, oom_kills
from inference.backends import Backend
from inference.engine_log import EngineLog
from inference.errors import EngineDied, EngineStalled, LoadFailed, LoadTimeout
from inference.events import Shares
from inference.fault import Fault
from inference.load_progress import LoadProgress
from inference.model import Model
from inference.process import EndReason, Exited, Lost, Report, Wedged

__all__ = ["Inquest"]

READ_LINES = 60
"""Of the log, for the diagnosis."""
SHOWN_LINES = 8
"""Of them, in a message."""


class Inquest:
    """One life of an engine."""

    def __init__(self, model: Model, backend: Backend, log: EngineLog) -> None:
        self._model = model
        self._backend = backend
        self._log = log
        self._oom_kills = 0

    async def begin(self) -> None:
        """The engine is about to be launched, or to be taken over: what was before is none of it."""
        await self._log.begin()
        self._oom_kills = oom_kills.count()

    def load_failed(self, report: Report, shares: Shares) -> LoadFailed:
        """It ended, or was lost, before it was ready."""
        fault = self._fault(report)
        return LoadFailed(
            f"'{self._model.id}' could not be loaded: its engine {self._how(fault, report, shares)}", fault=fault
        )

    def load_stalled(self, stalled_s: float, progress: LoadProgress) -> LoadTimeout:
        """It lives and does not become ready."""
        return LoadTimeout(
            f"'{self._model.id}' did not become ready: no progress for {stalled_s:.0f} s "
            f"({progress}){self._last_words()}",
            fault=Fault.STALL,
        )

    def died(self, report: Report, shares: Shares) -> EngineDied:
        """It ended while it served."""
        fault = self._fault(report)
        return EngineDied(
            f"the engine of '{self._model.id}' {self._how(fault, report, shares)}", retry_after_s=1.0, fault=fault
        )

    def stalled(self, still_s: float, stall_s: float) -> EngineStalled:
        """It lives and does not get on with what it was asked."""
        return EngineStalled(
            f"the engine of '{self._model.id}' was killed: with requests under way it made no progress for "
            f"{still_s:.0f} s, and `stall_s` in model-boss.yaml is {stall_s:g}{self._last_words()}",
            retry_after_s=1.0,
            fault=Fault.STALL,
        )

    def _fault(self, report: Report) -> Fault:
        """A supervisor that was killed took the engine along: it ended by no fault of its own, but it ended."""
        if not isinstance(report, Exited):
            return Fault.CRASH
        killed = report.signal == signal.SIGKILL and report.reason is EndReason.EXIT
        if killed and oom_kills.count() > self._oom_kills:
            return Fault.OUT_OF_MEMORY
        return self._backend.diagnose(report, self._log.last_lines(READ_LINES))

    def _how(self, fault: Fault, report: Report, shares: Shares) -> str:
        leased = f" with {format_bytes(sum(shares.values()))} leased" if fault is Fault.OUT_OF_MEMORY else ""
        return f"{fault.words}{leased}; {self._ending(report)}"

    def _ending(self, report: Report) -> str:
        """How it ended, and what it said last."""
        match report:
            case Exited():
                return f"it {report}{self._last_words()}"
            case Lost(code):
                how = "" if code is None else f" by signal {-code}" if code < 0 else f" by exit code {code}"
                return f"its supervisor was ended{how}"
            case Wedged(pids):
                return f"its processes {', '.join(map(str, pids))} do not end"
            case _:
                return f"its supervisor said {report}"

    def _last_words(self) -> str:
        lines = self._log.last_lines(SHOWN_LINES)
        text = engine_log.without_paths("\n".join(lines), self._model.path)
        return f"; its log ends with:\n{text}" if lines else ""
