"""When a serving engine is looked at, and what is made of its answers, its silence, and backends that cannot tell."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Hashable
from types import SimpleNamespace

import psutil
import pytest

from gpuboss.devices import Device, DeviceKind
from inference import progress_watch
from inference.errors import EngineDied
from inference.progress_watch import LAST_PATIENCE_S, LOOK_EVERY_S, ProgressWatch, computing_process

STALL_S = 60.0


class Scene:
    """A watch on an engine that answers as it is told."""

    def __init__(self, *, process: psutil.Process | None = None, stall_s: float = STALL_S) -> None:
        self.now_s = 0.0
        self.asked = 0
        self.answer: Callable[[], Awaitable[Hashable | None]] = self.still
        self.client = SimpleNamespace(working=True)
        self.watch = ProgressWatch(
            self.client,  # type: ignore[arg-type] # all that is looked at
            SimpleNamespace(progress=self.progress),  # type: ignore[arg-type] # all that is asked
            process,
            stall_s=stall_s,
            clock=lambda: self.now_s,
        )

    async def progress(self, _: object) -> Hashable | None:
        self.asked += 1
        return await self.answer()

    async def still(self) -> Hashable | None:
        return "still here"

    async def goes_on(self) -> Hashable | None:
        return self.asked

    async def cannot_tell(self) -> Hashable | None:
        return None

    async def dies(self) -> Hashable | None:
        raise EngineDied("it does not listen")

    async def hangs(self) -> Hashable | None:
        await asyncio.Event().wait()
        return None

    async def watched(self, seconds: float) -> None:
        """Look as `engine_run` does for so long, or until it is stalled."""
        until_s = self.now_s + seconds
        while self.now_s < until_s and self.watch.stalled_s is None:
            self.now_s += self.watch.pause_s
            await self.watch.look()


async def test_an_engine_that_shows_the_same_for_too_long_is_stalled() -> None:
    scene = Scene()
    await scene.watched(STALL_S - 1)
    assert scene.watch.stalled_s is None
    await scene.watched(3)
    assert scene.watch.stalled_s == pytest.approx(STALL_S, abs=0.1)


async def test_one_that_gets_on_is_not() -> None:
    scene = Scene()
    scene.answer = scene.goes_on
    await scene.watched(10 * STALL_S)
    assert scene.watch.stalled_s is None


async def test_nobody_asks_an_engine_that_nobody_asked_anything() -> None:
    scene = Scene()
    scene.client.working = False
    await scene.watched(10 * STALL_S)
    assert (scene.asked, scene.watch.stalled_s) == (0, None)


async def test_the_time_without_work_does_not_count() -> None:
    scene = Scene()
    await scene.watched(STALL_S - 5)
    scene.client.working = False
    await scene.watched(5)
    scene.client.working = True
    await scene.watched(STALL_S - 5)
    assert scene.watch.stalled_s is None
    await scene.watched(7)
    assert scene.watch.stalled_s is not None


async def test_an_engine_that_cannot_tell_is_never_stalled() -> None:
    scene = Scene()
    scene.answer = scene.cannot_tell
    await scene.watched(10 * STALL_S)
    assert scene.asked > 100
    assert scene.watch.stalled_s is None


async def test_one_that_does_not_answer_is_stalled() -> None:
    scene = Scene()
    scene.answer = scene.dies
    await scene.watched(2 * STALL_S)
    assert scene.watch.stalled_s == pytest.approx(STALL_S, abs=0.1)


async def test_waiting_for_an_answer_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_watch, "ASK_PATIENCE_S", 0.01)
    scene = Scene()
    scene.answer = scene.hangs
    await scene.watched(2 * STALL_S)
    assert scene.watch.stalled_s == pytest.approx(STALL_S, abs=0.1)


async def test_an_answer_in_the_last_moment_counts() -> None:
    scene = Scene()
    scene.now_s = STALL_S
    scene.answer = scene.goes_on

    async def late() -> Hashable | None:
        scene.now_s += LAST_PATIENCE_S / 2
        return "one more token"

    scene.answer = late
    await scene.watch.look()
    assert scene.watch.stalled_s is None


async def test_work_that_ends_while_the_engine_is_asked_is_no_stall() -> None:
    scene = Scene()

    async def answered_meanwhile() -> Hashable | None:
        scene.client.working = False
        return "still here"

    await scene.watched(STALL_S)
    assert scene.watch.pause_s < 1.0
    scene.now_s += 1.0
    scene.answer = answered_meanwhile
    await scene.watch.look()
    assert scene.watch.stalled_s is None


async def test_looks_leave_the_engine_a_second_without_events_and_meet_the_deadline() -> None:
    scene = Scene()
    assert scene.watch.pause_s == LOOK_EVERY_S > 1.0
    scene.now_s = STALL_S - 0.2
    assert scene.watch.pause_s == pytest.approx(0.2)
    assert Scene(stall_s=2.0).watch.pause_s == 0.5


async def test_an_engine_that_computes_on_the_processor_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    process = psutil.Process(os.getpid())
    scene = Scene(process=process)
    monkeypatch.setattr(process, "cpu_times", lambda: SimpleNamespace(user=scene.now_s / 2, system=scene.now_s / 2))
    await scene.watched(5 * STALL_S)
    assert scene.watch.stalled_s is None


@pytest.mark.parametrize(
    ("leased", "counts"),
    [({"cpu"}, True), ({"sim0"}, True), ({"gpu0"}, False), ({"gpu0", "cpu"}, True), (set(), False)],
)
def test_processor_seconds_count_where_the_lease_has_host_memory(leased: set[str], counts: bool) -> None:
    kinds = {"cpu": DeviceKind.CPU, "sim0": DeviceKind.SIM, "gpu0": DeviceKind.CUDA}
    devices = [Device(name, kind, name, 0, 1 << 30, 0, measured=False) for name, kind in kinds.items()]
    assert (computing_process(os.getpid(), devices, leased) is not None) == counts
    assert computing_process(4_000_000, devices, leased) is None
    assert computing_process(None, devices, leased) is None


async def test_one_whose_process_is_gone_computes_nothing() -> None:
    process = psutil.Process(os.getpid())
    process._pid = 4_000_000  # larger than any pid there is
    scene = Scene(process=process)
    await scene.watched(2 * STALL_S)
    assert scene.watch.stalled_s is not None
