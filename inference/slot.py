"""A model's place: its state, its story, and the task that brings an engine to life and to its end.

Made by `pool.py`, one or more per model. `start`, `drain` and `stop` move the state at once, so that what the scheduler
decided and what the slot shows never differ; the work that follows is done by one task per life, which reports what
happened. Which moves are allowed is the table in `slot_state.py`; what an engine holds is in `engine_run.py`.

What is reported, and when: LeaseGranted, then SlotReady; and every start ends in exactly one SlotFailed (the engine
ended by itself, or never became ready) or SlotGone (it was stopped). By then its processes are dead and its lease is
released. An engine that a dead broker left begins with SlotAdopted instead.
LeaseLost comes before SlotFailed where that may take a moment: the shim was killed, and the keeper clears up.
SlotWedged says that the processes do not die, and SlotGone follows if they do after all.
In between, Noticed says that the ledger asks for the memory, and Withdrawn that it does not any more.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from gpuboss.leases import Lease
from inference import events
from inference.backends import Backend
from inference.engine_run import GRACE_S, EngineRun
from inference.errors import IllegalTransition, InferenceError, LoadFailed
from inference.events import Event, Shares
from inference.fingerprint import fingerprint
from inference.ledger import Ledger
from inference.model import Model
from inference.orphans import Orphan
from inference.process import Shim, Shims, Wedged
from inference.progress_watch import STALL_S
from inference.proxy import EngineClient
from inference.slot_state import TRANSITIONS, SlotState

__all__ = ["Ledger", "Slot", "Transition"]

STORY_LENGTH = 128

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Transition:
    """One move in a slot's story."""

    state: SlotState
    at_s: float
    """By the slot's clock, monotonic."""
    reason: str

    def __str__(self) -> str:
        return f"{self.at_s:.3f} {self.state}: {self.reason}"


