"""The command `gpuboss` as a process, against a ledger of the test's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration.gpuboss.keeper_harness import ROOT, LedgerUnderTest
from tests.support import wait_until

GPUBOSS = [sys.executable, "-m", "gpuboss.cli"]
DEVICES = "sim0=100MiB,sim1=100MiB"

COMMAND = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

box = Path(sys.argv[1])
options = json.loads(sys.argv[2])


def note(number, frame):
    with (box / "heard").open("a") as heard:
        heard.write(f"{os.getpid()} {signal.Signals(number).name}\\n")
    if number in ends:
        sys.exit(options.get("code", 0))


ends = [signal.Signals[name] for name in options.get("ends", ["SIGTERM"])]
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT"):
    signal.signal(signal.Signals[name], signal.SIG_IGN if name in options.get("ignored", []) else note)
child = None
if options.get("child"):
    # Ignores what it can, in a session of its own: nothing but the lease's name leads to it.
    words = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", words], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
told = {
    "pid": os.getpid(),
    "group": os.getpgrp(),
    "parent": os.getppid(),
    "child": child and child.pid,
    "env": dict(os.environ),
    "handles": [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()],
}
(box / "told.part").write_text(json.dumps(told))
(box / "told.part").rename(box / "told")
if options.get("exit") is not None:
    sys.exit(options["exit"])
while True:
    signal.pause()
"""
"""Notes its pid, environment and the signals it hears in a directory; ends with `code` at those of `ends`."""


class Run:
    """A `gpuboss run` of that command."""

    def __init__(self, ledger: LedgerUnderTest, box: Path, arguments: list[str], options: dict[str, Any]) -> None:
        box.mkdir()
        self._box = box
        words = [*GPUBOSS, "run", *arguments, "--", sys.executable, "-c", COMMAND, str(box), json.dumps(options)]
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(ledger),
            start_new_session=True,
        )

    @property
    def told(self) -> dict[str, Any]:
        """What the command said of itself, once it runs."""
        path = self._box / "told"
        wait_until(lambda: path.exists() or self.process.poll() is not None, "the command to run")
        assert path.exists(), self.process.communicate()
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    @property
    def began(self) -> bool:
        """Whether the command runs, or ran."""
        return (self._box / "told").exists()

    @property
    def lease(self) -> str:
        """Its id."""
        return str(self.told["env"]["GPUBOSS_LEASE"])

    def heard(self) -> list[tuple[int, str]]:
        """(pid, signal) as the command's processes noted them."""
        path = self._box / "heard"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(line.split()[0]), line.split()[1]) for line in lines]

    def wait_heard(self, name: str, count: int = 1) -> None:
        """Return when the command has noted the signal that often."""
        wait_until(lambda: [one for _, one in self.heard()].count(name) >= count, f"the command to hear {name}")

    def signal(self, number: int) -> None:
        """Send a signal to the wrapper."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 30.0) -> tuple[int, str]:
        """Exit code and what it said on standard error."""
        _, said = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, said

    def clean_up(self) -> None:
        """End it, and the command below it, however the test went."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=20)
        path = self._box / "told"
        if path.exists():
            told = json.loads(path.read_text())
            for pid in filter(None, (told["pid"], told["child"])):
                try:
                    if str(self._box).encode() in Path(f"/proc/{pid}/cmdline").read_bytes() or pid == told["child"]:
                        os.kill(pid, signal.SIGKILL)
                except (OSError, ProcessLookupError):
                    continue


def environment(ledger: LedgerUnderTest, **more: str) -> dict[str, str]:
    """Ours, with the test's ledger."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUBOSS_")}
    return kept | {"GPUBOSS_STATE_DIR": str(ledger.directory), "GPUBOSS_DEVICES": DEVICES} | more


def gpuboss(ledger: LedgerUnderTest, *arguments: str, code: int = 0, **more: str) -> str:
    """Run a command to its end; what it printed."""
    done = subprocess.run(
        [*GPUBOSS, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(ledger, **more),
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout if code == 0 else done.stdout + done.stderr


def leases(ledger: LedgerUnderTest) -> list[dict[str, Any]]:
    """`gpuboss ps --json`."""
    found: list[dict[str, Any]] = json.loads(gpuboss(ledger, "ps", "--json"))
    return found


@contextmanager
def runs(ledger: LedgerUnderTest) -> Iterator[Any]:
    """Makes `gpuboss run`s, and ends them afterwards."""
    started: list[Run] = []

    def make(*arguments: str, **options: Any) -> Run:
        run = Run(ledger, ledger.directory / f"box{len(started)}", list(arguments), options)
        started.append(run)
        return run

    try:
        yield make
    finally:
        for run in started:
            run.clean_up()
