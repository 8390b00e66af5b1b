"""`gpuboss run` as others see it: environment, signals, exit codes, what it waits for, and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from gpuboss.client import Client
from gpuboss.leases import Lease
from gpuboss.node_ledger import NodeLedger
from tests.integration.gpuboss.cli_kit import GPUBOSS, Run, environment, gpuboss, runs
from tests.integration.gpuboss.keeper_harness import MIB, ROOT, LedgerUnderTest, ask, gone, ledger_in, read_proc
from tests.support import until, wait_until

HALF = ("--vram", "50MiB", "--device", "sim0")
WHOLE = ("--vram", "100MiB", "--device", "sim0")


class Start(Protocol):
    def __call__(self, *arguments: str, **options: object) -> Run: ...


pytestmark = pytest.mark.usefixtures("client")


@pytest.fixture
async def client(ledger: LedgerUnderTest) -> AsyncIterator[Client]:
    """Keeps a keeper with quick timings alive."""
    async with await Client.connect(ledger.settings, name="test") as connected:
        yield connected


@pytest.fixture
def start(ledger: LedgerUnderTest, client: Client) -> Iterator[Start]:
    with runs(ledger) as make:
        yield make


async def test_the_command_runs_under_its_lease(ledger: LedgerUnderTest, client: Client, start: Start) -> None:
    run = start(*HALF, "--name", "sft-12", "--priority", "batch", "--preemptible", "--grace", "7s")
    told = await asyncio.to_thread(lambda: run.told)
    (lease,) = (await client.snapshot()).leases
    assert (lease.id, lease.holder, lease.priority) == (run.lease, "job:sft-12", 50)
    assert (lease.preemptible, lease.grace_s, dict(lease.shares)) == (True, 7.0, {"sim0": 50 * MIB})
    assert told["group"] == told["pid"], "it leads a process group of its own"
    assert not {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"} & told["env"].keys(), "nobody sees a declared device"
    assert any(path.endswith(f"holders/{lease.id}") for path in told["handles"]), "it holds the lease's lock file"
    with NodeLedger(ledger.state.ledger_path) as books:
        (row,) = books.rows()
    assert (row.pid, row.engine_pid) == (run.process.pid, told["pid"]), "the books name the wrapper and the command"
    run.signal(signal.SIGTERM)
    assert await asyncio.to_thread(run.wait) == (0, "")
    await until(lambda: _is_empty(client), "the lease to be given back")


@pytest.mark.parametrize("code", [0, 7, 75, 255])
def test_the_exit_code_is_the_commands_own(start: Start, code: int) -> None:
    assert start(*HALF, exit=code).wait() == (code, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGSEGV])
def test_a_command_that_a_signal_ends_is_128_and_its_number(ledger: LedgerUnderTest, number: int) -> None:
    words = (
        f"import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), {int(number)})"
    )
    gpuboss(ledger, "run", *HALF, "--", sys.executable, "-c", words, code=128 + number)


def test_signals_are_passed_on(start: Start) -> None:
    run = start(*HALF, ends=["SIGTERM"], code=3)
    pid = run.told["pid"]
    for name in ("SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT", "SIGTERM"):
        run.signal(signal.Signals[name])
        run.wait_heard(name)
    assert run.wait() == (3, "")
    assert {heard for heard, _ in run.heard()} == {pid}


async def test_what_was_ignored_stays_ignored(ledger: LedgerUnderTest, client: Client) -> None:
    """`nohup gpuboss run`, and background jobs of scripts: while it waits, and while it runs."""
    held = await client.acquire(ask())
    words = [*GPUBOSS, "run", *HALF, "--", "sh", "-c", "echo began; read word; exit 4"]
    program = (
        "import os, signal, sys\n"
        "for number in (signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)\n"
        f"os.execv(sys.executable, {words!r})"
    )
    run = _begin(ledger, [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert run.stdout is not None
    await _queued(client)
    for number in (signal.SIGHUP, signal.SIGINT):
        os.killpg(run.pid, number)
    await client.release(held)
    assert await asyncio.to_thread(run.stdout.readline) == b"began\n"
    for number in (signal.SIGHUP, signal.SIGINT):
        os.killpg(run.pid, number)
    await asyncio.to_thread(run.communicate, b"end\n", 20)
    assert run.returncode == 4


@pytest.mark.parametrize("ends", ["by itself", "by a signal"])
async def test_nothing_of_the_command_outlives_the_lease(client: Client, start: Start, ends: str) -> None:
    run = start(*HALF, child=True, code=5, ends=["SIGUSR1"])
    child = run.told["child"]
    assert not gone(child)
    began_s = time.monotonic()
    run.signal(signal.SIGUSR1)
    wait_until(lambda: gone(run.told["pid"]), "the command's first process to end")
    lease = await client.find(run.lease)
    assert lease is not None
    assert lease.fence is not None, "held while something of it lives"
    assert not gone(child), "it ignores SIGTERM, in a session of its own, and has its grace"
    if ends == "by a signal":
        run.signal(signal.SIGTERM)  # somebody cannot wait for the grace
    code, _ = await asyncio.to_thread(run.wait)
    assert code == 5
    assert gone(child)
    assert (time.monotonic() - began_s < 5.0) == (ends == "by a signal"), "5 s of grace, unless it is hastened"
    await until(lambda: _is_empty(client), "the lease to be given back")


async def test_killed_the_wrapper_takes_all_of_the_command_with_it(client: Client, start: Start) -> None:
    run = start(*HALF, child=True, ignored=["SIGTERM", "SIGHUP"])
    pids = [run.told["pid"], run.told["child"]]
    run.process.kill()
    wait_until(lambda: all(map(gone, pids)), "the command and what it detached to be ended", timeout_s=10)
    await until(lambda: _is_empty(client), "the lease to be freed", timeout_s=10)


async def test_killed_the_wrapper_a_command_without_a_sign_on_it_is_found_in_the_books(
    ledger: LedgerUnderTest, client: Client
) -> None:
    """It asks the kernel not to be killed with us, and carries nobody's name."""
    program = "import ctypes, os; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0); os.execve('/bin/sleep', ['sleep', '600'], {})"
    wrapper = _begin(ledger, [*GPUBOSS, "run", *HALF, "--", sys.executable, "-c", program])
    command = _child_of(wrapper.pid)
    wait_until(lambda: read_proc(command, "cmdline").startswith(b"sleep\0"), "the command to have cleared itself")
    wrapper.kill()
    wrapper.wait()
    wait_until(lambda: gone(command), "the command to be ended", timeout_s=10)
    await until(lambda: _is_empty(client), "the lease to be freed", timeout_s=10)


