"""The serving process: who may start, how it ends, what it says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support import wait_until

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_dir: Path) -> Iterator[Start]:
    """Start a broker with a fake pool; whatever still runs afterwards is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(port: int, *extra: str, host: str = "127.0.0.1", state: str = "state") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.integration.coordinator.serve_fake",
                str(tmp_dir / state),
                host,
                str(port),
                *extra,
            ],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith(("MODEL_BOSS", "GPUBOSS"))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _line(process: subprocess.Popen[str], start: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line.strip()
    raise AssertionError(f"ended with {process.wait()}: {process.stderr.read() if process.stderr else ''}")


def _health(port: int) -> dict[str, object]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
        return dict(json.load(answer))


def test_the_ready_line_is_true_and_a_signal_ends_it_in_good_order(start: Start) -> None:
    port = _free_port()
    broker = start(port)
    assert _line(broker, "Model Boss") == f"Model Boss is ready on http://127.0.0.1:{port}"
    assert _health(port)["status"] == "ok"
    broker.send_signal(signal.SIGTERM)
    assert _line(broker, "pool ended")
    assert broker.wait(10) == 0
    assert broker.stderr is not None
    assert broker.stderr.read() == ""


def test_callers_who_wait_do_not_hold_up_the_end_for_ever(start: Start) -> None:
    port = _free_port()
    broker = start(port)
    _line(broker, "Model Boss")
    with socket.create_connection(("127.0.0.1", port)) as caller:
        body = b'{"model": "robin"}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        caller.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/queue", timeout=5) as answer:
            assert len(json.load(answer)["queue"]) == 1
        broker.send_signal(signal.SIGINT)
        _line(broker, "pool ended")  # at once, not after the last caller
        broker.send_signal(signal.SIGINT)  # the fake pool refuses nobody, so only this can end the caller's wait
        assert broker.wait(10) in (0, 130)


def test_a_second_signal_ends_what_the_pool_would_wait_for(start: Start) -> None:
    port = _free_port()
    broker = start(port, "patient")
    _line(broker, "Model Boss")
    with socket.create_connection(("127.0.0.1", port)) as caller:
        body = b'{"model": "robin"}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        caller.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/queue", timeout=5) as answer:
            assert len(json.load(answer)["queue"]) == 1
        broker.send_signal(signal.SIGTERM)
        _line(broker, "pool ends")
        broker.send_signal(signal.SIGTERM)
        assert broker.wait(5) == 130
        assert b"shutting_down" in caller.recv(65536)


def test_a_signal_while_it_starts_ends_it(start: Start) -> None:
    broker = start(_free_port(), "slow")
    _line(broker, "starting")
    broker.send_signal(signal.SIGTERM)
    assert broker.wait(10) == 130


def test_a_second_broker_on_the_state_directory_says_who_is_first(start: Start) -> None:
    port = _free_port()
    first = start(port)
    _line(first, "Model Boss")
    for second in (start(port), start(_free_port())):
        out, err = second.communicate(timeout=20)
        assert second.returncode == 1
        assert "ready" not in out
        assert f"process {first.pid} " in err
        assert f"http://127.0.0.1:{port}" in err
        assert err.endswith("; end that one, or give this one a directory of its own with --state-dir\n")
        assert len(err.splitlines()) == 1
    assert _health(port)["status"] == "ok"
    first.kill()
    first.wait()
    third = start(port)
    assert _line(third, "Model Boss"), "the lock of a dead broker is free"


def test_a_taken_port_is_named_with_its_holder(start: Start) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        _, err = (broker := start(port)).communicate(timeout=20)
        assert broker.returncode == 1
        assert f"127.0.0.1:{port} is taken by process {os.getpid()}" in err
        assert "--port" in err
        assert len(err.splitlines()) == 1


def test_listening_to_the_network_without_a_key_is_refused(start: Start) -> None:
    _, err = (broker := start(_free_port(), host="0.0.0.0")).communicate(timeout=20)
    assert broker.returncode == 1
    assert "MODEL_BOSS_API_KEY" in err


def test_a_state_directory_that_cannot_be_written_is_named(start: Start, tmp_dir: Path) -> None:
    (tmp_dir / "file").write_text("")
    _, err = (broker := start(_free_port(), state="file")).communicate(timeout=20)
    assert broker.returncode == 1
    assert str(tmp_dir / "file") in err


def test_the_port_answers_again_at_once_after_a_kill(start: Start) -> None:
    port = _free_port()
    first = start(port)
    _line(first, "Model Boss")
    _health(port)
    first.kill()
    first.wait()
    _line(start(port), "Model Boss")
    wait_until(lambda: _health(port)["status"] == "ok", "the next broker")
