"""devices, ps, top, adopt, release, node, doctor, events against a real ledger."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TextIO

import pytest

from gpuboss import processes
from gpuboss.client import Client
from gpuboss.leases import HolderKind
from tests.integration.gpuboss.cli_kit import GPUBOSS, Run, environment, gpuboss, leases, runs
from tests.integration.gpuboss.keeper_harness import MIB, ROOT, LedgerUnderTest, ask, gone
from tests.integration.gpuboss.terminals import screen
from tests.support import until, wait_until

pytestmark = pytest.mark.usefixtures("client")


@pytest.fixture
async def client(ledger: LedgerUnderTest) -> AsyncIterator[Client]:
    """Keeps a keeper with quick timings alive."""
    async with await Client.connect(ledger.settings, name="test") as connected:
        yield connected


@contextmanager
def sleeper(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process without a lease."""
    process = subprocess.Popen(words or ("sleep", "600"))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def _over(client: Client, lease_id: str) -> bool:
    return lease_id not in {lease.id for lease in (await client.snapshot()).leases}


# -- devices, ps, top ------------------------------------------------------------------------------------------------


async def test_devices_and_ps_for_people_and_programs(ledger: LedgerUnderTest, client: Client) -> None:
    held = await client.acquire(ask(60 * MIB, holder="job:sft-12", priority=50))
    await client.acquire(ask(60 * MIB, holder="slot:robin"))
    table = await asyncio.to_thread(gpuboss, ledger, "devices")
    first = "sim0 sim 100MiB 0B 60MiB - - - 40MiB simulated device"
    assert table.splitlines()[1].split() == first.split()
    table = await asyncio.to_thread(gpuboss, ledger, "ps")
    header, *rows = [line.split() for line in table.splitlines()]
    assert header == ["LEASE", "HOLDER", "PRIORITY", "STATE", "SINCE", "PID", "MEMORY"]
    assert rows[0][:4] == [held.id[:12], "job:sft-12", "batch", "granted"]
    assert rows[0][5:] == [str(os.getpid()), "sim0", "60MiB"]
    assert rows[1][1:5] == ["slot:robin", "normal", "queued", "(1)"]
    devices = json.loads(await asyncio.to_thread(gpuboss, ledger, "devices", "--json"))
    assert [(found["id"], found["free_bytes"]) for found in devices] == [("sim0", 40 * MIB), ("sim1", 100 * MIB)]
    shown = await asyncio.to_thread(leases, ledger)
    assert [(found["holder"], found["state"], found["position"]) for found in shown] == [
        ("job:sft-12", "granted", None),
        ("slot:robin", "queued", 1),
    ]


def test_on_a_terminal_tables_are_drawn(ledger: LedgerUnderTest) -> None:
    with screen([*GPUBOSS, "devices"], environment(ledger), ROOT) as one:
        one.wait_for("DEVICE")
        one.wait_for("────")
        one.wait_for("simulated device")
        assert one.ended() == 0
    with screen([*GPUBOSS, "doctor"], environment(ledger), ROOT) as one:
        one.wait_for("\x1b[32mok")
        one.wait_for("all is well")
        assert one.ended() == 0


async def test_top_once_and_live(ledger: LedgerUnderTest, client: Client) -> None:
    held = await client.acquire(ask(50 * MIB, holder="job:sft-12"))
    once = await asyncio.to_thread(gpuboss, ledger, "top", "--once", COLUMNS="160")
    assert "1 held, 0 waiting" in once
    assert "█" * 20 + "·" * 20 in once, "half a bar"
    assert "50MiB of 100MiB free, leased 50MiB" in once
    shown = json.loads(await asyncio.to_thread(gpuboss, ledger, "top", "--json"))
    assert [lease["id"] for lease in shown["leases"]] == [held.id]

    def watch() -> int:
        with screen([*GPUBOSS, "top", "--interval", "100ms"], environment(ledger), ROOT) as live:
            live.wait_for("job:sft-12")
            live.wait_for("job:sft-12")
            live.type("q")
            code = live.ended()
            assert "\x1b[?1049l" in live.seen, "the screen is as it was"
            return code

    assert await asyncio.to_thread(watch) == 0


