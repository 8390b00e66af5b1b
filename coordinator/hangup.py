"""Notices that the caller of a running request hung up, and ends the work done for them.

Used by `api/infer.py`, `api/passthrough.py` and `api/control.py` around everything that may take time. Most requests
are over before it costs anything: the task that watches the connection is made only for those that last.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

WATCH_AFTER_S = 0.05
"""A hang-up within this time of the start is noticed at its end. Well below the second that is promised."""


class CallerGone(Exception):
    """The caller hung up; there is nobody left to answer."""


class HangUp:
    """`with HangUp(receive):` raises CallerGone inside the block when the caller hangs up.

    The way of `asyncio.timeout`: the block's task is cancelled, and the cancellation is turned into CallerGone at the
    block's end, unless somebody else cancelled the task too. The request's body must have been read before.
    """

    __slots__ = ("_cancelling", "_gone", "_receive", "_task", "_timer", "_watcher")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "HangUp outside of a task"
        self._task = task
        self._cancelling = task.cancelling()
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._gone and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise CallerGone from error

    def _begin(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="hang-up")

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()
