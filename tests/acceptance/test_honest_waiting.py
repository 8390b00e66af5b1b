"""What callers are told while they wait, when their time is over, and when the broker ends; with the real engine."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.broker import CLAIM_MIB, Broker, broker
from tests.support import wait_until

CONTEXT = 16_000
"""So many tokens take the engine half a minute."""
MAX_WAIT_S = 3.0
SHUTDOWN_S = 1.0
SETTINGS = {"queue": {"max_wait_s": MAX_WAIT_S}, "min_residency_s": 0, "shutdown_s": SHUTDOWN_S}
ENDLESS = {
    "model": "robin",
    "messages": [{"role": "user", "content": "Who are you?"}],
    "max_tokens": CONTEXT,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory, llama_server: Path, demo_models: Path) -> Iterator[Broker]:
    """Room for one of two models."""
    directory = tmp_path_factory.mktemp("b")
    with broker(directory, llama_server, demo=demo_models, context=CONTEXT, settings=SETTINGS) as running:
        yield running


class Stream(AbstractContextManager["Stream"]):
    """A streamed answer, read as it comes."""

    def __init__(self, subject: Broker, **keys: Any) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", subject.port, timeout=30)
        body = json.dumps(ENDLESS | {"stream": True} | keys)
        self._connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        self._answer: http.client.HTTPResponse | None = None

    def lines(self) -> Iterator[str]:
        """Those that are not empty, to the end."""
        self._answer = self._answer or self._connection.getresponse()
        assert self._answer.status == 200
        for line in self._answer:
            if line.strip():
                yield line.decode().strip()

    def until(self, start: str) -> str:
        """The first line that begins so."""
        return next(line for line in self.lines() if line.startswith(start))

    def error(self) -> Any:
        """What the last event says is wrong."""
        *_, last = self.lines()
        return json.loads(last.removeprefix("data: "))["error"]

    def close(self) -> None:
        """Hang up."""
        if self._connection.sock is not None:
            self._connection.sock.shutdown(2)
        self._connection.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _in_flight(subject: Broker) -> int:
    return sum(slot["in_flight"] for slot in subject.slots().values())


def _queue(subject: Broker) -> list[dict[str, Any]]:
    return list(subject.get("/api/v1/queue")[1]["queue"])


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "subject" in request.fixturenames:
        subject = request.getfixturevalue("subject")
        wait_until(lambda: not _in_flight(subject), "every request to be over")


# -- the budget of an engine's time ---------------------------------------------------------------------------------


def test_an_answer_over_its_budget_is_a_504_and_the_place_is_free_again(subject: Broker) -> None:
    status, told = subject.post("/v1/chat/completions", ENDLESS | {"x_budget_s": 0.5})
    assert (status, told["error"]["code"], told["error"]["param"]) == (504, "budget_exceeded", "x_budget_s")
    assert _in_flight(subject) == 0
    assert "Robin" in subject.ask("robin"), "the engine stopped, and serves the next one"


def test_a_stream_over_its_budget_ends_with_an_error_event(subject: Broker) -> None:
    with Stream(subject, x_budget_s=0.5) as stream:
        assert stream.error()["code"] == "budget_exceeded"
    assert _in_flight(subject) == 0


def test_waiting_and_loading_cost_nothing_of_the_budget(subject: Broker) -> None:
    subject.ask("robin")
    with Stream(subject) as other, ThreadPoolExecutor(1) as pool:
        other.until("data: ")
        asked_s = time.monotonic()
        answer = pool.submit(subject.ask, "wren", x_budget_s=1.0)
        wait_until(lambda: time.monotonic() - asked_s > 1.5 or answer.done(), "more than the budget to pass")
        assert not answer.done(), "the other model is busy, and in its place"
        other.close()
        assert "Wren" in answer.result(30)


# -- who waits ------------------------------------------------------------------------------------------------------


def test_a_stream_that_waits_is_told_its_place_and_at_last_that_it_was_too_long(subject: Broker) -> None:
    with Stream(subject) as busy:
        busy.until("data: ")
        with Stream(subject, model="wren") as waits:
            assert waits.until(": queued").startswith(": queued 1 of 1")
            error = waits.error()
    assert (error["code"], error["position"], error["waiting"]) == ("queue_timeout", 1, 1)
    assert "eta_s" in error


def test_who_is_held_is_told_in_numbers_when_to_come_back(subject: Broker) -> None:
    with Stream(subject) as busy:
        busy.until("data: ")
        began_s = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", subject.port, timeout=30)
        body = json.dumps(ENDLESS | {"model": "wren", "x_client_id": "kitchen"})
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        error = json.loads(answer.read())["error"]
        connection.close()
        with Stream(subject, model="wren", x_client_id="kitchen"):
            wait_until(lambda: _queue(subject), "the same client to wait again")
            assert _queue(subject)[0]["kept_place"], "it stands where it stood"
    assert (answer.status, error["code"]) == (503, "queue_timeout")
    assert time.monotonic() - began_s >= MAX_WAIT_S
    assert 1 <= int(answer.headers["Retry-After"]) <= 60
    assert (error["position"], error["waiting"]) == (1, 1)
    assert error["eta_s"] is None or error["eta_s"] > 0
    assert "queue.max_wait_s" in error["message"]


# -- explain --------------------------------------------------------------------------------------------------------


def _explain(subject: Broker, *arguments: str, code: int = 0) -> Any:
    script = Path(sys.executable).parent / "model-boss"
    command = [script, "explain", *arguments, "--json", "--url", subject.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_explain_says_who_would_go_and_nobody_goes(subject: Broker) -> None:
    subject.ask("robin")
    told = _explain(subject, "robin")
    assert (told["verdict"], told["victims"]) == ("ready", [])
    told = _explain(subject, "wren")
    assert (told["verdict"], told["need_bytes"]) == ("evicts", CLAIM_MIB << 20)
    assert [victim["slot"] for victim in told["victims"]] == ["robin"]
    assert told["options"] == [{"sim0": CLAIM_MIB << 20}]
    assert subject.slots()["robin"]["state"] == "ready"
    assert "wren" not in subject.slots() or subject.slots()["wren"]["state"] == "idle"
    assert _queue(subject) == []


def test_explain_says_what_a_request_would_wait_for(subject: Broker) -> None:
    with Stream(subject) as busy:
        busy.until("data: ")
        told = _explain(subject, "wren")
        assert (told["verdict"], told["position"]) == ("waits", 1)
        [blocker] = told["blocked_by"]
        assert (blocker["name"], blocker["held_bytes"]) == ("robin", CLAIM_MIB << 20)
        assert "1 in flight" in blocker["why"]


def test_explain_names_the_job_that_a_request_would_wait_for(subject: Broker) -> None:
    for model in ("robin", "wren"):
        subject.post(f"/api/v1/models/{model}/unload", {})
    job = {"vram_mb": CLAIM_MIB, "name": "sft", "request_id": "sft", "priority": "low", "preemptible": True}
    status, lease = subject.post("/api/v1/leases", job | {"grace_s": 9})
    assert (status, lease["state"]) == (200, "active")

    def why(*arguments: str) -> str | None:
        told = {blocker["name"]: blocker for blocker in _explain(subject, "wren", *arguments)["blocked_by"]}
        if "job:sft" not in told:
            return None
        assert told["job:sft"]["held_bytes"] == CLAIM_MIB << 20
        return str(told["job:sft"]["why"])

    try:
        wait_until(why, "the broker to hear of the job")
        assert "yields to more important requests alone" in str(why("--priority", "batch"))
        assert "would be told to yield within 9 s" in str(why())
    finally:
        subject.delete(f"/api/v1/leases/{lease['id']}")
        subject.ask("robin")  # as the other tests expect it


def test_explain_says_why_a_request_would_be_refused(subject: Broker, demo_models: Path) -> None:
    subject.write_manifest("huge", id="huge", path=str(demo_models / "robin.gguf"), vram="40GiB", context=512)
    wait_until(lambda: "huge" in str(subject.get("/v1/models")[1]), "the new manifest to be read")
    told = _explain(subject, "huge", code=1)
    assert told["verdict"] == "refused"
    assert "40GiB" in told["refusal"]


# -- the end of the broker ------------------------------------------------------------------------------------------


def test_streams_and_answers_that_outlive_the_shutdown_are_told_so(
    tmp_dir: Path, llama_server: Path, demo_models: Path
) -> None:
    with broker(tmp_dir, llama_server, demo=demo_models, context=CONTEXT, settings=SETTINGS) as subject:
        subject.write_manifest(
            "robin", id="robin", path=str(demo_models / "robin.gguf"), vram="40MiB", context=CONTEXT, parallel=2
        )
        wait_until(lambda: _parallel(subject, "robin") == 2, "the manifest to be read anew")
        with Stream(subject) as stream, ThreadPoolExecutor(2) as pool:
            stream.until("data: ")
            whole = pool.submit(subject.post, "/v1/chat/completions", ENDLESS)
            wait_until(lambda: _in_flight(subject) == 2, "both to be worked on")
            waits = pool.submit(subject.post, "/v1/chat/completions", ENDLESS | {"model": "wren"})
            wait_until(lambda: _queue(subject), "a third one to wait")
            assert subject.process is not None
            subject.process.send_signal(signal.SIGTERM)
            told_s = time.monotonic()
            status, refused = waits.result(30)
            assert (status, refused["error"]["code"]) == (503, "shutting_down")
            assert time.monotonic() - told_s < SHUTDOWN_S, "who waits is told at once"
            error = stream.error()
            assert error["code"] == "shutting_down"
            assert "shutdown_s" in error["message"]
            status, cut = whole.result(30)
            assert (status, cut["error"]["code"]) == (503, "shutting_down")
        assert subject.process.wait(30) == 0


def _parallel(subject: Broker, model: str) -> int:
    models = subject.get("/api/v1/models")[1]["models"]
    return next(int(one["parallel"]) for one in models if one["id"] == model)