# -- adopt -----------------------------------------------------------------------------------------------------------


async def test_an_adopted_process_holds_until_it_ends(ledger: LedgerUnderTest, client: Client) -> None:
    with sleeper() as process:
        words = ["adopt", "--pid", str(process.pid), "--vram", "30MiB", "--device", "sim0", "--name", "comfyui"]
        said = await asyncio.to_thread(gpuboss, ledger, *words)
        assert said.startswith(f"service:comfyui has 30MiB of sim0 until process {process.pid} ends")
        (lease,) = (await client.snapshot()).leases
        assert (lease.holder, lease.kind.value, dict(lease.shares)) == (
            "service:comfyui",
            "service",
            {"sim0": 30 * MIB},
        )
        await client.sweep()
        assert not await _over(client, lease.id), "this command is gone, the process lives"
        (shown,) = await asyncio.to_thread(leases, ledger)
        assert shown["pid"] == process.pid, "not the command that asked for it"
        said = await asyncio.to_thread(lambda: gpuboss(ledger, *words, code=77))
        assert f"process {process.pid} is under lease {lease.id} already" in said
        said = await asyncio.to_thread(lambda: gpuboss(ledger, "adopt", "--pid", str(os.getpid()), code=77))
        below = f"process {process.pid} (sleep), which descends from process {os.getpid()},"
        assert f"{below} is under lease {lease.id} already" in said
    await until(lambda: _over(client, lease.id), "the lease to be freed with its process")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--vram", "30MiB"], 2, "say which device the 30MiB are of: --device, one of sim0, sim1"),
        ([], 2, "uses no memory of a GPU as far as the drivers tell"),
        (["--vram", "200MiB", "--device", "sim0"], 77, "200MiB"),
        (["--vram", "10MiB", "--device", "gpu9"], 77, "gpu9"),
    ],
)
def test_what_cannot_be_adopted(ledger: LedgerUnderTest, arguments: list[str], code: int, words: str) -> None:
    with sleeper() as process:
        assert words in gpuboss(ledger, "adopt", "--pid", str(process.pid), *arguments, code=code)


def test_the_ledgers_own_processes_are_not_adopted(ledger: LedgerUnderTest) -> None:
    keeper = ledger.keeper_pid
    assert keeper is not None
    store = json.loads((ledger.state.root / "store.pid").read_text())["pid"]
    for pid in (keeper, store):
        words = ["adopt", "--pid", str(pid), "--vram", "10MiB", "--device", "sim0"]
        assert f"process {pid} is the ledger's own" in gpuboss(ledger, *words, code=77)


async def test_a_process_may_be_called_anything(ledger: LedgerUnderTest, client: Client) -> None:
    words = "import pathlib, time; pathlib.Path('/proc/self/comm').write_text('a\\nb\\x1b[31m'); time.sleep(600)"
    with sleeper(sys.executable, "-c", words) as process:
        wait_until(lambda: processes.name_of(process.pid) == "a\nb\x1b[31m", "its name")
        adopt = ["adopt", "--pid", str(process.pid), "--vram", "30MiB", "--device", "sim0"]
        said = await asyncio.to_thread(gpuboss, ledger, *adopt)
        assert said.startswith("service:a?b?[31m has 30MiB of sim0")
        (lease,) = (await client.snapshot()).leases
        said = await asyncio.to_thread(lambda: gpuboss(ledger, "release", lease.id, "--force", code=77))
        assert r"write_text('a\nb\x1b[31m')" in said
    await until(lambda: _over(client, lease.id), "the lease to be freed with its process")


