"""kill -9 of every kind of process under eight streaming clients: nothing is left over, nothing is lost for good.

Ten kills of each kind by default; `MODEL_BOSS_KILLS=50` for the whole matrix, about half an hour; `-s` shows what was
hit and how long things took. Three models, room for two: there is always one to load and one to evict. Everything is
played with both settings of `on_restart`: what a broker leaves to the next one must be as tidy as what it takes along.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import psutil
import pytest

from gpuboss.host_lock import read_owner
from gpuboss.state_dir import StateDir
from tests.acceptance.broker import CLAIM_MIB, Broker
from tests.acceptance.kill_matrix import KILLS, Matrix, Slots, Tally
from tests.acceptance.outside import Watch, alive
from tests.acceptance.streams import Outcome, Streamers
from tests.support import wait_until

CLIENTS = 8
MODELS = ("red", "green", "blue")
ROOM = 2
"""Models that fit at once."""
AGING_S = 3
"""A model that is idle keeps its room so long from requests less important than its last: a minute by default, in which
all eight clients may come to wait, and the answer after a kill with them."""
KEEPER = "gpuboss.keeper"
STORE = "valkey-server"
ENGINES_GONE_S = 2.0
LEASES_GONE_S = 10.0
ANSWER_S = 5.0
"""For the next request after a kill, which stands in line with the others; most of the time."""
LONG_S = 8.0
"""A wait for an answer of which a picture is taken."""
LATEST_ANSWER_S = 45.0
"""Always, also on a machine that has other things to do: it may be passed for 20 s (`max_overtaken_s`), by streams that
are slow there, and then come the last of them and the load."""
ENGINE_GONE = {"engine_died", "load_failed"}
"""What callers are told whose engine was killed while it served, or while it was loaded for them."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + KILLS * 30)]


@pytest.fixture(autouse=True)
def nimble() -> Iterator[None]:
    """Threads take turns quickly: a state that lasts some milliseconds has to be seen while streams are read."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    yield
    sys.setswitchinterval(before_s)


@pytest.fixture(params=["reap", "adopt"])
def on_restart(request: pytest.FixtureRequest) -> str:
    """What becomes of ready engines whose broker dies."""
    return str(request.param)


@pytest.fixture
def subject(tmp_dir: Path, llama_server: Path, demo_models: Path, on_restart: str) -> Iterator[Broker]:
    room = ROOM * CLAIM_MIB + CLAIM_MIB // 2
    settings = {"log_level": "debug", "on_restart": on_restart, "orphan_grace_s": 10, "queue": {"aging_s": AGING_S}}
    subject = Broker(tmp_dir, llama_server, room_mib=room, settings=settings)
    path = shutil.copy(demo_models / "robin.gguf", tmp_dir)  # a file that changes under an engine is another test's
    for model in MODELS:
        subject.write_manifest(model, id=model, path=str(path), vram=f"{CLAIM_MIB}MiB", context=512)
    try:
        yield subject.start()
    finally:
        subject.stop()


def test_kill_the_broker(subject: Broker, on_restart: str) -> None:
    matrix = Matrix(subject, "broker", seed=1)
    with Watch(subject, most_engines=ROOM) as watch, Streamers(subject, MODELS, count=CLIENTS, seed=1) as streams:
        for _ in matrix.rounds():
            _, slots = matrix.aim()
            assert subject.process is not None
            killed_s = matrix.strike(subject.process.pid, slots)
            below = [process for process in subject.processes() if not is_beside(process)]
            subject.process.wait()
            stayed = subject.states_at(time.time())
            subject.launch()
            if on_restart == "adopt":
                ready = {model for model in slots if slots[model]["state"] == stayed.get(model) == "ready"}
                below = without_adopted(matrix.tally, subject, below, slots, ready)
            engines_gone(matrix.tally, watch, below, killed_s)
            answered(matrix.tally, subject, MODELS[matrix.tally.kills % len(MODELS)], killed_s)
            no_lease_without_process(watch)
        whole = [outcome for outcome in streams.outcomes() if outcome.trouble is None]
    settled(watch, matrix.tally)
    matrix.check()
    assert len(whole) > matrix.tally.kills, "the broker served between its deaths"
    assert matrix.tally.adopted >= (matrix.tally.kills / 2 if on_restart == "adopt" else 0)


def without_adopted(
    tally: Tally, subject: Broker, below: Sequence[psutil.Process], before: Slots, ready: set[str]
) -> list[psutil.Process]:
    """What has to end: everything but the engines that the next broker has, and their shims.

    It must have those that were `ready` to the last. Others may have become so just now, or not have been on their way
    out yet.
    """
    log: list[str] = []

    def answers() -> bool:
        with contextlib.suppress(OSError):
            subject.get("/health")
            log[:] = [subject.log_of_this_life()]
        return bool(log)

    wait_until(answers, "the next broker to answer")
    told = [json.loads(line) for line in log[0].splitlines() if '"engine_adopted"' in line]
    adopted = {adoption["slot"]: adoption["pid"] for adoption in told}
    for model in ready:
        assert adopted.get(model) == before[model]["pid"], f"{model} was ready, and is not adopted: {adopted}"
    tally.adopted += len(adopted)
    shims = {parent for process in below if process.pid in adopted.values() and (parent := parent_of(process))}
    return [process for process in below if process.pid not in shims | set(adopted.values())]


def parent_of(process: psutil.Process) -> int | None:
    """None for one that has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.ppid()
    return None


