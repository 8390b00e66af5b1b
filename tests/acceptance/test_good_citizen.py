"""The broker beside training jobs: real broker, real engines on the demo models, a job that leases with the library."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.broker import Broker, broker
from tests.acceptance.job import Job
from tests.integration.inference.neighbour import a_neighbour
from tests.support import wait_until

ROOM_MIB = 100
GRACE_S = 2.0
Start = Callable[..., Job]


@pytest.fixture
def subject(request: pytest.FixtureRequest, tmp_dir: Path, llama_server: Path, demo_models: Path) -> Iterator[Broker]:
    """Room for two models of 40 MiB, and 20 MiB besides; with so much context that an answer takes a minute.

    The grace can be given as a parameter.
    """
    settings = {"preempt_grace_s": getattr(request, "param", GRACE_S), "log_level": "debug"}
    with broker(tmp_dir, llama_server, demo=demo_models, context=100_000, room_mib=ROOM_MIB, settings=settings) as made:
        yield made


@pytest.fixture
def job(subject: Broker) -> Iterator[Start]:
    """Starts jobs; those that are left are killed before the broker ends."""
    started: list[Job] = []

    def start(vram: str, priority: str = "normal", *more: str) -> Job:
        started.append(Job(subject.state_dir, f"sim0={ROOM_MIB}MiB", vram, priority, *more))
        return started[-1]

    yield start
    for one in started:
        one.kill()


class Stream(AbstractContextManager["Stream"]):
    """An answer without end, read in a thread."""

    def __init__(self, subject: Broker, model: str, priority: str) -> None:
        self.tokens = 0
        self.last_s = 0.0
        self.error: dict[str, object] | None = None
        self.whole = False
        self.ended_s: float | None = None
        self._connection = http.client.HTTPConnection("127.0.0.1", subject.port, timeout=60)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Who are you?"}],
            "stream": True,
            "ignore_eos": True,
            "max_tokens": 1_000_000,
            "x_priority": priority,
        }
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        wait_until(lambda: self.tokens > 5, "the stream to flow")

    @property
    def flows(self) -> bool:
        """Text came in the last second, and it has not ended."""
        return self.ended_s is None and time.monotonic() - self.last_s < 1.0

    def hang_up(self) -> None:
        if self._connection.sock is not None:
            self._connection.sock.shutdown(2)
        self._thread.join(20)
        self._connection.close()

    def __exit__(self, *_: object) -> None:
        self.hang_up()

    def _read(self) -> None:
        try:
            for raw in self._connection.getresponse():
                line = raw.strip()
                if line == b"data: [DONE]":
                    self.whole = True
                elif line.startswith(b"data: "):
                    chunk = json.loads(line[6:])
                    self.error = chunk.get("error")
                    self.tokens, self.last_s = self.tokens + 1, time.monotonic()
        except (OSError, http.client.HTTPException, ValueError):
            pass
        self.ended_s = time.monotonic()


def holders(subject: Broker) -> dict[str, str]:
    """Every lease's state by its holder."""
    return {lease["holder"]: lease["state"] for lease in subject.get("/api/v1/leases")[1]["leases"]}