async def test_a_question_shows_what_would_be_ended_as_it_is(ledger: LedgerUnderTest, client: Client) -> None:
    with sleeper("sh", "-c", "sleep 600 # \x1b[2K\rinnocent") as process:
        adopt = ["adopt", "--pid", str(process.pid), "--vram", "30MiB", "--device", "sim0", "--name", "mean"]
        await asyncio.to_thread(gpuboss, ledger, *adopt)
        said = await asyncio.to_thread(lambda: gpuboss(ledger, "release", "mean", "--force", code=77))
    assert r"sh -c sleep 600 # \x1b[2K\rinnocent" in said
    await until(lambda: _is_empty(client), "the lease to be freed with its process")


async def _is_empty(client: Client) -> bool:
    return not (await client.snapshot()).leases


def test_a_process_that_is_not_there_is_not_adopted(ledger: LedgerUnderTest) -> None:
    with sleeper() as process:
        pass
    assert "no process" in gpuboss(ledger, "adopt", "--pid", str(process.pid), code=1)


async def test_a_full_device_is_no_hindrance_to_wait_in_vain(ledger: LedgerUnderTest, client: Client) -> None:
    held = await client.acquire(ask(90 * MIB))
    with sleeper() as process:
        words = ["adopt", "--pid", str(process.pid), "--vram", "30MiB", "--device", "sim0"]
        said = await asyncio.to_thread(lambda: gpuboss(ledger, *words, code=75))
    assert "30MiB of sim0 wanted" in said
    assert "sim0 has 10MiB free; held by job:test 90MiB" in said
    assert [lease.id for lease in (await client.snapshot()).leases] == [held.id]
    await client.release(held)


async def test_an_adopted_process_is_not_asked_for_it_would_not_hear(ledger: LedgerUnderTest, client: Client) -> None:
    with sleeper() as process:
        words = ["--vram", "30MiB", "--device", "sim0", "--name", "comfyui", "--json"]
        adopted = json.loads(await asyncio.to_thread(gpuboss, ledger, "adopt", "--pid", str(process.pid), *words))
        assert adopted["pid"] == process.pid
        said = await asyncio.to_thread(lambda: gpuboss(ledger, "release", "comfyui", code=77))
        assert "service:comfyui is adopted: an adopted process cannot be asked to yield; --force ends it" in said
        (lease,) = (await client.snapshot()).leases
        assert (lease.id, lease.notice) == (adopted["id"], None), "nothing has changed"
        assert process.poll() is None
        await asyncio.to_thread(gpuboss, ledger, "release", "comfyui", "--force", "--yes")
        assert process.wait(10) == -signal.SIGTERM
    assert await _over(client, lease.id)


async def test_a_service_that_asked_for_itself_is_asked(ledger: LedgerUnderTest, client: Client) -> None:
    held = await client.acquire(replace(ask(holder="service:detector"), kind=HolderKind.SERVICE))
    held = await client.activate(held)
    said = await asyncio.to_thread(gpuboss, ledger, "release", "detector")
    assert "service:detector is asked to give back" in said
    await client.release(held)


async def test_a_lease_held_by_word_has_no_process(ledger: LedgerUnderTest, client: Client) -> None:
    held = await client.activate(await client.acquire(replace(ask(), ttl_s=60.0)), by_word=True)
    (shown,) = await asyncio.to_thread(leases, ledger)
    assert shown["pid"] is None
    row = (await asyncio.to_thread(gpuboss, ledger, "ps")).splitlines()[1].split()
    assert row[5] == "-"
    await client.release(held)


# -- release ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(ledger: LedgerUnderTest, client: Client) -> Iterator[Run]:
    """A `gpuboss run` that has all of sim0 and ends at SIGTERM."""
    with runs(ledger) as make:
        one: Run = make("--vram", "100MiB", "--device", "sim0", "--name", "sft-12")
        assert one.told
        yield one