async def test_killed_at_the_gate_nothing_is_left(ledger: LedgerUnderTest, client: Client, start: Start) -> None:
    held = await client.acquire(ask())
    run = start(*WHOLE)
    waiting = await _queued(client)
    child = _child_of(run.process.pid)
    run.process.kill()
    wait_until(lambda: gone(child), "the command that never began to be gone")
    await until(lambda: _is_over(client, waiting), "the waiter to leave the queue", timeout_s=5)
    await client.release(held)
    assert not run.began


# -- waiting -------------------------------------------------------------------------------------------------------


async def test_who_waits_is_told_why_and_begins_when_it_can(client: Client, start: Start) -> None:
    held = await client.acquire(ask(70 * MIB, holder="job:sft-11"))
    run = start(*HALF, "--name", "next", exit=0)
    await _queued(client)
    stderr = run.process.stderr
    assert stderr is not None
    first = await asyncio.to_thread(stderr.readline)
    assert first == ("gpuboss: waiting: position 1 of 1; 50MiB of sim0 wanted, 30MiB free; held by job:sft-11 70MiB\n")
    assert not run.began
    await client.release(held)
    code, said = await asyncio.to_thread(run.wait)
    assert code == 0
    assert said.startswith("gpuboss: job:next has 50MiB of sim0, after ")


async def test_quiet_says_nothing(client: Client, start: Start) -> None:
    held = await client.acquire(ask())
    run = start(*HALF, "--quiet", exit=0)
    await _queued(client)
    await client.release(held)
    assert await asyncio.to_thread(run.wait) == (0, "")


@pytest.mark.parametrize("wait", ["0", "300ms"])
async def test_a_wait_in_vain_is_75_and_says_who_holds_what(client: Client, start: Start, wait: str) -> None:
    held = await client.acquire(ask(70 * MIB, holder="slot:robin"))
    code, said = await asyncio.to_thread(start(*HALF, "--wait", wait, "--name", "late").wait)
    assert code == 75
    for words in ("job:late", "50MiB", "30MiB free", "slot:robin 70MiB"):
        assert words in said
    assert ("cannot be granted at once" if wait == "0" else "was not granted within 0.3 s") in said
    assert [lease.id for lease in (await client.snapshot()).leases] == [held.id], "it has left the queue"
    await client.release(held)


