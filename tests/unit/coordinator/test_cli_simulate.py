"""`simulate` on made-up and recorded traces; `trace` against the real endpoint around a pretended pool."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect
from typer.testing import CliRunner

from coordinator.api import trace as trace_api
from coordinator.cli import app
from coordinator.errors import TABLE, render
from gpuboss.devices import Device, DeviceKind
from gpuboss.leases import DeviceUse, Snapshot
from inference.errors import InferenceError
from inference.events import Ticket
from inference.queue import QueueLimits
from inference.simulation import plots
from inference.simulation.journal import code_of
from inference.simulation.recorder import MOST_LISTENERS, Recorder
from inference.simulation.trace_file import read, write
from inference.simulation.trace_lines import header_line
from tests.support import wait_until
from tests.unit.inference.simulation.scene import GIB, a_model, a_trace, ask

WORDS = "models=4 size=4GiB..12GiB load=2s..9s requests=120 rate=30/m service=1s..2s classes=normal:3,high:1 seed=2"


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result


# -- simulate ----------------------------------------------------------------------------------------------------------


def test_policies_stand_side_by_side() -> None:
    lines = run("simulate", "--synthetic", WORDS, "--policy", "all").stdout.splitlines()
    assert lines[0] == "synthetic, seed 2: 120 requests, 4 models"
    one = run("simulate", "--synthetic", WORDS.replace("models=4", "models=1").replace("requests=120", "requests=1"))
    assert one.stdout.startswith("synthetic, seed 2: 1 request, 1 model\n")
    table = [line.split("\t") for line in lines[1:]]
    assert table[0] == ["", "ours", "fifo", "lru-count", "shortest-keepalive"]
    assert all(len(row) == 5 for row in table)
    names = [row[0] for row in table]
    for name in (
        "served",
        "wait high: p50",
        "wait all: p99",
        "of them swaps",
        "makespan",
        "memory at work",
        "fairness (Jain)",
    ):
        assert name in names


def test_json_has_everything_by_policy() -> None:
    told = json.loads(run("simulate", "--synthetic", WORDS, "--policy", "ours", "--policy", "fifo", "--json").stdout)
    assert list(told["policies"]) == ["ours", "fifo"]
    assert told["policies"]["ours"]["waits"]["all"]["count"] == told["requests"] == 120
    assert told["devices"] == {"gpu0": 24 * GIB, "gpu1": 24 * GIB}
    assert {"jain", "most_overtaken", "beyond_bound_s"} <= told["policies"]["fifo"]["fairness"].keys()


def test_why_nothing_was_served_is_said() -> None:
    words = ("simulate", "--synthetic", "size=60GiB requests=50", "--policy", "ours", "--policy", "fifo")
    lines = run(*words).stdout.splitlines()
    assert lines[-2:] == [
        "ours refused 50 of 50: will_never_fit 50", "fifo refused 50 of 50: will_never_fit 50"
    ]  # fmt: skip
    table = {row[0]: row[1:] for row in (line.split("\t") for line in lines[1:-2])}
    assert table["wait all: p50"] == table["wait all: longest"] == table["fairness (Jain)"] == ["-", "-"]
    told = json.loads(run(*words, "--json").stdout)["policies"]
    assert told["ours"]["refused"] == {"will_never_fit": 50}


def test_only_who_refused_is_named_with_the_most_frequent_reason_first(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    requests = [ask(0.0, "huge"), *(ask(0.0, "a", 1.0) for _ in range(4))]
    write(a_trace(requests, [a_model("a"), a_model("huge", 11)], max_waiting=2), path)
    assert run("simulate", "--trace", str(path)).stdout.splitlines()[-1] == (
        "ours refused 3 of 5: queue_full 2, will_never_fit 1"
    )
    assert "refused 0" not in run("simulate", "--synthetic", WORDS).stdout


def test_refusals_have_the_codes_of_the_api() -> None:
    refusals = {cls: kind.code for cls, kind in TABLE.items() if cls.__module__ == "inference.errors" and kind.tell}
    assert {cls: code_of(cls("")) for cls in refusals} == refusals  # type: ignore[arg-type]  # all are InferenceErrors


def test_more_devices_and_other_limits_make_a_difference() -> None:
    def told(*more: str) -> Any:
        return json.loads(run("simulate", "--synthetic", WORDS, "--json", *more).stdout)["policies"]["ours"]

    small = told("--devices", "gpu0=12GiB")
    assert told("--devices", "1x4x12GiB")["swaps"] < small["swaps"]
    assert told("--devices", "gpu0=12GiB", "--limit", "max_waiting=2")["refused"]["queue_full"] > 0


def test_results_are_written_to_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    told = run("simulate", "--synthetic", WORDS, "--out", str(out)).stdout
    assert "written: " in told
    assert json.loads((out / "simulation.json").read_text())["policies"].keys() == {"ours"}
    assert (out / "simulation.png").read_bytes().startswith(b"\x89PNG")


def test_a_recorded_trace_is_simulated_with_its_own_devices_and_limits(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    write(a_trace([ask(0.0, "a"), ask(0.0, "a"), ask(0.0, "a")], max_waiting=2), path)
    told = json.loads(run("simulate", "--trace", str(path), "--json").stdout)
    assert told["devices"] == {"d0": 10 * GIB}
    assert told["policies"]["ours"]["refused"] == {"queue_full": 1}
    other = json.loads(run("simulate", "--trace", str(path), "--devices", "2x24GiB", "--json").stdout)
    assert list(other["devices"]) == ["gpu0", "gpu1"]


def test_words_may_stand_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("\n".join(word.replace("=", ": ") for word in WORDS.split()))
    of_file = run("simulate", "--synthetic", str(path), "--json").stdout
    assert of_file == run("simulate", "--synthetic", WORDS, "--json").stdout


def test_a_cut_trace_is_simulated_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write(a_trace([ask(0.0, "a"), ask(1.0, "a")]), path)
    path.write_bytes(path.read_bytes()[:-4])
    result = run("simulate", "--trace", str(path), "--json")
    assert "the last line is cut" in result.stderr
    assert json.loads(result.stdout)["requests"] == 1


@pytest.mark.parametrize("line", ["[" * 60_000, '{"a":' * 60_000, '{"trace":' + "[" * 900 + "]" * 900 + "}"])
@pytest.mark.parametrize("before", [b"", header_line(a_trace([]))])
def test_a_trace_of_brackets_is_wrong_input(tmp_path: Path, before: bytes, line: str) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_bytes(before + line.encode() + b"\n")
    assert f"deep.jsonl:{2 if before else 1}: " in run("simulate", "--trace", str(path), code=2).stderr


def test_control_characters_of_a_trace_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    asked = json.dumps({"at_s": 1, "model": "\x1b[2J", "priority": 1}).encode()
    path.write_bytes(header_line(a_trace([])) + asked + b"\n")
    told = run("simulate", "--trace", str(path), code=2).stderr
    assert "unknown model" in told
    assert "\x1b[2J" not in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "either --trace FILE or --synthetic SPEC"),
        (("--trace", "x", "--synthetic", "models=2"), "either --trace FILE or --synthetic SPEC"),
        (("--trace", "/nowhere/x.jsonl"), "x.jsonl: cannot be read: No such file"),
        (("--synthetic", "modles=2"), "unknown word 'modles'; nearest is 'models'"),
        (("--synthetic", "nowhere.yaml"), "nowhere.yaml"),
        (("--synthetic", "models=2", "--policy", "lru"), "unknown policy 'lru'"),
        (("--synthetic", "models=2", "--devices", "24GiB"), "--devices: '24GiB' names no devices"),
        (("--synthetic", "models=2", "--limit", "max_wait=1"), "nearest is 'max_wait_s'"),
        (("--synthetic", "models=2", "--limit", "max_wait_s=long"), "write KEY=NUMBER"),
        (("--synthetic", "models=2", "--limit", "max_wait_s=0"), "queue.max_wait_s is 0"),
        (("--synthetic", "models=2", "--limit", "max_wait_s=1e300"), "--limit max_wait_s=1e300: at most 1000000000"),
        (("--synthetic", "models=2", "--limit", "max_wait_s=inf"), "--limit max_wait_s=inf: at most 1000000000"),
        (
            ("--synthetic", "models=2", "--limit", "aging_s=1e-320"),
            "queue.aging_s is 1e-320; it must be at least 0.001",
        ),
        (("--synthetic", "zipf=400 requests=50"), "--synthetic: zipf=400: expected a number from 0 to 20"),
        (("--synthetic", "models=2", "--stop", "soon"), "--stop: duration 'soon'"),
    ],
)
def test_what_cannot_be_simulated_is_said(arguments: tuple[str, ...], said: str) -> None:
    assert said in " ".join(run("simulate", *arguments, code=2).stderr.split())


def test_pictures_without_matplotlib_are_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing() -> None:
        raise plots.PlotsMissing("pictures need matplotlib: pip install 'model-boss[plots]'")

    monkeypatch.setattr(plots, "require", missing)
    result = run("simulate", "--synthetic", "requests=10000000", "--out", str(tmp_path), code=1)
    assert "model-boss[plots]" in result.stderr


def test_nothing_that_draws_is_imported_before_it_is_wanted() -> None:
    code = "import sys, inference.simulation.plots, coordinator.cli.simulate; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -- trace -------------------------------------------------------------------------------------------------------------


class PretendedPool:
    """What the endpoint reads of a pool. Touch it with `call`: it belongs to its server's thread."""

    def __init__(self) -> None:
        self.recorder = Recorder(QueueLimits(max_waiting=9))
        models = {name: a_model(name, load_s=None).as_model() for name in "ab"}
        self.registry = SimpleNamespace(models=models)
        self.loaded: dict[str, Any] = {}

    async def devices(self) -> Snapshot:
        device = Device("g0", DeviceKind.CUDA, "H200", 0, 40 * GIB, GIB, measured=True)
        return Snapshot(1, (DeviceUse(device, 0, 0, 3 * GIB, 0, 36 * GIB),), ())

    def slots(self) -> dict[str, Any]:
        return self.loaded

    def load(self, name: str, load_s: float) -> None:
        self.loaded[name] = SimpleNamespace(model=self.registry.models[name], last_load_s=load_s)

    def serve(self, ticket_id: str, model: str, service_s: float, client: str) -> None:
        now_s = time.monotonic()
        self.recorder.arrived(Ticket(ticket_id, model, 10, now_s, client_id=client), now_s)
        self.recorder.served(ticket_id, service_s, now_s + service_s)