def test_a_holder_is_asked_to_yield(ledger: LedgerUnderTest, run: Run) -> None:
    said = gpuboss(ledger, "release", "job:sft-12")
    assert "job:sft-12 is asked to give back 100MiB of sim0 within 30 s" in said
    assert f"`gpuboss release {run.lease} --force` ends it" in said
    code, said = run.wait()
    assert code == 79
    assert "(gpuboss release) wants this memory back in 30 s" in said
    assert "SIGTERM" in [name for _, name in run.heard()]
    wait_until(lambda: not leases(ledger), "the lease to be given back")


def test_a_person_may_shorten_the_grace(ledger: LedgerUnderTest, run: Run) -> None:
    gpuboss(ledger, "release", run.lease[:8], "--grace", "500ms")
    code, said = run.wait()
    assert code == 79
    assert "SIGKILL in 0 s" in said or "SIGKILL in 1 s" in said


def test_the_commands_own_grace_is_also_for_a_person(ledger: LedgerUnderTest) -> None:
    """Also of one that is not pre-emptible by waiters: --grace means something without --preemptible."""
    with runs(ledger) as make:
        one: Run = make("--vram", "100MiB", "--device", "sim0", "--name", "sft-12", "--grace", "7s")
        assert one.told
        assert "within 7 s" in gpuboss(ledger, "release", "sft-12")
        assert "SIGKILL in 7 s" in one.wait()[1]


def test_a_second_request_may_shorten_the_grace_of_the_first(ledger: LedgerUnderTest) -> None:
    with runs(ledger) as make:
        one: Run = make("--vram", "100MiB", "--device", "sim0", "--name", "sft-12", ends=[])
        assert one.told
        gpuboss(ledger, "release", "job:sft-12")
        one.wait_heard("SIGTERM")
        gpuboss(ledger, "release", "job:sft-12", "--grace", "100ms")
        assert one.wait(15)[0] == 79


def test_force_asks_first(ledger: LedgerUnderTest, run: Run) -> None:
    assert "nothing is ended without confirmation" in gpuboss(ledger, "release", run.lease, "--force", code=77)
    assert not gone(run.told["pid"])
    with screen([*GPUBOSS, "release", run.lease, "--force"], environment(ledger), ROOT) as one:
        one.wait_for("[y/N] ")
        one.type("n\n")
        assert one.ended() == 77
    assert not gone(run.told["pid"])
    with screen([*GPUBOSS, "release", run.lease, "--force", "--grace", "200ms"], environment(ledger), ROOT) as one:
        one.wait_for(str(run.told["pid"]))
        one.wait_for("[y/N] ")
        one.type("y\n")
        one.wait_for("job:sft-12 is ended and its memory given back")
        assert one.ended() == 0
    assert gone(run.told["pid"])
    assert not leases(ledger)
    run.wait()


async def test_a_waiter_is_taken_out_of_the_queue(ledger: LedgerUnderTest, client: Client) -> None:
    held, queued = await client.acquire(ask()), await client.acquire(ask(holder="job:late"))
    said = await asyncio.to_thread(gpuboss, ledger, "release", queued.id)
    assert said == "job:late waits no more\n"
    assert [lease.id for lease in (await client.snapshot()).leases] == [held.id]
    await client.release(held)


async def test_a_lease_must_be_named_well(ledger: LedgerUnderTest, client: Client) -> None:
    first, second = await client.acquire(ask(10 * MIB)), await client.acquire(ask(10 * MIB))
    said = await asyncio.to_thread(lambda: gpuboss(ledger, "release", "job:test", code=1))
    assert f"{first.id[:12]} (job:test)" in said
    assert f"{second.id[:12]} (job:test)" in said
    said = await asyncio.to_thread(lambda: gpuboss(ledger, "release", "nothing", code=1))
    assert "there is no lease 'nothing'" in said
    said = await asyncio.to_thread(lambda: gpuboss(ledger, "release", "test", code=1))
    assert "'test' may be any of" in said, "a name without its kind, if it is only one's"
    await asyncio.to_thread(lambda: gpuboss(ledger, "release", "", code=2))
    assert all(lease.notice is None for lease in (await client.snapshot()).leases)


# -- node, doctor, events --------------------------------------------------------------------------------------------