@pytest.mark.parametrize("target", ["engine", "shim"])
def test_kill_below_the_broker(subject: Broker, target: str) -> None:
    key = "pid" if target == "engine" else "shim_pid"
    matrix = Matrix(subject, target, seed=2)
    kills: list[tuple[float, str]] = []
    with Watch(subject, most_engines=ROOM) as watch, Streamers(subject, MODELS, count=CLIENTS, seed=2) as streams:
        for _ in matrix.rounds():
            victim, slots = matrix.aim(running=key)
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):  # it ended just now, by itself: no kill
                below = [psutil.Process(slots[victim][name]) for name in {key, "pid"} if slots[victim][name]]
                killed_s = matrix.strike(slots[victim][key], slots, victim)
                kills.append((killed_s, victim))
                engines_gone(matrix.tally, watch, below, killed_s)
                loaded_by_hand(subject, victim)
                answered(matrix.tally, subject, victim, killed_s)
                no_lease_without_process(watch)
    settled(watch, matrix.tally)
    matrix.check()
    only_victims_were_hurt(kills, streams.outcomes())


@pytest.mark.parametrize("target", ["keeper", "store"])
def test_kill_beside_the_broker(subject: Broker, target: str) -> None:
    matrix = Matrix(subject, target, seed=3)
    with Watch(subject, most_engines=ROOM) as watch, Streamers(subject, MODELS, count=CLIENTS, seed=3) as streams:
        for _ in matrix.rounds():
            former = pid_of(subject, target)
            _, slots = matrix.aim()
            killed_s = matrix.strike(former, slots)
            unloaded = [model for model in MODELS if model not in slots or slots[model]["state"] in ("idle", "failed")]
            if matrix.tally.kills % 2:  # else the load is asked for while there is none
                wait_until(lambda former=former: pid_of(subject, target) != former, f"a new {target}")
                matrix.tally.took(f"new {target}", time.monotonic() - killed_s)
            answered(matrix.tally, subject, (unloaded or MODELS)[0], killed_s)
            wait_until(lambda former=former: pid_of(subject, target) != former, f"a new {target}")
            no_lease_without_process(watch)
    settled(watch, matrix.tally)
    matrix.check()
    hurt = [outcome for outcome in streams.outcomes() if outcome.trouble is not None]
    assert not hurt, f"the {target}'s death is nobody else's business: {hurt}"
    flowing = [outcome for outcome in streams.outcomes() if any(map(outcome.flowed_at, matrix.tally.moments_s))]
    assert flowing, "streams flowed across the kills"


def engines_gone(tally: Tally, watch: Watch, below: Sequence[psutil.Process], killed_s: float) -> None:
    """No engine below the killed process lived 2 s after the kill, not even one that a shim was just about to start."""
    with contextlib.suppress(AssertionError):  # said below, by name
        wait_until(lambda: not any(map(alive, below)), "what was below to end")
    assert not list(filter(alive, below))
    last_s = watch.last_alive_s([process.pid for process in below])
    if last_s is not None:
        assert tally.took("engines gone", max(0.0, last_s - killed_s)) < ENGINES_GONE_S