async def _rendered(_: Request, error: Exception) -> Response:
    """As the front does."""
    shown = render(error)
    return Response(shown.body, shown.status, {name.decode(): value.decode() for name, value in shown.headers})


class Server:
    """The endpoint on a free port, in a thread of its own."""

    def __init__(self) -> None:
        self.pool = PretendedPool()
        self.broker = SimpleNamespace(pool=self.pool, stopping=False)
        face = FastAPI()
        face.include_router(trace_api.routes(self.broker))  # type: ignore[arg-type]  # has what it reads
        face.add_exception_handler(InferenceError, _rendered)

        @face.get("/api/v1/queue")
        async def queue() -> dict[str, Any]:
            return {"queue": []}

        self.server = uvicorn.Server(uvicorn.Config(face, port=0, log_level="error", lifespan="off"))
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.server.serve()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def call(self, what: Any, *arguments: Any) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(what, *arguments)

    @property
    def listeners(self) -> int:
        return len(self.pool.recorder._listeners)


@pytest.fixture
def server() -> Iterator[Server]:
    subject = Server()
    subject.thread.start()
    wait_until(lambda: subject.server.started, "the server")
    yield subject
    subject.broker.stopping = True
    subject.server.should_exit = True
    subject.thread.join(30)
    assert not subject.thread.is_alive()


