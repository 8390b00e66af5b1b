"""The shim with its parent's end: it starts an engine, tells how it ended, and lets nothing outlive it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import uvloop

import inference
from inference import process
from inference.process import EndReason, Exited, Lost, Refused, Shim, Shims, Started
from tests.integration.inference.shim_kit import STUBBORN, Kit, carriers
from tests.support import until, wait_until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SLEEP = "import time; time.sleep(600)"
DEAF = """
import signal, sys, time
def say(word):
    with open(sys.argv[1], "w") as file:
        file.write(word)
signal.signal(signal.SIGTERM, lambda *_: say("told"))
say("ready")
while True:
    time.sleep(600)
"""
"""Writes down that it was told to end, and goes on."""


@pytest.fixture
def kit(tmp_dir: Path) -> Kit:
    return Kit(tmp_dir)


@pytest.fixture
async def shim(kit: Kit) -> AsyncIterator[Shim]:
    spawned = await Shim.spawn(kit.ledger)
    yield spawned
    await spawned.close()


async def started(shim: Shim, order: process.LaunchOrder) -> int:
    shim.launch(order)
    report = await shim.report()
    assert isinstance(report, Started), report
    return report.pid


async def test_an_engine_runs_under_its_lease_until_it_is_stopped(kit: Kit, shim: Shim) -> None:
    order = kit.order(SLEEP)
    pid = await started(shim, order)
    [row] = kit.rows()
    assert (row.lease_id, row.pid, row.engine_pid) == (order.lease.id, shim.pid, pid)
    assert row.terms == order.lease.terms != ""
    assert carriers(order.lease.id) == [pid]
    shim.stop(0.0)
    report = await shim.report()
    assert isinstance(report, Exited)
    assert (report.signal, report.code, report.reason) == (signal.SIGKILL, None, EndReason.STOPPED)
    assert report.max_rss_bytes > 1 << 20
    assert not carriers(order.lease.id)
    assert kit.rows() == []
    assert shim.idle, "it would serve again"


def test_it_is_the_same_on_the_loop_that_the_broker_uses(kit: Kit) -> None:
    async def scenario() -> None:
        shim = await Shim.spawn(kit.ledger)
        order = kit.order(SLEEP)
        try:
            assert carriers(order.lease.id) == []
            pid = await started(shim, order)
            assert carriers(order.lease.id) == [pid]
            if sys.platform == "linux":  # uvloop closes nothing: the broker's log, the shim's orders and reports
                # An interpreter that is still starting has files open of its own.
                await until(lambda: psutil.Process(pid).num_fds() == 3, "the engine to hold nothing inherited")
            shim.stop(0.0)
            assert isinstance(await shim.report(), Exited)
        finally:
            await shim.close()
        assert carriers(order.lease.id) == []

    inherited = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(inherited, True)
    try:
        uvloop.run(scenario())
    finally:
        os.close(inherited)


@pytest.mark.parametrize(
    ("code", "expected", "words"),
    [
        ("raise SystemExit(0)", (0, None), "ended with code 0"),
        ("raise SystemExit(3)", (3, None), "ended with code 3"),
        ("import os; os.abort()", (None, signal.SIGABRT), "was killed by SIGABRT"),
        ("import os; os.kill(os.getpid(), 9)", (None, signal.SIGKILL), "as the system does when memory runs out"),
    ],
)
async def test_how_an_engine_ended_is_told(
    kit: Kit, shim: Shim, code: str, expected: tuple[int | None, int | None], words: str
) -> None:
    await started(shim, kit.order(code))
    report = await shim.report()
    assert isinstance(report, Exited)
    assert (report.code, report.signal) == expected
    assert report.reason is EndReason.EXIT
    assert words in str(report)
    assert kit.rows() == []


async def test_sigterm_comes_first_and_once_where_a_grace_is_ordered(kit: Kit, shim: Shim) -> None:
    """A program that exits because of the first has put its handler away when a second one comes."""
    polite = """