def answered(tally: Tally, subject: Broker, model: str, killed_s: float) -> None:
    """The model answers again, soon. A request that met the death itself is told so, and asks once more."""
    body = {"model": model, "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8}
    told: list[object] = []

    def answers() -> bool:
        try:
            status, answer = subject.post("/v1/chat/completions", body)
        except OSError as error:
            told.append(error)
            return False
        told.append(answer)
        assert status == 200 or answer["error"]["code"] in ENGINE_GONE, answer
        return status == 200

    picture = ""
    with ThreadPoolExecutor(1) as asker:
        asked = asker.submit(wait_until, answers, f"{model} to answer after the kill", timeout_s=LATEST_ANSWER_S)
        if not wait({asked}, timeout=LONG_S).done:
            picture = picture_of(subject, model)
        try:
            asked.result()
        except AssertionError as error:
            raise AssertionError(f"{error}; told {len(told)} times, at last {told[-3:]}; {picture}") from None
    took_s = tally.took("next answer", time.monotonic() - killed_s)
    assert took_s < LATEST_ANSWER_S, f"{model} answered {took_s:.1f} s after the kill; {picture}"


def picture_of(subject: Broker, model: str) -> str:
    """What may tell why it takes so long: the broker's own words, and what its slots did lately."""
    paths = ["/api/v1/queue", "/api/v1/devices", f"/api/v1/explain?model={model}"]
    paths += [f"/api/v1/slots/{name}" for name in MODELS]
    told = [f"while {model} was waited for:"]
    with contextlib.suppress(OSError):
        told += [f"{path}: {json.dumps(subject.get(path)[1])}" for path in paths]
    return "\n".join([*told, subject.log()[-20_000:]])


def loaded_by_hand(subject: Broker, model: str) -> None:
    """As its operator does, who knows why it died: three deaths in a minute would be too many otherwise."""

    def loads() -> bool:
        return subject.post(f"/api/v1/models/{model}/load", {})[0] in (200, 202)

    wait_until(loads, f"{model} to be loaded by hand")


def no_lease_without_process(watch: Watch) -> None:
    """Nothing in the node's books or the store outlives its process by more than 10 s, and no engine lacks its row."""
    assert not watch.longer_than(LEASES_GONE_S)
    assert not watch.worst_s("engine without a row")


def settled(watch: Watch, tally: Tally) -> None:
    """The same at the end; never was more in memory than fits; and life went on at once, as a rule."""
    with contextlib.suppress(AssertionError):  # said below, with what it is
        wait_until(lambda: not watch.standing(), "rows and leases without a process to go", timeout_s=LEASES_GONE_S)
    assert not watch.standing()
    no_lease_without_process(watch)
    for what in ("row without a process", "lease without a process"):
        tally.took(what, watch.worst_s(what))
    assert not watch.over_budget
    assert watch.most_at_once == ROOM, "the room was used"
    assert watch.looks > 100, "somebody looked"
    assert statistics.median(tally.times_s["next answer"]) < ANSWER_S, tally


def only_victims_were_hurt(kills: Sequence[tuple[float, str]], outcomes: Sequence[Outcome]) -> None:
    """Streams of other models flow on; the victims' end with a word."""
    hurt = [outcome for outcome in outcomes if outcome.trouble is not None]
    for outcome in hurt:
        lately = {model for killed_s, model in kills if outcome.ended_s - ENGINES_GONE_S < killed_s < outcome.ended_s}
        assert outcome.model in lately, f"a stream broke although its engine was left alone: {outcome}"
    assert {outcome.trouble for outcome in hurt} <= ENGINE_GONE, "no stream ends silently"
    assert any(outcome.tokens and outcome.trouble == "engine_died" for outcome in hurt), "streams broke half-way"
    untouched = [
        outcome
        for outcome in outcomes
        for killed_s, model in kills
        if outcome.model != model and outcome.flowed_at(killed_s)
    ]
    assert untouched, "streams of other models flowed across the kills"


def is_beside(process: psutil.Process) -> bool:
    """A keeper or a store: they outlive the broker for a while."""
    with contextlib.suppress(psutil.NoSuchProcess):
        command = " ".join(process.cmdline())
        return KEEPER in command or STORE in command
    return False


def pid_of(subject: Broker, target: str) -> int:
    """The keeper's by its lock file, for one that is only being started is none yet; or the store's."""
    found: list[int] = []

    def look() -> bool:
        if target == "keeper":
            owner = read_owner(StateDir.resolve(subject.state_dir).lock_path("keeper"))
            found[:] = [owner.pid] if owner.pid and owner.alive else []
            return bool(found)
        found[:] = [process.pid for process in subject.processes() if STORE in _program(process)]
        return bool(found)

    wait_until(look, f"a living {target}")
    return found[0]


def _program(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return (process.cmdline() or [""])[0]
    return ""
