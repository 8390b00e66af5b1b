"""Engines that live and do not get on, and those that only seem so: real llama-servers, stopped, slow, or busy."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Hashable
from pathlib import Path

import orjson
import psutil
import pytest

from inference import engine_log, load_progress
from inference.backends import REGISTRY
from inference.engine_log import log_path
from inference.errors import EngineStalled, LoadTimeout
from inference.fault import Fault
from inference.progress_watch import LOOKS
from inference.proxy import EngineClient, EngineResponse
from inference.slot_state import SlotState
from tests.integration.inference.slot_kit import JSON, OPTIONS, Rig, post, stream, wrapper
from tests.support import until

STALL_S = 1.5
CHAT = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8, "temperature": 0}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Hashable]:
    """What engines answered when they were asked how far they are."""
    seen: list[Hashable] = []
    ask = REGISTRY["llama-server"].progress

    async def noted(engine: EngineClient) -> Hashable | None:
        seen.append(answer := await ask(engine))
        return answer

    monkeypatch.setattr(type(REGISTRY["llama-server"]), "progress", lambda _, engine: noted(engine))
    return seen


async def until_error(answer: EngineResponse) -> float:
    """Read to the error that ends the answer; the moment of its last piece."""
    last_s = time.monotonic()
    try:
        async for _ in answer:
            last_s = time.monotonic()
    except EngineStalled:
        return last_s
    raise AssertionError("the answer ended as if nothing had happened")


async def test_an_engine_that_is_stopped_in_the_middle_of_a_stream_is_killed(rig: Rig) -> None:
    slot = await rig.ready("robin", stall_s=STALL_S, context=16_384)
    answer = await stream(slot.engine)
    await anext(answer)
    waiting = asyncio.create_task(post(slot.engine, "/v1/chat/completions", CHAT))
    ending = asyncio.create_task(until_error(answer))
    engine = slot.pid
    assert engine is not None
    os.kill(engine, signal.SIGSTOP)
    last_s = await ending
    assert time.monotonic() - last_s < STALL_S + 1
    with pytest.raises(EngineStalled):  # one that waits in the engine's own queue is work under way, too
        await waiting
    failure = await rig.failed(slot)
    assert isinstance(failure.error, EngineStalled)
    assert failure.fault is Fault.STALL
    assert failure.was_ready
    assert not psutil.pid_exists(engine)
    rig.events.clear()
    await rig.start(slot)
    assert (await post(slot.engine, "/v1/chat/completions", CHAT))[0] == 200


async def test_an_engine_that_is_stopped_before_its_first_word_is_killed(rig: Rig) -> None:
    slot = await rig.ready("robin", stall_s=STALL_S)
    assert slot.pid is not None
    os.kill(slot.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    with pytest.raises(EngineStalled):
        await post(slot.engine, "/v1/chat/completions", CHAT)
    assert time.monotonic() - began_s < STALL_S + 1
    assert (await rig.failed(slot)).fault is Fault.STALL


async def test_a_stopped_engine_that_has_nothing_to_do_is_left_alone(rig: Rig, answers: list[Hashable]) -> None:
    slot = await rig.ready("robin", stall_s=0.2)
    assert slot.pid is not None
    os.kill(slot.pid, signal.SIGSTOP)
    await asyncio.sleep(1.0)  # five times its patience: nothing is to happen
    assert slot.state is SlotState.READY
    assert answers == []
    os.kill(slot.pid, signal.SIGCONT)
    assert (await post(slot.engine, "/v1/chat/completions", CHAT))[0] == 200


LONG_PROMPT = {"prompt": "Who are you? " * 1_200, "n_predict": 1, "cache_prompt": False}
"""6,000 tokens."""


async def read_with_little_patience(rig: Rig, batch_size: int) -> None:
    """Have one thread read a long prompt, with a quarter of the time it takes as patience."""
    options = {"threads": 1, "batch_size": batch_size, "ubatch_size": 64}
    slot = await rig.ready("robin", context=16_384, options=options)
    began_s = time.monotonic()
    await post(slot.engine, "/completion", LONG_PROMPT)
    taken_s = time.monotonic() - began_s
    slot.stop("its time is known")
    await rig.gone(slot)
    slot = await rig.ready("robin", context=16_384, options=options, stall_s=taken_s / 4)
    status, answer = await post(slot.engine, "/completion", LONG_PROMPT)
    assert status == 200, answer
    assert slot.state is SlotState.READY


async def test_a_long_prompt_is_no_stall(rig: Rig, answers: list[Hashable]) -> None:
    """Nothing is said while it is read: the engine is asked."""
    await read_with_little_patience(rig, batch_size=64)
    assert len(set(answers)) > LOOKS, "its progress was not seen"


async def test_one_long_step_in_which_nothing_is_to_be_seen_is_no_stall(rig: Rig, answers: list[Hashable]) -> None:
    """The same in two steps, each of them longer than the patience: but the engine computes."""
    await read_with_little_patience(rig, batch_size=3072)
    longest = max(len(list(same)) for _, same in itertools.groupby(answers))
    assert longest > LOOKS, "no step took longer than the patience"


async def test_a_reader_that_takes_its_time_is_no_stall_of_the_engine(rig: Rig, answers: list[Hashable]) -> None:
    slot = await rig.ready("robin", stall_s=0.3, context=16_384)
    answer = await stream(slot.engine, max_tokens=3_000)
    await anext(answer)
    assert slot.engine is not None
    engine = slot.engine
    await until(lambda: not engine.working, "the engine to wait for the reader", timeout_s=60)
    await asyncio.sleep(1.5)  # five times its patience: nothing is to happen
    assert slot.state is SlotState.READY
    assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    assert slot.state is SlotState.READY


async def test_the_engine_tells_what_it_has_read_and_made(rig: Rig) -> None:
    """What `Backend.progress` promises: it differs while there is progress, and only then."""
    slot = await rig.ready("robin", context=16_384)
    assert slot.engine is not None
    progress: Callable[[EngineClient], Awaitable[Hashable | None]] = REGISTRY["llama-server"].progress
    idle = await progress(slot.engine)
    assert idle == await progress(slot.engine)
    answer = await stream(slot.engine)
    await anext(answer)
    seen = set()
    while len(seen) < 4:
        seen.add(await progress(slot.engine))
        await anext(answer)
    answer.close()
    assert idle not in seen

    async def still() -> bool:
        return await progress(slot.engine) == await progress(slot.engine)  # type: ignore[arg-type]

    await until(still, "the engine to stop")


# -- loads ---------------------------------------------------------------------------------------------------------

SLOWLY = """
import os, sys, time
with open(sys.argv[sys.argv.index("--model") + 1], "rb", buffering=0) as file:
    while file.read(200_000):
        time.sleep({pause_s})