import signal, sys, time
def leave(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(0.5)
    sys.exit(7)
signal.signal(signal.SIGTERM, leave)
print("ready to be told", flush=True)
time.sleep(600)
"""
    await started(shim, kit.order(polite))
    await until(kit.log.exists, "the log")
    await until(lambda: "ready to be told" in kit.log.read_text(), "the handler to be there")
    shim.stop(60.0)
    report = await shim.report()
    assert isinstance(report, Exited)
    assert report.code == 7


async def test_sigkill_follows_when_the_grace_is_over_or_cut_short(kit: Kit, shim: Shim) -> None:
    pids = kit.root / "pids"
    order = kit.order(STUBBORN, str(pids))
    await started(shim, order)
    await until(lambda: pids.exists() and len(pids.read_text().split()) == 2, "engine and daemon to be there")
    shim.stop(60.0)
    shim.stop(0.1)
    report = await shim.report()
    assert isinstance(report, Exited)
    assert report.signal == signal.SIGKILL
    assert not carriers(order.lease.id)


async def test_what_a_dead_engine_leaves_behind_is_ended_too(kit: Kit, shim: Shim) -> None:
    at_work = "while not os.path.exists(sys.argv[1]) or not os.path.getsize(sys.argv[1]): time.sleep(0.01)"
    leaves_a_daemon = STUBBORN.replace("os.wait()\n", f"os.wait()\n{at_work}\nsys.exit(0)\n")
    order = kit.order(leaves_a_daemon, str(kit.root / "pids"))
    await started(shim, order)
    report = await shim.report()
    assert isinstance(report, Exited)
    assert report.code == 0
    daemon = int((kit.root / "pids").read_text())
    assert not psutil.pid_exists(daemon)
    assert not carriers(order.lease.id)


async def test_memory_that_is_not_there_is_refused_and_another_launch_may_follow(kit: Kit, shim: Shim) -> None:
    shim.launch(kit.order(SLEEP, size=2 << 30))
    refusal = await shim.report()
    assert isinstance(refusal, Refused)
    assert refusal.kind == "ActivationRefused"
    assert "2GiB wanted, 1GiB free" in refusal.message
    assert kit.rows() == []
    await started(shim, kit.order(SLEEP))
    shim.stop(0.0)
    assert isinstance(await shim.report(), Exited)


@pytest.mark.parametrize("program", ["/nowhere/llama-server", "/etc/passwd"])
async def test_a_program_that_cannot_be_executed_is_refused(kit: Kit, shim: Shim, program: str) -> None:
    order = kit.order("")
    shim.launch(process.LaunchOrder(**{**_fields(order), "argv": (program,)}))
    refusal = await shim.report()
    assert isinstance(refusal, Refused)
    assert refusal.kind == "Unstartable"
    assert program in refusal.message
    assert kit.rows() == []
    assert psutil.Process(shim.pid).children() == []


async def test_an_engine_inherits_nothing(kit: Kit, shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_PORT", "1")
    tell = """
import json, os, resource, signal
fds = {}
for name in os.listdir("/proc/self/fd"):
    if os.path.exists(f"/proc/self/fd/{name}"):
        fds[name] = os.readlink(f"/proc/self/fd/{name}")
print(json.dumps({"env": dict(os.environ), "fds": fds, "session": os.getsid(0) == os.getpid(), "cwd": os.getcwd(),
    "core": resource.getrlimit(resource.RLIMIT_CORE)[0], "umask": os.umask(0),
    "oom": int(open("/proc/self/oom_score_adj").read()), "ignored": open("/proc/self/status").read()}))
"""
    kit.log.write_text("earlier\n")
    order = kit.order(tell, FRUIT="pear")
    await started(shim, order)
    assert isinstance(await shim.report(), Exited)
    earlier, line = kit.log.read_text().splitlines()
    told = json.loads(line)
    assert earlier == "earlier"
    assert {name: value for name, value in told["env"].items() if name != "LC_CTYPE"} == dict(order.env)
    assert told["fds"] == {"0": "/dev/null", "1": str(kit.log), "2": str(kit.log)}
    assert told["session"]
    assert told["cwd"] == str(kit.root)
    assert (told["core"], told["umask"], told["oom"]) == (0, 0o077, 500)


async def test_a_shim_that_is_let_go_before_its_order_just_ends(kit: Kit) -> None:
    shim = await Shim.spawn(kit.ledger)
    await shim.close()
    assert await shim.report() == Lost(0)
    assert kit.rows() == []


@pytest.mark.parametrize("moment", ["at once", "when started"])
async def test_the_end_of_its_orders_ends_the_engine(kit: Kit, moment: str) -> None:
    shim = await Shim.spawn(kit.ledger)
    order = kit.order(STUBBORN, str(kit.root / "pids"))
    shim.launch(order)
    if moment == "when started":
        assert isinstance(await shim.report(), Started)
    await shim.close()
    assert not carriers(order.lease.id)
    assert kit.rows() == []


@pytest.mark.parametrize("by", ["the end of its orders", "SIGTERM"])
async def test_a_shim_told_to_go_while_it_stops_its_engine_goes_too(kit: Kit, by: str) -> None:
    shim = await Shim.spawn(kit.ledger)
    words = kit.root / "words"
    order = kit.order(DEAF, str(words))
    await started(shim, order)
    await until(lambda: words.exists() and words.read_text() == "ready", "the engine to be deaf")
    shim.stop(1.0)
    await until(lambda: words.read_text() == "told", "the stop to be under way")
    if by == "SIGTERM":
        os.kill(shim.pid, signal.SIGTERM)
        report = await shim.report()
        assert isinstance(report, Exited)
        assert report.reason is EndReason.STOPPED
        assert await asyncio.wait_for(shim.report(), 5) == Lost(0)
    await shim.close()
    assert await shim.report() == Lost(0), "it had not to be killed"
    assert not carriers(order.lease.id)
    assert kit.rows() == []


async def test_sigterm_to_the_shim_ends_the_engine_first(kit: Kit, shim: Shim) -> None:
    order = kit.order(STUBBORN, str(kit.root / "pids"))
    await started(shim, order)
    os.kill(shim.pid, signal.SIGTERM)
    report = await shim.report()
    assert isinstance(report, Exited)
    assert report.reason is EndReason.ORPHANED
    assert not carriers(order.lease.id)
    assert kit.rows() == []


async def test_kill_9_of_the_shim_takes_the_engine_along_and_leaves_the_row_to_the_keeper(kit: Kit, shim: Shim) -> None:
    order = kit.order("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)")
    await started(shim, order)
    os.kill(shim.pid, signal.SIGKILL)
    assert await shim.report() == Lost(-signal.SIGKILL)
    await until(lambda: not carriers(order.lease.id), "the engine to be dead")
    assert [row.lease_id for row in kit.rows()] == [order.lease.id]


async def test_a_shim_that_stands_still_is_killed_when_it_is_let_go(
    kit: Kit, shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "CLOSE_PATIENCE_S", 0.1)
    order = kit.order(SLEEP)
    await started(shim, order)
    os.kill(shim.pid, signal.SIGSTOP)
    await shim.close()
    await until(lambda: not carriers(order.lease.id), "the engine to be dead")


async def test_a_spare_shim_is_ready_and_one_that_died_is_not_given_out(kit: Kit) -> None:
    shims = Shims(kit.ledger, spares=1)
    await shims.startup()
    await until(lambda: len(shims._ready) == 1, "the spare shim")
    spare = shims._ready[0]
    os.kill(spare.pid, signal.SIGKILL)
    await until(lambda: not spare.alive, "its death to be noticed")
    taken = await shims.take()
    assert taken is not spare
    order = kit.order(SLEEP)
    await started(taken, order)
    shims.refill()
    await until(lambda: len(shims._ready) == 1, "the next spare shim")
    shims.retire(taken)
    await shims.close()
    assert not carriers(order.lease.id)


async def test_a_shim_whose_engine_is_dead_serves_again(kit: Kit) -> None:
    shims = Shims(kit.ledger, spares=1)
    shim = await shims.take()
    for _ in range(3):
        order = kit.order(SLEEP)
        await started(shim, order)
        assert [row.lease_id for row in kit.rows()] == [order.lease.id]
        shim.stop(0.0)
        assert isinstance(await shim.report(), Exited)
        shim.stop(0.0)  # one that crosses with the report means nothing to it
        assert kit.rows() == []
        assert not carriers(order.lease.id)
        shims.retire(shim)
        assert await shims.take() is shim
    shims.retire(shim)
    await shims.close()
    assert not shim.alive


async def test_a_shim_that_is_at_work_is_not_given_out_again(kit: Kit) -> None:
    shims = Shims(kit.ledger, spares=1)
    shim = await shims.take()
    order = kit.order(SLEEP)
    await started(shim, order)
    shims.retire(shim)
    other = await shims.take()
    assert other is not shim
    shims.retire(other)
    await shims.close()
    assert not carriers(order.lease.id), "closing it ended its engine"


# -- kill -9 of the broker, at any moment --------------------------------------------------------------------------

BROKER = """
import subprocess, sys, time
shim = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={}, start_new_session=True)
shim.stdin.write(sys.argv[1].encode() + b"\\n")
shim.stdin.flush()
print("ordered", flush=True)
time.sleep(600)
"""
ROUNDS = 30
AT_ONCE = 6


@pytest.mark.slow
def test_kill_9_of_the_broker_leaves_no_process_and_no_row(kit: Kit) -> None:
    """Engines that ignore SIGTERM and leave daemons, the broker killed at a random moment of their start."""
    dice = random.Random(20)
    moments: list[tuple[bool, bool]] = []
    for _ in range(ROUNDS // AT_ONCE):
        brokers = []
        for number in range(AT_ONCE):
            brokers.append(_Broker(kit, number))
            time.sleep(dice.choice((0.0, dice.uniform(0, 0.3))))
            moments.append(brokers[-1].kill())
        for broker in brokers:
            broker.check()
    assert kit.rows() == []
    # The mechanism was tried: some were killed before the engine ran, some after it had left its daemon.
    assert {launched for launched, _ in moments} == {True, False}
    assert any(complete for _, complete in moments)


class _Broker:
    """A process that launches through a shim and waits to be killed."""

    def __init__(self, kit: Kit, number: int) -> None:
        self.number = number
        self._pids = kit.root / f"pids-{number}"
        self._pids.unlink(missing_ok=True)
        self.order = kit.order(STUBBORN, str(self._pids))
        package = str(Path(inference.__file__).parents[1])
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", BROKER, json.dumps({"op": "launch", **asdict(self.order)})),
                *(sys.executable, "-I", "-S", "-c", process._MAIN, str(kit.ledger), package),
            ],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def kill(self) -> tuple[bool, bool]:
        """Kill it, and say whether its engine ran by then, and whether its daemon was there."""
        carrying = carriers(self.order.lease.id)
        complete = self._pids.exists() and len(self._pids.read_text().split()) == 2
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return bool(carrying), complete

    def check(self) -> None:
        """Everything of it is gone, and stays gone."""
        shim = f"{self.order.lease.id}"
        wait_until(lambda: not carriers(shim) and not _shims_of(self._pids), "every process of the engine to be dead")


def _shims_of(pids: Path) -> list[int]:
    """Shims whose ledger lies in the test's directory: until they are gone, an engine may yet be started."""
    found = []
    for candidate in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error):
            line = candidate.info["cmdline"] or []
            if process._MAIN in line and str(pids.parent / "node.sqlite") in line and BROKER not in line:
                found.append(candidate.pid)
    return found


def _fields(order: process.LaunchOrder) -> dict[str, object]:
    return {name: getattr(order, name) for name in order.__slots__}
