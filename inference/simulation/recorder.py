"""Takes down the requests of a running broker, for whoever listens, as the lines of a trace. Costs nothing otherwise.

Told by `pool.py` of every ticket's coming and going; listened to by `coordinator/api/trace.py`. A request's line is
written when its end is known; what came before somebody began to listen is not told to them. Clients and sessions
become numbers, each listener's own, unless they want the names; who has not been seen for long becomes a new one. What
was asked and answered is never seen here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import replace

from inference import errors
from inference.events import Ticket
from inference.queue import QueueLimits
from inference.simulation.trace import Request
from inference.simulation.trace_lines import lost_line, request_line

__all__ = ["Listener", "Recorder"]

MOST_LINES = 10_000
"""What is kept for a listener who does not keep up; the rest is lost to them, and they are told how much."""
MOST_LISTENERS = 16
"""At once. Each costs a connection, its lines, and time of the broker's at the end of every request."""
MOST_OPEN = 10_000
"""Requests on their way that are remembered; more can hardly be."""
MOST_NAMES = 10_000
"""Of clients and sessions together, the last seen, whose numbers a listener remembers. A name that was forgotten gets
a new number; none is given twice."""


class Listener:
    """One who wants the lines. `Recorder.listen` makes it; `close` it."""

    def __init__(self, recorder: Recorder, began_s: float, *, names: bool) -> None:
        self.lost = 0
        """Requests they will not be told of, since they were last told how many."""
        self._recorder = recorder
        self._began_s = began_s
        self._names = names
        self._numbers: OrderedDict[tuple[str, str], str] = OrderedDict()
        """By kind and name, the longest unseen first."""
        self._given = 0
        self._lines: deque[bytes] = deque()
        self._stirred = asyncio.Event()

    def hear(self, request: Request) -> None:
        """A request's way has ended; `at_s` is the broker's monotonic time."""
        if request.at_s < self._began_s:
            return
        if len(self._lines) >= MOST_LINES:
            self.lost += 1
            return
        shown = replace(
            request,
            at_s=request.at_s - self._began_s,
            client=self._called("client", request.client),
            session=self._called("session", request.session),
        )
        self._lines.append(request_line(shown))
        self._stirred.set()

    async def lines(self, timeout_s: float) -> bytes:
        """The lines since the last call, at least one; b"" when there is none within the time."""
        if not self._lines:
            self._stirred.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._stirred.wait()
            except TimeoutError:
                return b""
        told = b"".join(self._lines)
        self._lines.clear()
        if self.lost:
            told, self.lost = told + lost_line(self.lost), 0
        return told

    def close(self) -> None:
        """Listen no more."""
        self._recorder.forget(self)

    def _called(self, kind: str, name: str | None) -> str | None:
        if name is None or self._names:
            return name
        if (kind, name) not in self._numbers:
            self._given += 1
            self._numbers[kind, name] = str(self._given)
        self._numbers.move_to_end((kind, name))
        number = self._numbers[kind, name]
        if len(self._numbers) > MOST_NAMES:
            self._numbers.popitem(last=False)
        return number


class Recorder:
    """Of one pool. On the event loop's thread alone."""

    def __init__(self, limits: QueueLimits | None = None) -> None:
        self.limits = limits or QueueLimits()
        """The queue's, for the header of a trace."""
        self._listeners: list[Listener] = []
        self._open: dict[str, Request] = {}
        """By ticket, what is on its way; only while somebody listens."""

    def listen(self, now_s: float, *, names: bool = False) -> Listener:
        """Somebody wants to hear of everything that comes from now on. TooManyRecordings where too many do already."""
        if len(self._listeners) >= MOST_LISTENERS:
            raise errors.TooManyRecordings(
                f"{MOST_LISTENERS} recordings of the requests run already, and more may not; end one of them"
            )
        listener = Listener(self, now_s, names=names)
        self._listeners.append(listener)
        return listener

    def forget(self, listener: Listener) -> None:
        """They do not any more."""
        if listener in self._listeners:
            self._listeners.remove(listener)
        if not self._listeners:
            self._open.clear()

    # -- what the pool tells ------------------------------------------------------------------------------------------

    def arrived(self, ticket: Ticket, at_s: float) -> None:
        """A ticket joined the queue, or was granted at once."""
        if self._listeners and len(self._open) < MOST_OPEN:
            self._open[ticket.id] = Request(
                at_s=at_s,
                model=ticket.model_id,
                priority=ticket.priority,
                client=ticket.client_id,
                session=ticket.session_id,
                purpose=ticket.purpose,
                stay_warm_s=ticket.stay_warm_s,
                cooldown_s=ticket.cooldown_s,
            )

    def served(self, ticket_id: str, service_s: float, at_s: float) -> None:  # noqa: ARG002 - the same shape as `left`
        """A granted ticket is done; it used its engine that long."""
        if self._open and (request := self._open.pop(ticket_id, None)) is not None:
            self._tell(replace(request, service_s=service_s))

    def left(self, ticket_id: str, at_s: float) -> None:
        """A waiting ticket's caller gave up."""
        if self._open and (request := self._open.pop(ticket_id, None)) is not None:
            self._tell(replace(request, left_s=at_s - request.at_s))

    def refused(self, ticket_id: str) -> None:
        """A ticket was sent away; its caller would have waited on. To be told before it is closed."""
        if self._open and (request := self._open.pop(ticket_id, None)) is not None:
            self._tell(request)

    def _tell(self, request: Request) -> None:
        for listener in self._listeners:
            listener.hear(request)