async def test_who_waits_for_any_device_is_told_of_all(client: Client, start: Start) -> None:
    held = await client.acquire(replace(ask(), options=({"sim0": 70 * MIB, "sim1": 80 * MIB},)))
    run = start("--vram", "50MiB", exit=0)
    await _queued(client)
    stderr = run.process.stderr
    assert stderr is not None
    first = await asyncio.to_thread(stderr.readline)
    assert "50MiB of one of sim0, sim1 wanted, at most 30MiB free; held by job:test 150MiB" in first
    await client.release(held)
    assert (await asyncio.to_thread(run.wait))[0] == 0


async def test_who_is_taken_out_of_the_queue_is_told_so(ledger: LedgerUnderTest, client: Client, start: Start) -> None:
    held = await client.acquire(ask())
    run = start(*HALF, "--name", "w1", "--quiet")
    await _queued(client)
    await asyncio.to_thread(gpuboss, ledger, "release", "w1")
    code, said = await asyncio.to_thread(run.wait)
    assert (code, said) == (77, "gpuboss: job:w1 was taken out of the queue (gpuboss release)\n")
    assert not run.began
    await client.release(held)


async def test_host_memory_in_a_gpus_place_is_told_unless_it_was_declared(tmp_dir: Path) -> None:
    ledger = ledger_in(tmp_dir / "cpu", "cpu=100MiB")
    words = [*GPUBOSS, "run", "--quiet", "--vram", "50MiB", "--", "true"]
    try:
        async with await Client.connect(ledger.settings, name="test"):
            for declared, says in (("cpu=100MiB", ""), ("", "50MiB of host memory (cpu) is leased instead")):
                around = environment(ledger, GPUBOSS_DEVICES=declared)
                options = {"capture_output": True, "text": True, "cwd": ROOT, "env": around, "timeout": 60}
                done = await asyncio.to_thread(subprocess.run, words, **options)
                assert done.returncode == 0, done
                assert says in done.stderr if says else not done.stderr
    finally:
        ledger.clean_up()


def test_more_than_there_is_is_refused_at_once(ledger: LedgerUnderTest) -> None:
    said = gpuboss(ledger, "run", "--vram", "200MiB", "--", "true", code=77)
    assert "200MiB" in said
    assert "sim0 can give 100MiB" in said
    assert "Ask for less, or spread it over more devices: --gpus 2 --vram 100MiB" in said
    said = gpuboss(ledger, "run", "--vram", "1MiB", "--gpus", "3", "--", "true", code=77)
    assert "for only 2 are there: sim0 can give 100MiB, sim1 can give 100MiB. Ask for fewer devices: --gpus 2" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_wait_is_given_up_at_a_signal(client: Client, start: Start, number: int) -> None:
    held = await client.acquire(ask())
    run = start(*HALF)
    waiting = await _queued(client)
    run.signal(number)
    code, _ = await asyncio.to_thread(run.wait)
    assert code == 128 + number
    assert await _is_over(client, waiting)
    assert not run.began
    await client.release(held)


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["no-such-command-anywhere"], 127, "command not found"),
        (["/etc/passwd"], 126, "cannot be executed"),
        (["/etc"], 126, "cannot be executed"),
    ],
)
def test_a_command_that_cannot_run_is_told_before_any_wait(
    ledger: LedgerUnderTest, command: list[str], code: int, words: str
) -> None:
    assert words in gpuboss(ledger, "run", "--vram", "200MiB", "--", *command, code=code)


