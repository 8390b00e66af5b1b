"""`gpuboss run` on a terminal: Ctrl-C, Ctrl-Z, the keyboard, pipelines and loops are as if it were not there."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

import pytest

from gpuboss.client import Client
from tests.integration.gpuboss.cli_kit import GPUBOSS, environment
from tests.integration.gpuboss.keeper_harness import ROOT, LedgerUnderTest, ask
from tests.integration.gpuboss.terminals import Screen, screen
from tests.support import until, wait_until

RUN = [*GPUBOSS, "run", "--vram", "10MiB", "--"]
LINE = " ".join(RUN)
SHELL = ["bash", "--norc", "--noprofile", "-i"]
"""The commands under it end in `exec`: a dash that is about to fork loses a Ctrl-C now and then, gpuboss or not."""

pytestmark = pytest.mark.usefixtures("client")


class Show(Protocol):
    def __call__(self, words: list[str]) -> Screen: ...


@pytest.fixture
async def client(ledger: LedgerUnderTest) -> AsyncIterator[Client]:
    """Keeps a keeper with quick timings alive."""
    async with await Client.connect(ledger.settings, name="test") as connected:
        yield connected


@pytest.fixture
def show(ledger: LedgerUnderTest) -> Iterator[Show]:
    shown: list[Screen] = []

    def make(words: list[str]) -> Screen:
        shown.append(Screen(words, environment(ledger), ROOT))
        return shown[-1]

    yield make
    for one in shown:
        one.close()


async def _nobody(client: Client) -> bool:
    return not (await client.snapshot()).leases


async def test_the_command_has_the_keyboard_and_the_foreground(client: Client, show: Show) -> None:
    program = "import os; print('front', os.tcgetpgrp(0) == os.getpgrp()); print('got', input())"
    one = show([*RUN, sys.executable, "-c", program])
    one.wait_for("front True")
    one.type("word\n")
    one.wait_for("got word")
    assert one.ended() == 0
    await until(lambda: _nobody(client), "the lease to be given back")


async def test_ctrl_c_ends_the_command_and_then_us(client: Client, show: Show) -> None:
    one = show([*RUN, "sh", "-c", "echo began; exec sleep 100"])
    one.wait_for("began")
    one.type("\x03")
    assert one.ended() == -signal.SIGINT, "as the command: a shell shows 130, and ends its loop"
    await until(lambda: _nobody(client), "the lease to be given back")


def test_ctrl_c_hastens_the_end_of_what_the_command_left(show: Show) -> None:
    one = show([*RUN, "sh", "-c", "setsid sh -c 'trap \"\" TERM; echo began; sleep 60; true' & read word"])
    one.wait_for("began")
    one.type("word\n")
    ended_s = time.monotonic()
    with pytest.raises(AssertionError, match="in vain"):
        one.ended(timeout_s=0.5)
    one.type("\x03")
    assert one.ended() == 0
    assert time.monotonic() - ended_s < 5.0, "as long as it would have had"


def test_a_command_may_take_ctrl_c_for_itself(show: Show) -> None:
    one = show([*RUN, "sh", "-c", "trap 'echo heard; exit 9' INT; echo began; while :; do sleep 0.05; done"])
    one.wait_for("began")
    one.type("\x03")
    one.wait_for("heard")
    assert one.ended() == 9


def test_suspended_and_continued_by_a_shell(show: Show) -> None:
    one = show(SHELL)
    one.wait_for("$ ")
    one.type(f"{LINE} sh -c 'echo began; read word; echo got $word; read more; echo end $more'\n")
    one.wait_for("began\r\n")
    one.type("\x1a")
    one.wait_for("Stopped")
    one.wait_for("$ ")
    one.type("fg\n")
    one.type("here\n")
    one.wait_for("got here")
    one.type("\x1a")
    one.wait_for("Stopped")
    one.wait_for("$ ")
    one.type("bg\n")
    one.wait_for("$ ")
    one.wait_for("Stopped", nudge="\n")  # it wants the keyboard, which the shell has
    one.type("fg\n")
    one.type("there\n")
    one.wait_for("end there")
    one.wait_for("$ ")
    one.type("echo status $?\n")
    one.wait_for("status 0\r\n")


def test_ctrl_c_under_a_shell_is_130_and_the_shell_goes_on(show: Show) -> None:
    one = show(SHELL)
    one.wait_for("$ ")
    one.type(f"{LINE} sh -c 'echo began; exec sleep 100'\n")
    one.wait_for("began\r\n")
    one.type("\x03")
    one.wait_for("$ ")
    one.type("echo status $?\n")
    one.wait_for("status 130\r\n")


def test_ctrl_c_ends_a_scripts_loop_too(show: Show) -> None:
    script = f'for n in 1 2 3 4; do {LINE} sh -c "echo round $n; exec sleep 100"; done; echo the loop went on'
    one = show(["bash", "-c", script])
    one.wait_for("round 1")
    one.type("\x03")
    one.ended()
    assert "round 2" not in one.seen
    assert "went on" not in one.seen


def test_in_a_pipeline_the_keyboard_stays_with_who_reads_it(show: Show) -> None:
    """As in `gpuboss run -- x | less`."""
    one = show(SHELL)
    one.wait_for("$ ")
    reader = "print(input(), 'asks', flush=True); print('got', open('/dev/tty').readline())"
    one.type(f"{LINE} sh -c 'echo began; sleep 1' | {sys.executable} -c \"{reader}\"\n")
    one.wait_for("asks\r\n")
    one.type("key\n")
    one.wait_for("got key")
    one.wait_for("$ ")


def test_in_a_pipeline_the_command_gets_the_keyboard_when_it_asks(show: Show) -> None:
    one = show(SHELL)
    one.wait_for("$ ")
    one.type(f"{LINE} sh -c 'echo began; read word; echo got $word' | cat\n")
    one.wait_for("began\r\n")
    one.type("word\n")
    one.wait_for("got word")
    one.wait_for("$ ")


def test_ctrl_c_ends_a_pipeline(show: Show) -> None:
    one = show(SHELL)
    one.wait_for("$ ")
    one.type(f"{LINE} sh -c 'echo began; exec sleep 100' | cat\n")
    one.wait_for("began\r\n")
    one.type("\x03")
    one.wait_for("$ ")
    one.type("echo status ${PIPESTATUS[0]}\n")
    one.wait_for("status 130\r\n")


def test_a_background_job_leaves_the_keyboard_alone(show: Show) -> None:
    one = show(SHELL)
    one.wait_for("$ ")
    one.type(f"{LINE} sh -c 'echo began; sleep 0.5; echo done' &\n")
    one.wait_for("began\r\n")
    one.type("echo shell has the keyboard | tr a-z A-Z\n")
    one.wait_for("SHELL HAS THE KEYBOARD")
    one.wait_for("done\r\n")


async def test_the_wait_is_one_line_that_is_written_over(client: Client, show: Show) -> None:
    held = [await client.acquire(ask(device=device, holder=f"job:{device}")) for device in ("sim0", "sim1")]
    one = show([*RUN, "sh", "-c", "echo began"])
    why = "position 1 of 1; 10MiB of one of sim0, sim1 wanted, at most 0B free; held by job:sim0 100MiB"
    one.wait_for(f"\r\x1b[Kgpuboss: waiting: {why}")
    one.wait_for("\r\x1b[Kgpuboss: waiting")
    await client.release(held[0])
    shown = one.wait_for("began")
    assert "\r\x1b[Kgpuboss: job:sh has 10MiB of sim0" in shown
    assert one.ended() == 0
    await client.release(held[1])


async def test_ctrl_c_while_waiting_leaves_the_queue(client: Client, show: Show) -> None:
    held = [await client.acquire(ask(device=device)) for device in ("sim0", "sim1")]
    one = show([*RUN, "sh", "-c", "echo began"])
    one.wait_for("waiting")
    one.type("\x03")
    assert one.ended() == -signal.SIGINT, "so that a loop around it ends"
    assert {lease.id for lease in (await client.snapshot()).leases} == {lease.id for lease in held}
    for lease in held:
        await client.release(lease)


async def test_a_hang_up_ends_the_command(client: Client, ledger: LedgerUnderTest) -> None:
    with screen([*RUN, "sh", "-c", "echo began; exec sleep 100"], environment(ledger), ROOT) as one:
        one.wait_for("began")
        pid = one.process.pid
    wait_until(lambda: one.process.poll() is not None, f"process {pid} to end")
    await until(lambda: _nobody(client), "the lease to be given back")