async def test_node_shows_the_keeper_and_its_rows(ledger: LedgerUnderTest, run: Run) -> None:
    shown: dict[str, Any] = json.loads(await asyncio.to_thread(gpuboss, ledger, "node", "--json"))
    assert (shown["keeper_pid"], shown["state_dir"]) == (ledger.keeper_pid, str(ledger.state.root))
    assert shown["private_store"] is True
    assert shown["warnings"] == []
    (row,) = shown["rows"]
    assert (row["lease"], row["pid"], row["alive"]) == (run.lease, run.process.pid, "alive")
    assert row["command_pid"] == run.told["pid"]
    text = await asyncio.to_thread(gpuboss, ledger, "node")
    assert f"keeper    process {ledger.keeper_pid}" in text
    assert "job:sft-12" in text


def test_the_doctor_finds_a_good_ledger_well(ledger: LedgerUnderTest) -> None:
    shown = json.loads(gpuboss(ledger, "doctor", "--json"))
    assert shown["ok"] is True
    checks = [finding["check"] for finding in shown["findings"]]
    assert {"program", "settings", "state", "permissions", "server", "keeper", "store", "persistence", "devices"} <= {
        *checks
    }
    assert "all is well" in gpuboss(ledger, "doctor")


def test_the_doctor_names_a_remedy_for_what_is_broken(ledger: LedgerUnderTest) -> None:
    said = gpuboss(ledger, "doctor", code=1, GPUBOSS_DEVICES="sim0=lots")
    assert "correct or unset GPUBOSS_DEVICES" in said
    said = gpuboss(ledger, "doctor", code=1, GPUBOSS_DEVICES="sim7=1GiB")
    assert "in use with sim0=100MiB" in said, "the keeper refuses other devices than it has"
    said = gpuboss(ledger, "doctor", code=1, GPUBOSS_STATE_DIR="/proc/nowhere")
    assert "GPUBOSS_STATE_DIR" in said
    path = ledger.state.log_dir / "keeper.log"
    path.chmod(0o666)
    assert f"chmod o-w {path}" in gpuboss(ledger, "doctor", code=1)


async def test_the_doctor_counts_the_holders(ledger: LedgerUnderTest, run: Run) -> None:
    assert "1 holders in the node ledger" in await asyncio.to_thread(gpuboss, ledger, "doctor")


async def test_events_come_as_they_happen(ledger: LedgerUnderTest, client: Client) -> None:
    follower = _follow(ledger)
    assert follower.stdout is not None
    reading = asyncio.create_task(asyncio.to_thread(_read_until, follower.stdout, "freed"))
    try:

        async def happens() -> bool:
            await client.release(await client.acquire(ask(holder="job:seen")))
            return reading.done()

        await until(happens, "the follower to hear of a lease from its beginning to its end")
        heard = [event["what"] for event in await reading]
        assert heard[-2:] == ["granted", "freed"]
    finally:
        follower.send_signal(signal.SIGINT)
        code = await asyncio.to_thread(follower.wait, 20)
        follower.stdout.close()
    assert code == 130


def _follow(ledger: LedgerUnderTest) -> subprocess.Popen[str]:
    words = [*GPUBOSS, "events", "--json"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment(ledger))


def _read_until(lines: TextIO, what: str) -> list[dict[str, Any]]:
    """Events up to the first of this kind that has one before it."""
    found: list[dict[str, Any]] = []
    for line in lines:
        found.append(json.loads(line))
        assert found[-1]["holder"] in ("job:seen", "")
        if len(found) > 1 and found[-1]["what"] == what:
            break
    return found


def test_a_closed_pipe_is_no_error(ledger: LedgerUnderTest) -> None:
    words = f"{' '.join(GPUBOSS)} ps --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", words], capture_output=True, text=True, cwd=ROOT, env=environment(ledger), check=True
    )
    assert done.stdout.strip() in ("0", "141"), done
    assert done.stderr == ""
