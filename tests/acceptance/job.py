"""A training job: another process that leases memory with the library, and holds it until it is told to end.

`python -m tests.acceptance.job STATE_DIR DEVICES VRAM PRIORITY [preemptible]`. Prints "held", and "notice" when it is
asked to yield; ends when its standard input does, and a preemptible one when it is asked to.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import gpuboss
from gpuboss.devices import parse_devices
from gpuboss.settings import LedgerSettings


class Job:
    """The process, from outside."""

    def __init__(self, state_dir: Path, devices: str, vram: str, priority: str = "normal", *more: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.acceptance.job", str(state_dir), devices, vram, priority, *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said: queue.Queue[tuple[str, float]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def heard(self, word: str, timeout_s: float = 30.0) -> float:
        """Wait until it says that; when it did, monotonic."""
        said, at_s = self._said.get(timeout=timeout_s)
        assert said == word, said
        return at_s

    @property
    def waits(self) -> bool:
        """It has said nothing more, and runs."""
        return self._said.empty() and self.process.poll() is None

    def end(self) -> float:
        """Have it give its lease back, and wait until it has; when that was, monotonic."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        at_s = self.heard("done")
        assert self.process.wait(20) == 0
        return at_s

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put((line.strip(), time.monotonic()))


def main() -> None:
    """Hold, say so, and wait."""
    state_dir, devices, vram, priority, *more = sys.argv[1:]
    settings = LedgerSettings(state_dir=Path(state_dir), devices=parse_devices(devices), reserve_bytes=0)
    over = threading.Event()

    def asked(notice: object) -> bool:
        print("notice", flush=True)
        over.set()
        return True

    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    with gpuboss.hold(
        vram, job="sft", priority=priority, preemptible="preemptible" in more, on_preempt=asked, settings=settings
    ):
        print("held", flush=True)
        over.wait()
    print("done", flush=True)


if __name__ == "__main__":
    main()
