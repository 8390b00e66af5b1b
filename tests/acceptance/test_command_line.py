"""The commands a person types, against a real broker; and the demo, by what it prints alone."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.acceptance.broker import CLAIM_MIB, Broker, broker, free_port
from tests.support import wait_until

SCRIPT = Path(sys.executable).parent / "model-boss"
DEMO_CODE = (
    "import sys; from pathlib import Path; from coordinator.cli import demo, main; demo.DEMO = Path({!r}); main()"
)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory, llama_server: Path, demo_models: Path) -> Iterator[Broker]:
    with broker(tmp_path_factory.mktemp("b"), llama_server, demo=demo_models) as running:
        yield running


def command(subject: Broker, *arguments: str, code: int = 0) -> str:
    """Run `model-boss` against the broker; what it printed."""
    environment = {**os.environ, "MODEL_BOSS_URL": subject.url, "MODEL_BOSS_CONFIG": str(subject.write_config())}
    done = subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


# -- commands ------------------------------------------------------------------------------------------------------


def test_load_ps_logs_unload(subject: Broker) -> None:
    assert "robin is ready" in command(subject, "load", "robin")
    assert "loaded already" in command(subject, "load", "robin")
    row = next(line.split("\t") for line in command(subject, "ps").splitlines() if line.startswith("robin"))
    assert row[:4] == ["robin", "ready", "sim0", f"{CLAIM_MIB}MiB"]
    shown = subject.slots()["robin"]
    assert (row[7], row[9]) == (f"{shown['last_load_s']:.2f}", str(shown["pid"]))
    assert re.fullmatch(r"(\d{4}-\d\d-\d\d )?\d\d:\d\d(:\d\d)?", row[8]), "until when it stays"
    log = command(subject, "logs", "robin", "-n", "500")
    assert "llama" in log
    assert command(subject, "logs", "robin", "-n", "1").strip() in log
    assert "robin is not loaded now" in command(subject, "unload", "robin")
    assert "robin" not in command(subject, "ps")


def test_models_and_json(subject: Broker) -> None:
    assert [line.split("\t")[0] for line in command(subject, "models").splitlines()] == ["model", "robin", "wren"]
    assert [model["id"] for model in json.loads(command(subject, "models", "--json"))] == ["robin", "wren"]
    assert set(json.loads(command(subject, "ps", "--json"))) == {"slots", "queue", "devices", "external", "leases"}


def test_a_model_that_is_not_there_is_told_with_what_is_near(subject: Broker) -> None:
    done = subprocess.run([SCRIPT, "load", "robbin", "--url", subject.url], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "robin" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_doctor_finds_a_running_broker_healthy(subject: Broker) -> None:
    shown = json.loads(command(subject, "doctor", "--json"))
    assert shown["ok"] is True
    assert any(finding["check"] == "port" and "answers" in finding["text"] for finding in shown["findings"])


def test_following_a_log_shows_what_the_engine_says_next(subject: Broker) -> None:
    command(subject, "load", "wren")
    output = subject.directory / "followed"
    with output.open("w") as out:
        follower = subprocess.Popen([SCRIPT, "logs", "wren", "-f", "-n", "1", "--url", subject.url], stdout=out)

    def told() -> int:
        return len(output.read_text().splitlines())

    def asked_and_told() -> bool:
        subject.ask("wren")
        return told() > before

    try:
        wait_until(lambda: told() > 0, "the last line of the log")
        before = told()
        wait_until(asked_and_told, "what the engine logs about a request")
    finally:
        follower.kill()
        follower.wait()


# -- the demo ------------------------------------------------------------------------------------------------------


@pytest.fixture
def demo_checkout(tmp_dir: Path, demo_models: Path) -> Path:
    """A copy of `demo/` with a state directory of its own, so that a demo on this machine is not in the way."""
    copy = tmp_dir / "demo"
    copy.mkdir()
    shutil.copy(demo_models.parent / "model-boss.yaml", copy)
    shutil.copytree(demo_models.parent / "manifests", copy / "manifests")
    (copy / "models").symlink_to(demo_models)
    return copy


def test_the_demo_leads_from_its_ready_line_to_a_streamed_answer(demo_checkout: Path, llama_server: Path) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("the demo prints a curl line, and there is no curl")
    output = demo_checkout / "output"
    started = time.monotonic()
    with output.open("w") as out:
        demo = subprocess.Popen(
            [sys.executable, "-c", DEMO_CODE.format(str(demo_checkout)), "demo", "--port", str(free_port())],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "MODEL_BOSS_LLAMA_SERVER": str(llama_server)},
        )
    try:
        wait_until(lambda: "Ctrl-C" in output.read_text() or demo.poll() is not None, "the demo to be ready")
        told = output.read_text()
        assert re.search(r"Model Boss is ready on http://127\.0\.0\.1:\d+", told), told
        assert time.monotonic() - started < 10, "twice what is promised, for a busy machine"
        lines = [line.strip() for line in told.splitlines() if line.strip().startswith("curl ")]
        for line, name in zip(lines, ("Robin", "Wren"), strict=True):
            stream = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=60, check=True).stdout
            deltas = re.findall(r'"content":"((?:[^"\\]|\\.)*)"', stream)
            assert len(deltas) > 3, "streamed piece by piece"
            assert name in "".join(deltas), "the right model answered"
            assert stream.rstrip().endswith("data: [DONE]")
        ps = next(line for line in told.splitlines() if " ps " in line).partition(":")[2].split()
        shown = subprocess.run([SCRIPT, *ps[1:]], capture_output=True, text=True, timeout=60, check=True).stdout
        assert "wren\tready" in shown
        assert "robin\tready" not in shown, "there is room for one"
    finally:
        demo.send_signal(signal.SIGINT)
        code = demo.wait(30)
    assert code == 0
    wait_until(lambda: not _engines(llama_server, demo_checkout), "the engines to be gone")


def _engines(llama_server: Path, checkout: Path) -> list[int]:
    """Engines that run a model of this copy of the demo."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if line and line[0] == str(llama_server) and str(checkout) in " ".join(line):
            found.append(process.pid)
    return found
