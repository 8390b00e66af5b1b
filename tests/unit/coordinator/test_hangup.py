"""Hang-ups: noticed, told apart from other cancellations, and free where a request is short."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator import hangup
from coordinator.hangup import CallerGone, HangUp


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangup, "WATCH_AFTER_S", 0.0)


class Caller:
    """A connection that hangs up when told to."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.watched = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        self.watched.set()
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_a_hang_up_ends_the_block() -> None:
    caller = Caller()
    asyncio.get_running_loop().call_later(0.01, caller.gone.set)
    with pytest.raises(CallerGone), HangUp(caller.receive):
        await asyncio.sleep(60)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "the task goes on as if nothing had happened"
    await asyncio.sleep(0)


async def test_a_block_that_ends_first_is_not_disturbed() -> None:
    caller = Caller()
    with HangUp(caller.receive):
        await caller.watched.wait()
    caller.gone.set()
    await asyncio.sleep(0.01)


async def test_a_short_block_is_never_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangup, "WATCH_AFTER_S", 30.0)
    caller = Caller()
    with HangUp(caller.receive):
        await asyncio.sleep(0)
    assert not caller.watched.is_set()


async def test_somebody_elses_cancellation_stays_one() -> None:
    caller = Caller()

    async def work() -> None:
        with HangUp(caller.receive):
            await asyncio.sleep(60)

    task = asyncio.ensure_future(work())
    await caller.watched.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_block_is_not_swallowed() -> None:
    caller = Caller()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ValueError("its own") from None

    caller.gone.set()
    with pytest.raises(ValueError, match="own"), HangUp(caller.receive):
        await work()


async def test_a_timeout_inside_goes_on_working() -> None:
    caller = Caller()
    with HangUp(caller.receive):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        caller.gone.set()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(30):
                await asyncio.sleep(60)