class Slot:
    """See the module. Belongs to one event loop; nothing here blocks it."""

    def __init__(
        self,
        model: Model,
        *,
        ledger: Ledger,
        backend: Backend,
        binary: Path,
        report: Callable[[Event], None],
        id: str | None = None,  # noqa: A002 (what it becomes)
        shims: Shims | None = None,
        grace_s: float = GRACE_S,
        stall_s: float = STALL_S,
        orphan_grace_s: float | None = None,
        story: Iterable[Transition] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`id`: the model's, unless it is one of several slots. `story`: that of the slot which this one replaces.
        `orphan_grace_s`: how long its ready engine waits for the next broker; None: it ends with this one.
        """
        self.model = model
        self.id = id or model.id
        self.state = SlotState.IDLE
        self.ready_at_s: float | None = None
        """When it became ready, by the clock; None while it is not."""
        self.last_load_s: float | None = None
        """Seconds its last load took, from the granted lease to the first answer."""
        self._ledger = ledger
        self._backend = backend
        self._binary = binary
        self._report = report
        self._shims = shims or Shims(ledger.state.ledger_path)
        self._grace_s = grace_s
        self._stall_s = stall_s
        self._orphan_grace_s = orphan_grace_s
        self._clock = clock
        self._story: deque[Transition] = deque(story, maxlen=STORY_LENGTH)
        self._run: EngineRun | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop_wanted = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Slot {self.id} {self.state} pid={self.pid}>"

    # -- looking ---------------------------------------------------------------------------------------------------

    @property
    def story(self) -> tuple[Transition, ...]:
        """The last moves, oldest first."""
        return tuple(self._story)

    @property
    def pid(self) -> int | None:
        """The engine's; None while there is none."""
        return self._run.pid if self._run else None

    @property
    def shim_pid(self) -> int | None:
        """That of the process which supervises the engine; None while there is none."""
        return self._run.shim_pid if self._run else None

    @property
    def lease(self) -> Lease | None:
        """What it holds, or waits for."""
        return self._run.lease if self._run else None

    @property
    def engine(self) -> EngineClient | None:
        """The way to the engine, from the launch to the end."""
        return self._run.client if self._run else None

    @property
    def load_fraction(self) -> float | None:
        """How far its load is, 0 to 1, as far as anything tells; None when it does not load."""
        return self._run.fraction if self._run and self.state is SlotState.LOADING else None

    # -- orders ----------------------------------------------------------------------------------------------------

    def ask(self, options: tuple[Shares, ...], priority: int) -> None:
        """IDLE or FAILED -> QUEUED: queue a lease for memory that others hold; LOADING follows when it is granted.

        QUEUED: ask for these options instead.

        Raises:
            IllegalTransition
        """
        if self.state is SlotState.QUEUED and self._run is not None:
            self._run.ask_for(options, priority)
            return
        self._move(SlotState.QUEUED, "waits for memory that others hold")
        self._begin(options, priority, order=None)

    def start(self, options: tuple[Shares, ...], priority: int, *, order: int | None = None) -> None:
        """IDLE or FAILED -> LOADING: queue a lease for one of the options, best first, and load.

        QUEUED -> LOADING: the same with the lease that is queued. `order`: its place in the ledger's queue.

        Raises:
            IllegalTransition
        """
        queued = self.state is SlotState.QUEUED
        self._move(SlotState.LOADING, "room was found" if queued else "wanted")
        if queued and self._run is not None:
            self._run.ask_for(options, priority)
        else:
            self._begin(options, priority, order=order)

    def fingerprint(self, shares: Shares) -> str:
        """Of the engine that it would start now with a lease like this.

        Raises:
            ModelBroken
        """
        return fingerprint(self.model, self._backend, self._binary, shares, self._ledger.devices)

    async def adopt(self, orphan: Orphan, shim: Shim, lease: Lease) -> None:
        """IDLE -> READY: go on with an engine that a dead broker left, whose shim and lease are ours by now.

        Raises:
            LoadFailed: it does not answer; it is dead then, and its lease is released.
        """
        run = self._make_run()
        try:
            await run.adopt(orphan, shim, lease)
        except BaseException:
            await run.end()
            raise
        past, self._run = orphan.past, run
        self._stop_wanted.clear()
        self.ready_at_s, self.last_load_s = self._clock(), past.load_s
        self._move(SlotState.READY, f"adopted from broker {past.broker.pid}, as process {run.pid}")
        run.hand_over(past.load_s)
        told = (self.id, self.model.id, lease.shares, past.load_s, lease.priority)
        self._report(events.SlotAdopted(self.ready_at_s, *told))
        run.hear_notices()
        self._live_on(run, run.until_over())

    def reprice(self, priority: int) -> None:
        """Give the lease, queued or held, another class."""
        if self._run is not None:
            self._run.ask_for(None, priority)

    def acknowledge(self) -> None:
        """Tell the ledger that the slot has heard its notice and is yielding."""
        if self._run is not None:
            self._run.acknowledge()

    def _begin(self, options: tuple[Shares, ...], priority: int, *, order: int | None) -> None:
        self._stop_wanted.clear()
        run = self._run = self._make_run()
        self._live_on(run, self._serve(run, options, priority, order))

    def _make_run(self) -> EngineRun:
        return EngineRun(
            self.model,
            self.id,
            ledger=self._ledger,
            backend=self._backend,
            binary=self._binary,
            shims=self._shims,
            clock=self._clock,
            wedged=self._wedged,
            noticed=self._noticed,
            grace_s=self._grace_s,
            stall_s=self._stall_s,
            orphan_grace_s=self._orphan_grace_s,
        )

    def drain(self, reason: str) -> None:
        """READY -> DRAINING: those in flight finish. When they have, the pool stops the slot.

        Raises:
            IllegalTransition
        """
        self._move(SlotState.DRAINING, reason)

    def stop(self, reason: str, error: InferenceError | None = None) -> None:
        """QUEUED, LOADING, READY or DRAINING -> STOPPING -> IDLE: end engine, load or wait, and give everything back.

        What is in flight ends with `error`, or as with a dead engine.

        Raises:
            IllegalTransition
        """
        self._move(SlotState.STOPPING, reason)
        if error is not None and self.engine is not None:
            self.engine.interrupt(error)
        self._stop_wanted.set()

    async def wait_over(self) -> None:
        """Wait until the present life, if there is one, has ended and given everything back."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def close(self) -> None:
        """Stop, whatever the state, and wait until nothing is left, or only what is the keeper's to end."""
        if SlotState.STOPPING in TRANSITIONS[self.state]:
            self.stop("the broker shuts down")
        if self._run is not None:
            self._run.hurry()
        await self.wait_over()

    # -- one life --------------------------------------------------------------------------------------------------

    def _live_on(self, run: EngineRun, serve: Coroutine[None, None, InferenceError]) -> None:
        """Until the engine ends, which `serve` says the reason of, or is to end."""
        loop = asyncio.get_running_loop()
        serving = loop.create_task(serve, name=f"engine of {self.id}")
        self._task = loop.create_task(self._live(run, serving), name=f"slot {self.id}")

    async def _live(self, run: EngineRun, serving: asyncio.Task[InferenceError]) -> None:
        stopping = asyncio.create_task(self._stop_wanted.wait(), name=f"stop of {self.id}")
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in (serving, stopping):
            task.cancel()
        await asyncio.wait({serving, stopping})
        error = self._outcome(serving)
        was_ready, self.ready_at_s = self.ready_at_s is not None, None
        if run.lost:
            self._report(events.LeaseLost(self._clock(), self.id))
        await run.end()
        self._run = self._task = None
        if self.state in (SlotState.STOPPING, SlotState.WEDGED):
            self._move(SlotState.IDLE, "its processes are dead and its lease is released")
            self._report(events.SlotGone(self._clock(), self.id))
        else:
            self._move(SlotState.FAILED, error.message)
            _log.warning("slot_failed", slot=self.id, was_ready=was_ready, fault=error.fault, error=error.message)
            self._report(events.SlotFailed(self._clock(), self.id, error, was_ready, error.fault))

    async def _serve(
        self, run: EngineRun, options: tuple[Shares, ...], priority: int, order: int | None
    ) -> InferenceError:
        """Load and serve until the engine ends by itself, and say why it did."""
        lease = await run.acquire(options, priority, order=order, patient=self.state is SlotState.QUEUED)
        if self.state is SlotState.QUEUED:
            self._move(SlotState.LOADING, "others gave the memory back")
        granted_at_s = self._clock()
        self._report(events.LeaseGranted(granted_at_s, self.id, lease.shares))
        await run.launch()
        await run.until_ready()
        if self.state is not SlotState.LOADING:
            return LoadFailed(f"'{self.id}' was stopped")
        self.ready_at_s = self._clock()
        self.last_load_s = self.ready_at_s - granted_at_s
        self._move(SlotState.READY, f"loaded in {self.last_load_s:.3f} s as process {run.pid}")
        self._report(events.SlotReady(self.ready_at_s, self.id, self.last_load_s))
        run.hand_over(self.last_load_s)
        return await run.until_over()

    def _outcome(self, serving: asyncio.Task[InferenceError]) -> InferenceError:
        """Why the engine is no more; of no interest when it was stopped."""
        if serving.cancelled():
            return LoadFailed(f"'{self.id}' was stopped")
        match serving.exception():
            case None:
                return serving.result()
            case InferenceError() as error:
                return error
            case fault:
                # A slot that a fault of ours leaves half way would hold its memory for ever: it fails like any other.
                _log.error("slot_fault", slot=self.id, exc_info=fault)
                return LoadFailed(f"'{self.id}' failed by an error of Model Boss itself: {fault!r}")

    def _noticed(self, lease: Lease) -> None:
        notice, now_s = lease.notice, self._clock()
        if notice is None:
            self._report(events.Withdrawn(now_s, self.id))
        else:
            told = (notice.by, notice.holder, notice.priority, now_s + notice.left_s, notice.outranks)
            self._report(events.Noticed(now_s, self.id, *told))

    def _wedged(self, report: Wedged) -> None:
        """Nothing ends the processes: the memory is shown as held until they are gone."""
        if SlotState.STOPPING in TRANSITIONS[self.state]:
            self._move(SlotState.STOPPING, "its engine ended")
        if self.state is SlotState.STOPPING:
            self._move(SlotState.WEDGED, f"SIGKILL does not end {', '.join(map(str, report.pids))}")
            self._report(events.SlotWedged(self._clock(), self.id))

    def _move(self, to: SlotState, reason: str) -> None:
        if to not in TRANSITIONS[self.state]:
            told = "".join(f"\n  {transition}" for transition in self._story)
            raise IllegalTransition(
                f"slot '{self.id}' is {self.state} and cannot become {to} ({reason}); its story:{told}"
            )
        self.state = to
        self._story.append(Transition(to, self._clock(), reason))
        _log.debug("slot_moved", slot=self.id, state=str(to), reason=reason)