os.execv("{binary}", ["{binary}", *sys.argv[1:]])
"""


async def test_a_load_that_is_slow_but_moves_is_not_cut(
    rig: Rig, tmp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading takes about three times as long as a load may stand still."""
    monkeypatch.setattr(load_progress, "STALL_S", 1.0)
    script = SLOWLY.format(pause_s=0.3, binary=rig.binary)
    slot = rig.slot("robin", program=wrapper(tmp_dir / "slow", script, interpreter=sys.executable))
    slot.start(OPTIONS, 10)
    await until(lambda: slot.state is not SlotState.LOADING, "the load to be over")
    assert slot.state is SlotState.READY, slot.story[-1]
    assert slot.last_load_s is not None
    assert slot.last_load_s > 2.0


async def test_a_load_that_stands_still_is_cut(rig: Rig, tmp_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_progress, "STALL_S", 0.7)
    slot = rig.slot("robin", program=wrapper(tmp_dir / "stuck", "echo reading from a drive that is away; sleep 60"))
    slot.start(OPTIONS, 10)
    failure = await rig.failed(slot)
    assert isinstance(failure.error, LoadTimeout)
    assert failure.fault is Fault.STALL
    assert "did not become ready: no progress for 1 s" in failure.error.message
    assert failure.error.message.endswith("its log ends with:\nreading from a drive that is away")


async def test_an_engine_that_is_stopped_while_it_loads_is_cut(
    rig: Rig, tmp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_progress, "STALL_S", 0.7)
    slot = rig.slot("robin", program=wrapper(tmp_dir / "stopped", f'kill -STOP $$; exec {rig.binary} "$@"'))
    slot.start(OPTIONS, 10)
    assert (await rig.failed(slot)).fault is Fault.STALL


# -- logs ----------------------------------------------------------------------------------------------------------

NOISE = "x" * 99


async def test_a_log_that_grows_fast_is_kept_short_while_the_engine_serves(
    rig: Rig, tmp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About 1 MB/s, from a child of the engine's."""
    monkeypatch.setattr(engine_log, "ROTATE_BYTES", 64 << 10)
    noisy = f'(while sleep 0.1; do yes {NOISE} | head -n 1000; done) & exec {rig.binary} "$@"'
    slot = rig.slot("robin", program=wrapper(tmp_dir / "noisy", noisy), stall_s=0.4)
    await rig.start(slot)
    log = log_path(rig.ledger.state.log_dir, "robin")
    older = log.with_name(log.name + ".1")
    rotations = set()

    async def rotated() -> bool:
        with contextlib.suppress(FileNotFoundError):
            rotations.add(older.stat().st_mtime_ns)
        assert older.stat().st_size <= 64 << 10
        return len(rotations) > 4

    await until(older.exists, "the first rotation")
    await until(rotated, "the log to be rotated several times")
    assert log.stat().st_size < 8 << 20
    assert (await post(slot.engine, "/v1/chat/completions", CHAT))[0] == 200
    assert slot.pid is not None
    os.kill(slot.pid, signal.SIGSEGV)
    assert NOISE in (await rig.failed(slot)).error.message


async def test_every_slot_of_a_model_has_a_log_and_a_lease_of_its_own(rig: Rig) -> None:
    share = ({"sim0": 20 << 20},)
    first, second = rig.slot("robin"), rig.slot("robin", slot_id="robin#2")
    for slot in (first, second):
        slot.start(share, 10)
    await until(lambda: first.state is second.state is SlotState.READY, "both to be loaded")
    assert {row.holder for row in rig.rows()} == {"slot:robin", "slot:robin#2"}
    logs = {path.name for path in rig.ledger.state.log_dir.glob("engine-*.log")}
    assert logs == {"engine-robin.log", "engine-robin=2.log"}
    assert second.engine is not None
    response = await second.engine.open("POST", "/v1/chat/completions", orjson.dumps(CHAT), JSON)
    assert orjson.loads(await response.read())["model"] == "robin"
