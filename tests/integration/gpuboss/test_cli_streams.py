"""Commands whose streams are closed, full, or in ASCII, and that may open few files."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpuboss.client import Client
from tests.integration.gpuboss.cli_kit import GPUBOSS, environment
from tests.integration.gpuboss.keeper_harness import MIB, ROOT, LedgerUnderTest, ask
from tests.support import until

pytestmark = pytest.mark.usefixtures("client")
HALF = "run --vram 50MiB --device sim0"
FULL = "gpuboss: the output cannot be written: No space left on device\n"


@pytest.fixture
async def client(ledger: LedgerUnderTest) -> AsyncIterator[Client]:
    """Keeps a keeper with quick timings alive."""
    async with await Client.connect(ledger.settings, name="test") as connected:
        yield connected


def begin(ledger: LedgerUnderTest, line: str, before: str = "", **more: str) -> subprocess.Popen[str]:
    """`gpuboss` with a shell's redirections."""
    buffered = environment(ledger, **more)
    buffered.pop("PYTHONUNBUFFERED", None)  # then nothing would be left to be written at the end
    words = f"{before} exec {shlex.join(GPUBOSS)} {line}"
    return subprocess.Popen(
        ["bash", "-c", words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=buffered
    )


def done(ledger: LedgerUnderTest, line: str, before: str = "", **more: str) -> tuple[int, str, str]:
    process = begin(ledger, line, before, **more)
    out, error = process.communicate(timeout=60)
    return process.returncode, out, error


@pytest.mark.parametrize("command", ["ps", "devices", "doctor", "top --once"])
def test_who_closes_the_output_wants_none(ledger: LedgerUnderTest, command: str) -> None:
    assert done(ledger, f"{command} >&-") == (0, "", "")


@pytest.mark.parametrize(
    "command", ["ps", "ps --json", "devices", "node", "doctor", "top --once", "completion bash", "--version", "--help"]
)
def test_output_that_cannot_be_written_is_an_error_of_its_own(ledger: LedgerUnderTest, command: str) -> None:
    assert done(ledger, f"{command} >/dev/full") == (71, "", FULL)


@pytest.mark.parametrize("errors", ["2>&-", "2>/dev/full", "2>&- <&- >&-"])
def test_errors_that_nobody_can_read_change_no_exit_code(ledger: LedgerUnderTest, errors: str) -> None:
    assert done(ledger, f"run --vram 1GiB {errors} -- true") == (77, "", "")
    assert done(ledger, f"run --nonsense {errors}") == (2, "", "")
    assert done(ledger, f"{HALF} {errors} -- no-such-command-anywhere") == (127, "", "")
    assert done(ledger, f"{HALF} {errors} -- sh -c 'exit 3'") == (3, "", "")


@pytest.mark.parametrize("errors", ["2>&-", "2>/dev/full"])
async def test_who_cannot_be_told_waits_and_yields_all_the_same(
    ledger: LedgerUnderTest, client: Client, tmp_dir: Path, errors: str
) -> None:
    held = await client.acquire(ask(100 * MIB))
    note = tmp_dir / "noted"
    command = f"trap 'touch {note}.heard; exit 0' TERM; touch {note}; while :; do sleep 0.05; done"
    run = begin(ledger, f"{HALF} --preemptible --grace 20s {errors} -- sh -c {shlex.quote(command)}")
    await until(lambda: _has_waited(client), "it to be told why it waits")
    await client.release(held)
    await until(note.exists, "the command to run")
    await client.acquire(ask(100 * MIB, priority=1))
    assert await asyncio.to_thread(run.wait, 15) == 79, "before its grace is over"
    assert note.with_name("noted.heard").exists(), "it was told before it was ended"
    assert run.communicate() == ("", "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_the_commands_streams_are_never_files_of_ours(ledger: LedgerUnderTest, tmp_dir: Path, closed: str) -> None:
    note = tmp_dir / "noted"
    words = (
        "import os, sys; open(sys.argv[1], 'w').write(' '.join(os.readlink(f'/proc/self/fd/{n}') for n in range(3)))"
    )
    command = shlex.join([sys.executable, "-c", words, str(note)])
    assert done(ledger, f"{HALF} {closed} -- {command}")[0] == 0
    links = note.read_text().split()
    for number, sign in enumerate(("<&-", ">&-", "2>&-")):
        if sign in closed.split():
            assert links[number] == "/dev/null", links
    assert not any("holders" in link for link in links)


def test_too_few_files_are_told(ledger: LedgerUnderTest) -> None:
    code, _, said = done(ledger, f"{HALF} -- true", before="ulimit -n 8;")
    assert (code, said) == (71, "gpuboss: too many open files: this process may have 8; raise that with ulimit -n\n")


async def test_a_name_that_the_output_cannot_spell_hides_no_other(ledger: LedgerUnderTest, client: Client) -> None:
    held = [await client.acquire(ask(10 * MIB, holder=name)) for name in ("job:日本", "job:other")]
    for command in ("ps", "top --once"):
        code, out, said = await asyncio.to_thread(
            lambda command=command: done(ledger, command, PYTHONIOENCODING="ascii")
        )
        assert (code, said) == (0, "")
        assert "job:??" in out
        assert "job:other" in out
    for lease in held:
        await client.release(lease)


async def _has_waited(client: Client) -> bool:
    """Whether somebody has waited for so long that he would be told of it."""
    ages = [time.time() - lease.since_ms / 1000 for lease in (await client.snapshot()).leases if lease.position]
    return max(ages, default=0) > 1