@contextlib.contextmanager
def recording(server: Server, out: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """`model-boss trace` as people run it, once it listens."""
    script = Path(sys.executable).parent / "model-boss"
    process = subprocess.Popen(
        [script, "trace", "--out", out, "--url", server.url, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: server.listeners or process.poll() is not None, "it to listen")
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def recorded(out: Path) -> int:
    """Requests in the file so far, which is made before its header is written."""
    return len(read(out).trace.requests) if out.exists() and out.stat().st_size else 0


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_recording_ends_with_ctrl_c_and_can_be_simulated(server: Server, tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    with recording(server, out) as process:
        server.call(server.pool.serve, "t1", "a", 0.5, "ann")
        server.call(server.pool.load, "b", 2.5)
        server.call(server.pool.serve, "t2", "b", 1.5, "bob")
        wait_until(lambda: recorded(out) == 2, "both requests in the file")
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert told == f"2 requests recorded: {out}\n"
    wait_until(lambda: not server.listeners, "the broker to notice that nobody listens")
    trace = read(out).trace
    assert [(request.model, request.client, request.service_s) for request in trace.requests] == [
        ("a", "1", 0.5), ("b", "2", 1.5)
    ]  # fmt: skip
    assert (trace.devices[0].total_bytes, trace.devices[0].others_bytes) == (40 * GIB, 3 * GIB)
    assert {model.id: model.load_s for model in trace.models} == {"a": None, "b": 2.5}
    assert trace.limits.max_waiting == 9
    assert json.loads(run("simulate", "--trace", str(out), "--json").stdout)["policies"]["ours"]["served"] == 2


def test_names_are_kept_where_they_are_wanted(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    with recording(server, out, "--names"):
        server.call(server.pool.serve, "t1", "a", 0.5, "ann")
        wait_until(lambda: recorded(out) == 1, "the request in the file")
    assert read(out).trace.requests[0].client == "ann"


def test_what_was_written_survives_a_kill(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl.gz"
    with recording(server, out) as process:
        for number in range(50):
            server.call(server.pool.serve, f"t{number}", "a", 0.5, "ann")
        wait_until(lambda: recorded(out) == 50, "the requests in the file")
        os.kill(process.pid, signal.SIGKILL)
        process.wait(20)
    assert len(read(out).trace.requests) == 50
    wait_until(lambda: not server.listeners, "the broker to notice that nobody listens")


def test_a_recording_may_have_an_end(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    told = json.loads(run("trace", "--out", str(out), "--for", "300ms", "--url", server.url, "--json").stdout)
    assert told == {"file": str(out), "requests": 0, "lost": 0}
    assert read(out).trace.requests == ()


def test_the_end_of_the_broker_is_told(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    with recording(server, out) as process:
        server.call(server.pool.serve, "t1", "a", 0.5, "ann")
        wait_until(lambda: recorded(out) == 1, "the request in the file")
        server.broker.stopping = True
        told, problem = process.communicate(timeout=20)
    assert process.returncode == 3
    assert told == f"1 request recorded: {out}\n"
    assert "on its way out" in problem


def test_so_many_may_listen_at_once_and_the_next_is_told(server: Server, tmp_path: Path) -> None:
    address = server.url.removeprefix("http://")
    with contextlib.ExitStack() as listening:
        for _ in range(MOST_LISTENERS):
            connection = listening.enter_context(contextlib.closing(http.client.HTTPConnection(address, timeout=10)))
            connection.request("GET", "/api/v1/trace")
            assert connection.getresponse().readline().startswith(b'{"trace":')
        with contextlib.closing(http.client.HTTPConnection(address, timeout=10)) as one_more:
            one_more.request("GET", "/api/v1/trace")
            refused = one_more.getresponse()
            error = json.loads(refused.read())["error"]
        assert (refused.status, error["code"]) == (429, "too_many_recordings")
        assert f"{MOST_LISTENERS} recordings" in error["message"]
        out = tmp_path / "t.jsonl"
        told = run("trace", "--out", str(out), "--for", "5s", "--url", server.url, code=1).stderr
        assert f"{MOST_LISTENERS} recordings" in told, "in the broker's words"
        assert not out.exists()
        assert server.listeners == MOST_LISTENERS
    wait_until(lambda: not server.listeners, "the broker to notice that nobody listens")
    run("trace", "--out", str(tmp_path / "t.jsonl"), "--for", "300ms", "--url", server.url)


async def test_one_who_left_before_the_first_line_takes_no_place() -> None:
    pool = PretendedPool()
    broker = SimpleNamespace(pool=pool, stopping=False)
    [route] = trace_api.routes(broker).routes  # type: ignore[arg-type]  # has what it reads
    answer = await route.endpoint(names=False)  # type: ignore[attr-defined]  # an API route has one
    assert len(pool.recorder._listeners) == 1

    async def gone(*_: Any) -> Any:
        raise OSError("the connection is closed")

    with pytest.raises((ClientDisconnect, OSError)):
        await answer({"type": "http", "asgi": {"spec_version": "2.4"}}, gone, gone)
    assert not pool.recorder._listeners


def test_an_old_file_is_not_written_over(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    out.write_text("precious")
    assert "is there already" in run("trace", "--out", str(out), "--url", server.url, code=2).stderr
    assert out.read_text() == "precious"


def test_without_a_broker_it_is_said() -> None:
    result = run("trace", "--out", "/tmp/never.jsonl", "--url", "http://127.0.0.1:1", code=3)
    assert "no Model Boss answers" in result.stderr
    assert not Path("/tmp/never.jsonl").exists()


def test_a_wrong_duration_is_said() -> None:
    assert "--for: duration 'long'" in run("trace", "--out", "x", "--for", "long", code=2).stderr