def test_a_run_below_another_says_that_it_holds_more(ledger: LedgerUnderTest) -> None:
    inner = " ".join([*GPUBOSS, "run", *HALF, "--", "true"])
    done = subprocess.run(
        [*GPUBOSS, "run", *HALF, "--", "sh", "-c", f"{inner}; exit 7"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(ledger),
        timeout=60,
    )
    assert done.returncode == 7
    assert "already; the new lease is held besides it" in done.stderr


async def test_who_waits_is_told_when_the_store_is_away(ledger: LedgerUnderTest, client: Client, start: Start) -> None:
    held = await client.acquire(ask())
    run = start(*HALF, exit=0)
    await _queued(client)
    store = ledger.store_pid
    os.kill(store, signal.SIGSTOP)
    try:
        stderr = run.process.stderr
        assert stderr is not None
        for line in iter(lambda: stderr.readline(), ""):
            if "the lease store" in line:
                break
        else:
            raise AssertionError("it ended instead")
    finally:
        os.kill(store, signal.SIGCONT)
    await client.release(held)
    assert (await asyncio.to_thread(run.wait))[0] == 0


async def test_an_exclusive_lease_takes_whole_devices(client: Client, start: Start) -> None:
    run = start("--exclusive", "--gpus", "2", ends=["SIGTERM"])
    assert run.told
    (lease,) = (await client.snapshot()).leases
    assert dict(lease.shares) == {"sim0": 100 * MIB, "sim1": 100 * MIB}
    run.signal(signal.SIGTERM)
    assert (await asyncio.to_thread(run.wait))[0] == 0


async def test_the_store_may_fall_while_the_command_runs(ledger: LedgerUnderTest, client: Client, start: Start) -> None:
    run = start(*HALF, ends=["SIGTERM"], code=6)
    assert run.told
    os.kill(ledger.store_pid, signal.SIGKILL)
    os.kill(ledger.keeper_pid, signal.SIGKILL)
    run.signal(signal.SIGUSR1)
    run.wait_heard("SIGUSR1")
    run.signal(signal.SIGTERM)
    code, _ = await asyncio.to_thread(run.wait)
    assert code == 6
    await until(lambda: _is_empty(client), "the lease to be freed")


# -- yielding ------------------------------------------------------------------------------------------------------


async def test_at_a_notice_the_command_gets_the_signal_and_the_exit_code_is_79(client: Client, start: Start) -> None:
    run = start(*WHOLE, "--preemptible", "--priority", "batch", "--preempt-signal", "USR1", ends=["SIGUSR1"], code=0)
    assert run.told
    wanted = await client.acquire(ask(holder="job:urgent", priority=1))
    assert (await asyncio.wait_for(client.wait_granted(wanted), 10)).fence is not None
    code, said = await asyncio.to_thread(run.wait)
    assert code == 79
    assert "job:urgent (urgent) wants this memory back" in said
    assert "the command gets SIGUSR1, and SIGKILL in 30 s" in said
    assert next(name for _, name in run.heard()) == "SIGUSR1"
    await client.release(wanted)


async def test_when_the_grace_is_over_the_command_is_killed(client: Client, start: Start) -> None:
    run = start(*WHOLE, "--preemptible", "--priority", "batch", "--grace", "1s", ends=[], child=True)
    pids = [run.told["pid"], run.told["child"]]
    wanted = await client.acquire(ask(holder="job:urgent", priority=1))
    code, said = await asyncio.to_thread(run.wait)
    assert code == 79
    assert "the grace is over: the command is killed" in said
    assert all(map(gone, pids))
    assert "SIGTERM" in [name for _, name in run.heard()], "it was asked first"
    assert (await asyncio.wait_for(client.wait_granted(wanted), 10)).fence is not None
    await client.release(wanted)


async def test_one_that_did_not_offer_it_is_left_alone(client: Client, start: Start) -> None:
    run = start(*WHOLE, "--priority", "batch", ends=["SIGTERM"])
    assert run.told
    wanted = await client.acquire(ask(priority=1))
    assert wanted.fence is None
    await until(lambda: _looked_at(client, wanted), "the waiter to be looked at again")
    assert not run.heard()
    run.signal(signal.SIGTERM)
    assert (await asyncio.to_thread(run.wait))[0] == 0
    await client.release(await asyncio.wait_for(client.wait_granted(wanted), 10))


# -- helpers -------------------------------------------------------------------------------------------------------


def _begin(
    ledger: LedgerUnderTest, words: list[str], *, stdin: int = subprocess.DEVNULL, stdout: int | None = None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        words, stdin=stdin, stdout=stdout, cwd=ROOT, env=environment(ledger), start_new_session=True
    )


async def _is_empty(client: Client) -> bool:
    return not (await client.snapshot()).leases


async def _queued(client: Client) -> Lease:
    found: list[Lease] = []

    async def look() -> bool:
        found[:] = [lease for lease in (await client.snapshot()).leases if lease.fence is None]
        return bool(found)

    await until(look, "somebody to wait")
    return found[0]


async def _is_over(client: Client, lease: Lease) -> bool:
    return lease.id not in {other.id for other in (await client.snapshot()).leases}


async def _looked_at(client: Client, lease: Lease) -> bool:
    """Two ticks later it still waits."""
    await asyncio.sleep(2 * client.timings.tick_s)
    found = await client.find(lease.id)
    return found is not None and found.fence is None


def _child_of(pid: int) -> int:
    found: list[str] = []

    def look() -> bool:
        found[:] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return bool(found)

    wait_until(look, "the child at the gate")
    return int(found[0])
