"""`GET /api/v1/trace`: the broker's requests as they end, in the format of a trace, for as long as somebody listens.

Called through FastAPI by `model-boss trace`; listens to `inference/simulation/recorder.py`. Never ends by itself but
with the broker. As many may listen at once as the recorder allows; the next is refused.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from coordinator.broker import Broker
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import Snapshot
from inference import readings
from inference.events import DeviceRoom
from inference.pool import Pool
from inference.simulation.recorder import Listener
from inference.simulation.trace import Trace, TraceModel
from inference.simulation.trace_lines import header_line, learned_line

LOOK_S = 1.0
"""Between two looks at whether the broker is on its way out."""
ALIVE_S = 15.0
"""An empty line after so long without another."""


def routes(broker: Broker) -> APIRouter:
    """The endpoint."""
    router = APIRouter(prefix="/api/v1", tags=["control"])

    @router.get("/trace", response_class=StreamingResponse)
    async def trace(
        names: Annotated[bool, Query(description="Keep the names of clients and sessions.")] = False,
    ) -> StreamingResponse:
        """Every request from now on, when its end is known: JSON lines, the devices and models first."""
        pool = broker.pool
        rooms = _rooms(await pool.devices())
        listener = pool.recorder.listen(time.monotonic(), names=names)  # here: it may be refused, which has a status
        return _Recording(listener, _told(broker, pool, rooms, listener))

    return router


class _Recording(StreamingResponse):
    """Gives up the listener's place however it ends, also for one who leaves before the first line is made."""

    def __init__(self, listener: Listener, lines: AsyncIterator[bytes]) -> None:
        super().__init__(lines, media_type="application/x-ndjson")
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._listener.close()


async def _told(broker: Broker, pool: Pool, rooms: tuple[DeviceRoom, ...], listener: Listener) -> AsyncIterator[bytes]:
    known = _models(pool)
    yield header_line(Trace(devices=rooms, models=tuple(known.values()), limits=pool.recorder.limits))
    silent_s = 0.0
    while not broker.stopping:
        lines = await listener.lines(LOOK_S)
        silent_s = 0.0 if lines else silent_s + LOOK_S
        if lines:
            yield _learned(known, _models(pool)) + lines
        elif silent_s >= ALIVE_S:
            silent_s = 0.0
            yield b"\n"


def _rooms(snapshot: Snapshot) -> tuple[DeviceRoom, ...]:
    """What each device leaves to this broker."""
    now_s = time.monotonic()
    owner = ProcessIdentity.current()
    return readings.read(snapshot, owner=owner, queued={}, asked_at_s=now_s, at_s=now_s).devices


def _models(pool: Pool) -> dict[str, TraceModel]:
    """Every model that can be asked for, with the time its last load took."""
    load_s = {slot.model.id: slot.last_load_s for slot in pool.slots().values() if slot.last_load_s is not None}
    return {
        model.id: TraceModel.of(model, load_s.get(model.id))
        for model in pool.registry.models.values()
        if model.problem is None
    }


def _learned(known: dict[str, TraceModel], now: dict[str, TraceModel]) -> bytes:
    """The lines of models that are new, or of which more is known; what was learned of a load is kept."""
    lines = []
    for model_id, model in now.items():
        before = known.get(model_id)
        kept = before.load_s if before is not None and model.load_s is None else model.load_s
        latest = replace(model, load_s=kept)
        if latest != before:
            known[model_id] = latest
            lines.append(learned_line(latest))
    return b"".join(lines)