def ps(subject: Broker) -> list[list[str]]:
    """The cells of what `model-boss ps` prints."""
    command = [str(Path(sys.executable).parent / "model-boss"), "ps", "--url", subject.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [line.split("\t") for line in done.stdout.splitlines()]


def notice_of(subject: Broker, holder: str) -> object:
    """What the ledger told the holder, as the broker shows it."""
    leases = subject.get("/api/v1/leases")[1]["leases"]
    return next((lease["notice"] for lease in leases if lease["holder"] == holder), None)


def state_of(subject: Broker, model: str) -> str:
    return str(subject.slots().get(model, {}).get("state", "idle"))


def test_an_idle_model_yields_to_a_job_and_comes_back_when_it_ends(subject: Broker, job: Start) -> None:
    subject.ask("robin")
    engine = subject.slots()["robin"]["pid"]
    training = job("80MiB")
    training.heard("held")
    slot = subject.slots()["robin"]
    assert (slot["state"], slot["pid"]) == ("idle", None)
    assert "yields to job:sft (class normal)" in str(subject.get("/api/v1/slots/robin")[1]["story"])
    ended_s = training.end()
    wait_until(lambda: state_of(subject, "robin") in ("loading", "ready"), "the model to come back")
    assert time.monotonic() - ended_s <= 5.0
    wait_until(lambda: state_of(subject, "robin") == "ready", "the model to be loaded")
    assert subject.slots()["robin"]["pid"] != engine


def test_a_stream_of_the_same_class_is_not_cut_and_the_job_has_the_memory_after_it(subject: Broker, job: Start) -> None:
    with Stream(subject, "robin", "normal") as stream:
        training = job("80MiB", "normal")
        wait_until(lambda: notice_of(subject, "slot:robin"), "the model's notice")
        enough_s = time.monotonic() + 2 * GRACE_S
        wait_until(lambda: time.monotonic() > enough_s or not stream.flows, "twice the grace to pass")
        assert stream.flows
        assert stream.error is None
        assert training.waits
    hung_up_s = time.monotonic()
    assert training.heard("held") - hung_up_s < 5.0
    training.end()


def test_a_pinned_model_yields_to_no_class_but_to_a_run_over_pinned_models(
    subject: Broker, job: Start, demo_models: Path
) -> None:
    path = str(demo_models / "robin.gguf")
    subject.write_manifest("robin", id="robin", path=path, vram="40MiB", context=100_000, pin=True)
    wait_until(lambda: state_of(subject, "robin") == "ready", "the pinned model to be loaded")
    with Stream(subject, "robin", "urgent") as stream:
        waiting = job("80MiB", "0")
        enough_s = time.monotonic() + 2 * GRACE_S
        wait_until(lambda: time.monotonic() > enough_s or not stream.flows, "twice the grace to pass")
        assert stream.flows
        assert waiting.waits
        waiting.kill()
        environment = os.environ | {
            "GPUBOSS_STATE_DIR": str(subject.state_dir),
            "GPUBOSS_DEVICES": f"sim0={ROOM_MIB}MiB",
        }
        command = [str(Path(sys.executable).parent / "gpuboss"), "run", "--vram", "80MiB", "--over-pinned", "--", "cat"]
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
            wait_until(lambda: stream.ended_s is not None, "the stream to end")
            assert stream.error is not None
            assert stream.error["code"] == "preempted"
            assert run.stdin is not None
            assert run.stdout is not None
            run.stdin.write(b"has it\n")
            run.stdin.flush()
            assert run.stdout.readline() == b"has it\n"
            assert state_of(subject, "robin") == "idle"
            assert "(class over pinned)" in str(subject.get("/api/v1/slots/robin")[1]["story"])
    wait_until(lambda: state_of(subject, "robin") == "ready", "the model to come back")


def test_a_less_important_stream_ends_with_preempted_when_its_grace_is_over(subject: Broker, job: Start) -> None:
    with Stream(subject, "robin", "batch") as stream:
        training = job("80MiB", "normal")
        wait_until(lambda: state_of(subject, "robin") == "draining", "the model to drain")
        noticed_s = time.monotonic()
        assert stream.flows
        wait_until(lambda: stream.ended_s is not None, "the stream to end")
        assert stream.ended_s is not None
        assert stream.error is not None
        assert (stream.error["code"], stream.whole) == ("preempted", False)
        assert "job:sft (class normal)" in str(stream.error["message"])
        assert GRACE_S - 0.5 < stream.ended_s - noticed_s < GRACE_S + 1.5
    training.heard("held")
    training.end()
    wait_until(lambda: state_of(subject, "robin") == "ready", "the model to come back")


def test_a_request_that_is_cut_off_and_no_stream_is_answered_with_preempted(subject: Broker, job: Start) -> None:
    body = {"model": "robin", "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 1_000_000}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(subject.post, "/v1/chat/completions", body | {"ignore_eos": True, "x_priority": "batch"})
        wait_until(lambda: subject.slots().get("robin", {}).get("in_flight"), "the request to be worked on")
        training = job("80MiB", "normal")
        status, told = answer.result(30)
    assert (status, told["error"]["code"]) == (503, "preempted")
    assert "`preempt_grace_s` in model-boss.yaml" in told["error"]["message"]
    training.heard("held")


@pytest.mark.parametrize("subject", [60.0], indirect=True)
def test_no_model_is_loaded_into_the_memory_that_a_job_waits_for(subject: Broker, job: Start) -> None:
    with Stream(subject, "robin", "batch") as stream, ThreadPoolExecutor(1) as pool:
        training = job("80MiB", "normal")
        wait_until(lambda: state_of(subject, "robin") == "draining", "the model to drain")
        # 60 MiB are free, and the model needs 40: only the job, which came first, keeps it out.
        answer = pool.submit(subject.ask, "wren")
        wait_until(lambda: subject.get("/api/v1/queue")[1]["queue"], "the request to wait")
        looked_s = time.monotonic() + 1.5  # more than a look at the devices
        wait_until(lambda: time.monotonic() > looked_s or state_of(subject, "wren") == "ready", "a look to pass")
        assert training.waits
        stream.hang_up()
        training.heard("held")
        wait_until(lambda: state_of(subject, "wren") == "queued", "the model to wait in the ledger's queue")
        assert "ready" not in [move["state"] for move in subject.get("/api/v1/slots/wren")[1]["story"]]
        training.end()
        assert "Wren" in answer.result(30)


def test_warm_and_preloaded_models_come_back_by_themselves_when_a_job_is_killed(
    subject: Broker, job: Start, demo_models: Path
) -> None:
    path = str(demo_models / "wren.gguf")
    subject.write_manifest("wren", id="wren", path=path, vram="40MiB", context=512, preload=True, stay_warm_s=0)
    wait_until(lambda: state_of(subject, "wren") == "ready", "the model to be preloaded")
    subject.ask("robin")
    training = job("80MiB")
    training.heard("held")
    assert {state_of(subject, model) for model in ("robin", "wren")} == {"idle"}
    [row] = [row for row in ps(subject) if row[0] == "job:sft"]
    assert row[2:] == ["normal", "sim0", "80MiB", ""], "who has the memory is shown"
    training.kill()
    wait_until(lambda: "job:sft" not in holders(subject), "the job's lease to be freed")
    freed_s = time.monotonic()
    for model in ("robin", "wren"):
        wait_until(lambda model=model: state_of(subject, model) in ("loading", "ready"), f"{model} to come back")
    assert time.monotonic() - freed_s <= 5.0
    assert subject.get("/api/v1/queue")[1]["queue"] == []


def test_a_request_meanwhile_waits_in_the_ledgers_queue_and_is_served_when_the_job_ends(
    subject: Broker, job: Start
) -> None:
    subject.ask("robin")
    training = job("80MiB")
    training.heard("held")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(subject.ask, "robin")
        wait_until(lambda: state_of(subject, "robin") == "queued", "the model to queue in the ledger")
        leases = subject.get("/api/v1/leases")[1]["leases"]
        [waiter] = [lease for lease in leases if lease["state"] == "queued"]
        assert (waiter["holder"], waiter["priority"]) == ("slot:robin", "normal")
        training.end()
        assert "Robin" in answer.result(30)


def test_a_preemptible_job_yields_to_a_request_that_is_more_important(subject: Broker, job: Start) -> None:
    training = job("80MiB", "batch", "preemptible")
    training.heard("held")
    assert "Robin" in subject.ask("robin")
    training.heard("notice")
    training.heard("done")


def test_a_model_that_fits_does_not_wait_behind_one_that_a_job_keeps_out(
    subject: Broker, job: Start, demo_models: Path
) -> None:
    subject.write_manifest("big", id="big", path=str(demo_models / "robin.gguf"), vram="90MiB", context=512)
    wait_until(lambda: "big" in str(subject.get("/v1/models")[1]), "the new manifest to be read")
    training = job("50MiB")
    training.heard("held")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(subject.ask, "big")
        wait_until(lambda: state_of(subject, "big") == "queued", "the big model to queue")
        assert "Wren" in subject.ask("wren")
        assert not answer.done()
        training.end()
        assert "Robin" in answer.result(30)


def test_a_lease_over_http_makes_a_model_give_way_too(subject: Broker) -> None:
    subject.ask("robin")
    status, lease = subject.post("/api/v1/leases", {"vram": "80MiB", "name": "sft", "wait_s": 20})
    assert (status, lease["state"]) == (200, "active")
    assert state_of(subject, "robin") == "idle"
    assert subject.delete(f"/api/v1/leases/{lease['id']}")[1]["state"] == "freed"
    wait_until(lambda: state_of(subject, "robin") == "ready", "the model to come back")


def test_a_person_can_have_a_pinned_model_yield_and_it_stays_out_until_it_is_asked_for(
    subject: Broker, demo_models: Path
) -> None:
    path = str(demo_models / "robin.gguf")
    subject.write_manifest("robin", id="robin", path=path, vram="40MiB", context=512, pin=True)
    wait_until(lambda: state_of(subject, "robin") == "ready", "the pinned model to be loaded")
    leases = subject.get("/api/v1/leases")[1]["leases"]
    [lease_id] = [lease["id"] for lease in leases if lease["holder"] == "slot:robin"]
    command = [str(Path(sys.executable).parent / "gpuboss"), "release", lease_id]
    released = subprocess.run(
        command, env={**os.environ, "GPUBOSS_STATE_DIR": str(subject.state_dir)}, capture_output=True, text=True
    )
    assert released.returncode == 0, released.stdout + released.stderr
    wait_until(lambda: state_of(subject, "robin") == "idle", "the model to go")
    assert "yields to a person" in str(subject.get("/api/v1/slots/robin")[1]["story"])
    looked_s = time.monotonic() + 2.5  # more than two looks at the devices
    wait_until(lambda: time.monotonic() > looked_s or state_of(subject, "robin") != "idle", "two looks to pass")
    assert state_of(subject, "robin") == "idle"
    subject.ask("robin")
    assert state_of(subject, "robin") == "ready"


def test_a_program_beside_the_broker_is_shown_and_frees_its_memory_for_a_model(
    tmp_dir: Path, llama_server: Path, demo_models: Path
) -> None:
    with a_neighbour(tmp_dir, f"neighbour-{uuid.uuid4().hex}") as neighbour:
        comfyui = {"name": "comfyui", "match": neighbour.name, "vram": "200MiB", "priority": "low"}
        comfyui |= {"busy_url": f"{neighbour.url}/queue"}
        comfyui |= {"free": f'POST {neighbour.url}/free {{"unload_models": true}}'}
        # Host memory, for that is measured by process anywhere.
        device = {"id": "cpu", "kind": "cpu", "vram": "600MiB"}
        settings = {"devices": [device], "external": [comfyui], "preempt_grace_s": 30}
        neighbour.post("/work", mb=120)
        with (
            broker(tmp_dir, llama_server, demo=demo_models, settings=settings) as subject,
            contextlib.closing(neighbour),  # while it runs, its lease keeps the ledger's processes
        ):
            subject.write_manifest("big", id="big", path=str(demo_models / "robin.gguf"), vram="450MiB", context=512)
            wait_until(lambda: "big" in str(subject.get("/v1/models")[1]), "the new manifest to be read")

            def program() -> dict[str, Any]:
                [shown] = subject.get("/api/v1/devices")[1]["external"]
                return dict(shown)

            wait_until(lambda: (program()["used_bytes"] or 0) > 120 << 20, "the program to be leased and measured")
            assert (program()["state"], program()["busy"]) == ("held", True)
            assert (program()["pid"], program()["devices"]) == (neighbour.process.pid, {"cpu": 200 << 20})
            [row] = [row for row in ps(subject) if row[0] == "comfyui"]
            assert row[1:4] == ["held, busy", "cpu", "200MiB"]
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(subject.ask, "big")
                wait_until(lambda: program()["notice"] == "slot:big", "the program to be asked to yield")
                assert neighbour.asked_to_free == 0, "it works, and has its grace"
                neighbour.post("/done")
                assert "Robin" in answer.result(30)
            assert neighbour.asked_to_free == 1
            assert program()["devices"]["cpu"] < 120 << 20
