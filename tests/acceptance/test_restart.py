"""kill -9 of the broker and the next one on the same port: warm models stay warm, and nobody loses what they hold.

`-s` shows how long things took.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from gpuboss.state_dir import StateDir
from tests.acceptance.broker import CLAIM_MIB, MODELS, Broker
from tests.acceptance.job import Job
from tests.acceptance.outside import Watch, alive
from tests.acceptance.streams import Outcome, Streamers
from tests.acceptance.test_good_citizen import Stream
from tests.support import wait_until

RESTARTS = 5
CLIENTS = 6
ANSWER_S = 1.0
"""From the opened port to the first answer of a model that was warm: most of the time."""
LATEST_ANSWER_S = 10.0
"""Always, also on a machine that has other things to do."""


@pytest.fixture
def subject(request: pytest.FixtureRequest, tmp_dir: Path, llama_server: Path, demo_models: Path) -> Iterator[Broker]:
    """Two models with room for both and half a model more; settings can be given as a parameter."""
    settings = {"log_level": "debug"} | getattr(request, "param", {})
    made = Broker(tmp_dir, llama_server, room_mib=2 * CLAIM_MIB + CLAIM_MIB // 2, settings=settings)
    for model in MODELS:
        path = shutil.copy(demo_models / f"{model}.gguf", tmp_dir)  # a file that changes is another test's
        made.write_manifest(model, id=model, path=str(path), vram=f"{CLAIM_MIB}MiB", context=100_000)
    try:
        yield made.start()
    finally:
        made.stop()


def pids(subject: Broker) -> dict[str, tuple[int, int]]:
    """By model, engine and shim."""
    return {name: (slot["pid"], slot["shim_pid"]) for name, slot in subject.slots().items() if slot["pid"]}


def leases(subject: Broker) -> dict[str, tuple[str, bool]]:
    """By id: who it is, and whether it waits."""
    found = subject.get("/api/v1/leases")[1]["leases"]
    return {lease["id"]: (lease["holder"], lease["state"] == "queued") for lease in found}


def somebody_waits(subject: Broker) -> bool:
    return any(waits for _, waits in leases(subject).values())


def whole(streams: Streamers) -> int:
    """How many answers came whole so far."""
    return sum(outcome.trouble is None for outcome in streams.outcomes())


def left_on_disk(subject: Broker) -> list[str]:
    """Files and sockets of engines and their shims."""
    root = StateDir.resolve(subject.state_dir).root
    return [path.name for path in (*root.glob("orphans/*"), *root.glob("engine-*.sock"), *root.glob("shim-*.sock"))]


def restart(subject: Broker) -> float:
    """kill -9, and the next broker: the last moment, monotonic, at which its port was not open yet."""
    subject.kill()
    subject.launch()
    closed_s = time.monotonic()

    def is_open() -> bool:
        nonlocal closed_s
        tried_s = time.monotonic()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", subject.port), timeout=5):
            return True
        closed_s = tried_s
        return False

    wait_until(is_open, "the port to be open")
    return closed_s


def first_answers(outcomes: Sequence[Outcome], opened_s: Sequence[float]) -> list[float]:
    """For every moment, how long after it text came first to somebody who had none before."""
    firsts = [outcome.first_s for outcome in outcomes if outcome.first_s is not None]
    return [min(first_s - moment_s for first_s in firsts if first_s > moment_s) for moment_s in opened_s]


@pytest.mark.slow
def test_under_load_no_engine_is_loaded_again_and_the_first_answer_comes_at_once(subject: Broker) -> None:
    for model in MODELS:
        subject.ask(model, max_tokens=4)
    before, held = pids(subject), leases(subject)
    assert before.keys() == set(MODELS)
    opened_s = []
    with Watch(subject, most_engines=2) as watch, Streamers(subject, MODELS, count=CLIENTS, seed=5) as streams:
        for _ in range(RESTARTS):
            served = whole(streams)
            wait_until(lambda served=served: whole(streams) > served + CLIENTS, "clients to be served")
            opened_s.append(restart(subject))
            assert pids(subject) == before, "the very engines"
        served = whole(streams)
        wait_until(lambda: whole(streams) > served, "clients to be served")
    took_s = first_answers(streams.outcomes(), opened_s)
    print(f"first answers after the port opened: {', '.join(f'{s:.2f}' for s in took_s)} s")
    assert leases(subject) == held, "the very leases"
    log = subject.log()
    assert log.count('"engine_adopted"') == RESTARTS * len(MODELS)
    assert log.count("LOADING") + log.count('"loading"') == len(MODELS), "nothing was loaded again"
    assert statistics.median(took_s) < ANSWER_S
    assert max(took_s) < LATEST_ANSWER_S
    assert not watch.over_budget
    assert not watch.worst_s("engine without a row")
    assert any(outcome.trouble == "cut" for outcome in streams.outcomes()), "streams were under way"


def test_two_kills_in_a_row_and_a_third_broker_that_ends_in_good_order(subject: Broker) -> None:
    subject.ask("robin", max_tokens=4)
    before = pids(subject)
    for _ in range(2):
        restart(subject)
        subject.ask("robin", max_tokens=4)
    assert pids(subject) == before
    engine = psutil.Process(before["robin"][0])
    assert subject.process is not None
    subject.process.terminate()
    assert subject.process.wait(30) == 0
    assert not alive(engine), "in good order it takes its engines along"
    wait_until(lambda: not left_on_disk(subject), "nothing to be left")


@pytest.mark.parametrize("subject", [{"orphan_grace_s": 1}], indirect=True)
def test_without_a_next_broker_everything_is_gone_after_the_grace(subject: Broker) -> None:
    subject.ask("robin", max_tokens=4)
    engine = psutil.Process(pids(subject)["robin"][0])
    with Watch(subject, most_engines=1) as watch:
        subject.kill()
        assert alive(engine)
        wait_until(lambda: not subject.processes(), "shim, engine, keeper and store to leave by themselves")
        assert not left_on_disk(subject)
        assert not watch.standing()
    subject.start()
    assert subject.get("/api/v1/leases")[1]["leases"] == []


@pytest.mark.parametrize("subject", [{"on_restart": "reap"}], indirect=True)
def test_with_reap_nothing_outlives_the_broker(subject: Broker) -> None:
    subject.ask("robin", max_tokens=4)
    before = pids(subject)
    engine = psutil.Process(before["robin"][0])
    subject.kill()
    wait_until(lambda: not alive(engine), "the engine to be dead")
    wait_until(lambda: not left_on_disk(subject), "nothing to be left")
    subject.start()
    assert not pids(subject)


def test_a_broker_that_reaps_now_ends_what_was_left_to_it(subject: Broker) -> None:
    subject.ask("robin", max_tokens=4)
    engine = psutil.Process(pids(subject)["robin"][0])
    subject.kill()
    subject.settings["on_restart"] = "reap"
    subject.start()
    assert not alive(engine)
    assert subject.get("/api/v1/leases")[1]["leases"] == []
    assert "there is no slot for it" in subject.log()


def test_a_model_whose_definition_has_changed_is_loaded_anew(subject: Broker) -> None:
    for model in MODELS:
        subject.ask(model, max_tokens=4)
    before = pids(subject)
    subject.kill()
    path = str(subject.directory / "robin.gguf")
    subject.write_manifest("robin", id="robin", path=path, vram=f"{CLAIM_MIB}MiB", context=50_000)
    subject.start()
    assert pids(subject) == {"wren": before["wren"]}
    assert "its model's definition is another now" in subject.log()
    subject.ask("robin", max_tokens=4)


@pytest.fixture
def job(subject: Broker) -> Iterator[Callable[[], Job]]:
    """Starts jobs that want as much as a model."""
    started: list[Job] = []

    def start() -> Job:
        started.append(Job(subject.state_dir, f"sim0={subject.room_mib}MiB", f"{CLAIM_MIB}MiB"))
        return started[-1]

    yield start
    for one in started:
        one.kill()


class CommandLineJob:
    """`gpuboss run`, with a program that writes down that it runs."""

    def __init__(self, subject: Broker) -> None:
        self._subject = subject
        self._ran = subject.directory / "ran"
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        subject = self._subject
        command = [str(Path(sys.executable).parent / "gpuboss"), "run", "--vram", f"{CLAIM_MIB}MiB", "--name", "sft"]
        told = {"GPUBOSS_STATE_DIR": str(subject.state_dir), "GPUBOSS_DEVICES": f"sim0={subject.room_mib}MiB"}
        self._process = subprocess.Popen(
            [*command, "--quiet", "--", "sh", "-c", f"touch {self._ran}; exec sleep 600"], env=os.environ | told
        )

    @property
    def runs(self) -> bool:
        return self._ran.exists()

    @property
    def waits(self) -> bool:
        return not self.runs and self._process is not None and self._process.poll() is None

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def test_a_job_that_waits_for_a_models_memory_keeps_its_place_while_the_broker_is_killed(
    subject: Broker, job: Callable[[], Job]
) -> None:
    """The model is busy, so it need not yield to its equal; afterwards it is idle, and must."""
    running = job()
    running.heard("held")
    with contextlib.closing(CommandLineJob(subject)) as waiting:
        with Stream(subject, "robin", "normal") as caller:
            engine = psutil.Process(pids(subject)["robin"][0])
            waiting.begin()
            wait_until(lambda: somebody_waits(subject), "the job to wait")
            held = leases(subject)
            assert caller.flows, "and the model to serve on"
            subject.kill()
            wait_until(lambda: caller.ended_s is not None, "the caller to see its connection end")
        assert alive(engine), "the model keeps its memory"
        assert waiting.waits, "and nobody gives it away while nobody can be asked"
        subject.start()
        wait_until(lambda: waiting.runs, "the job to run")
        assert "adopted from broker" in subject.log()
        wait_until(lambda: pids(subject) == {}, "the model to be gone")
        assert "yields to job:sft" in str(subject.get("/api/v1/slots/robin")[1]["story"])
        assert running.waits, "who holds its memory was not disturbed"
        jobs = {lease_id for lease_id, (holder, _) in held.items() if holder == "job:sft"}
        assert leases(subject).keys() == jobs, "by the very leases"


def test_a_model_that_a_job_must_not_have_is_kept_through_a_restart(subject: Broker, job: Callable[[], Job]) -> None:
    """It serves a more important class, before and after."""
    running = job()
    running.heard("held")
    with Stream(subject, "robin", "high"):
        before = pids(subject)
        waiting = job()
        wait_until(lambda: somebody_waits(subject), "the job to wait")
        held = leases(subject)
        restart(subject)
    with Stream(subject, "robin", "high") as caller:
        assert pids(subject) == before
        assert leases(subject) == held
        assert waiting.waits
        assert caller.flows
