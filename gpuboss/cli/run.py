"""`gpuboss run`: from the arguments to the exit code.

Called by the package's `main`. The command is forked here, before the event loop and the store's library are loaded;
`supervise.py` does the rest.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Sequence

from gpuboss.cli.child import Child
from gpuboss.cli.exits import Exit
from gpuboss.cli.speech import complain, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from gpuboss.cli.order import Order

__all__ = ["job_name", "run"]

_LONGEST_NAME = 100
_INTERPRETERS = ("python", "pypy", "sh", "bash", "torchrun", "accelerate", "uv", "env")


def run(told: argparse.Namespace) -> int:
    """Run a command under a lease; its exit code, or ours."""
    if problem := _cannot_run(told.command[0]):
        return problem
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody is told of a child's end
    child = Child.fork(told.command)
    try:
        return _supervise(told, child)
    finally:
        child.abandon()


def job_name(command: Sequence[str]) -> str:
    """A name for a job whose author gave none: its script or module, else its program."""
    name = os.path.basename(command[0])  # noqa: PTH119 (text, not a path to follow)
    if name.startswith(_INTERPRETERS):
        for before, word in itertools.pairwise(command):
            if before == "-m":
                name = word
                break
            if word.endswith((".py", ".sh")) and not word.startswith("-"):
                name = os.path.basename(word).rpartition(".")[0]  # noqa: PTH119
                break
    return printable(name)[:_LONGEST_NAME] or "command"


def _supervise(told: argparse.Namespace, child: Child) -> int:
    import asyncio
    import logging

    from gpuboss.cli.job_control import die_of_interrupt
    from gpuboss.cli.progress import Progress
    from gpuboss.cli.supervise import Supervisor
    from gpuboss.cli.terminal import Terminal
    from gpuboss.processes import LEASE_VARIABLE

    terminal = Terminal.open()
    progress = Progress(quiet=told.quiet, in_foreground=lambda: terminal is None or terminal.is_ours)
    logging.basicConfig(handlers=[progress], level=logging.WARNING)
    if outer := os.environ.get(LEASE_VARIABLE):
        progress.say(f"this runs under lease {outer[:12]} already; the new lease is held besides it")
    order = _order(told)

    async def main() -> tuple[int, bool | None]:
        supervisor = Supervisor(order, child, terminal, progress)
        return await supervisor.run(), supervisor.interrupt

    code, interrupt = asyncio.run(main())
    if interrupt is not None:
        die_of_interrupt(group=interrupt)
    return code


def _order(told: argparse.Namespace) -> Order:
    from gpuboss.cli.order import Order
    from gpuboss.cli.output import settings_of
    from gpuboss.leases import job_holder
    from gpuboss.taking import Wish

    wish = Wish(
        holder=job_holder(told.name or job_name(told.command)),
        vram_bytes=None if told.exclusive else told.vram,
        gpus=told.gpus,
        only=tuple(told.device) if told.device else None,
        priority=told.priority,
        preemptible=told.preemptible,
        grace_s=told.grace,
        wait_s=told.wait,
    )
    return Order(settings_of(told), wish, told.preempt_signal)


def _cannot_run(program: str) -> Exit | None:
    """Why there is no need to wait for memory: the command could not be executed anyway."""
    if shutil.which(program) is not None:
        return None
    there = os.sep in program and os.path.exists(program)  # noqa: PTH110 (as the shell looks at it)
    what = "cannot be executed" if there else "command not found"
    complain(f"{program}: {what}")
    return Exit.NOT_EXECUTABLE if there else Exit.NOT_FOUND
