"""The life of one `gpuboss run`: wait for the lease, let the command go, pass on what concerns it, end it in full.

Called by `gpuboss.cli.run`; calls `asking` (the lease), `child` (the command's processes), `job_control` (signals and
the terminal), `leftovers` and `progress`.

1. While we wait, INT, TERM, HUP and QUIT give up; afterwards they are the command's.
2. The node's books name the command's process before it may run, so that the keeper ends it if we are killed.
3. At a notice the command's first process gets the signal chosen for that, and all of it SIGKILL when the grace is
   over. Then the exit code is 79, whatever the command's own: a loop is to run it again.
4. When its first process has ended, whatever it left is ended, and only then is the lease given back. What survives
   SIGKILL keeps the lease's row, and the keeper goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from gpuboss import errors
from gpuboss.cli import words
from gpuboss.cli.asking import obtain, refuse_what_never_fits, tell_of_host_memory
from gpuboss.cli.child import Child, Ended
from gpuboss.cli.exits import Exit, exit_of_signal
from gpuboss.cli.job_control import JobControl
from gpuboss.cli.leftovers import end_leftovers, kill_all
from gpuboss.cli.order import Order
from gpuboss.cli.progress import Progress
from gpuboss.cli.terminal import Terminal
from gpuboss.client import Client
from gpuboss.holding import visible_devices
from gpuboss.leases import Lease
from gpuboss.node_ledger import NodeLedger
from gpuboss.processes import LEASE_VARIABLE

__all__ = ["Supervisor"]

_GIVE_UP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LOST_GRACE_S = 5.0
"""What a command may take to end whose lease is over already."""
_REST_GRACE_S = 5.0
"""What the command left behind may take to end by itself."""


class Supervisor:
    """One run. The child and the terminal are its own from here on."""

    def __init__(self, order: Order, child: Child, terminal: Terminal | None, progress: Progress) -> None:
        self._order = order
        self._child = child
        self._terminal = terminal
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self.interrupt: bool | None = None
        """See `JobControl.interrupt`; set at the end."""
        self._lease_id = ""
        """Of the lease that we have; empty while we wait for it."""
        self._given_up: int | None = None
        """The exit code of a wait that was given up."""
        self._asked_back = False
        self._killed = False
        self._kill_at_s = float("inf")
        """Monotonic: when the grace after a notice is over."""
        self._yielding: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """All of it; the exit code. Raises the GpubossError for which there is no lease."""
        waiting = asyncio.current_task()
        assert waiting is not None
        for number in _GIVE_UP:
            self._listen(number, waiting)
        self._loop.add_signal_handler(signal.SIGCHLD, self._look_while_waiting, waiting)
        try:
            self._look_while_waiting(waiting)
            name = f"gpuboss run {self._order.wish.holder}"
            async with await Client.connect(self._order.settings, name=name, has_loop=True) as client:
                refuse_what_never_fits(client, self._order.wish)
                if self._order.settings.devices is None:
                    tell_of_host_memory(client, self._order.wish, self._progress)
                lease = await obtain(client, self._order.wish, self._progress)
                return await self._serve(client, lease)
        except asyncio.CancelledError:
            if self._given_up is None:
                raise
            return self._given_up
        finally:
            self._progress.clear()
            self._child.abandon()
            if self._terminal is not None:
                self._terminal.close()

    # -- 1 -------------------------------------------------------------------------------------------------------------

    def _listen(self, number: signal.Signals, waiting: asyncio.Task[Any]) -> None:
        if signal.getsignal(number) is not signal.SIG_IGN:  # so that nohup and background jobs of scripts stay as told
            self._loop.add_signal_handler(number, self._hear_while_waiting, number, waiting)

    def _hear_while_waiting(self, number: signal.Signals, waiting: asyncio.Task[Any]) -> None:
        if self._lease_id:  # it came when the wait was just over
            self._child.signal(number)
            return
        if number is signal.SIGINT and self._terminal is not None and self._terminal.is_ours:
            self.interrupt = False
        self._give_up(exit_of_signal(number), waiting)

    def _look_while_waiting(self, waiting: asyncio.Task[Any]) -> None:
        """Somebody killed the command before it began."""
        seen = self._child.look()
        if isinstance(seen, Ended) and not self._lease_id:
            self._give_up(seen.exit_code, waiting)

    def _give_up(self, code: int, waiting: asyncio.Task[Any]) -> None:
        if self._given_up is None:
            self._given_up = code
            waiting.cancel()

    # -- 2 -------------------------------------------------------------------------------------------------------------

    async def _serve(self, client: Client, lease: Lease) -> int:
        """Run the command under the lease, and give the lease back."""
        self._lease_id = lease.id
        try:
            self._name_in_books(client, lease)
        except BaseException:
            await client.release(lease)
            raise
        job = JobControl(self._loop, self._child, self._terminal)
        client.on_notice(lease, lambda told: self._on_notice(client, told))
        client.on_lost(lease, self._on_lost)
        held = [device for device in client.devices if device.id in lease.shares]
        environment = {**visible_devices(held), LEASE_VARIABLE: lease.id}
        job.start(environment, _open_files(client.state.holders_dir / lease.id))
        ended = await job.ended()
        await self._end(client, lease, job)
        if self._asked_back:
            return Exit.ASKED_BACK
        self.interrupt = job.interrupt()
        return ended.exit_code

    def _name_in_books(self, client: Client, lease: Lease) -> None:
        with contextlib.suppress(ProcessLookupError):  # it was killed, as we shall see
            process = self._child.identity()
            with NodeLedger(client.state.ledger_path) as books:
                books.set_engine(lease.id, process.pid, process.start_ticks)

    # -- 3 -------------------------------------------------------------------------------------------------------------

    def _on_notice(self, client: Client, lease: Lease) -> None:
        if lease.notice is None or self._child.has_ended:  # what we have begun to yield is not taken back
            return
        left_s = max(0.0, lease.notice.left_s)
        if self._asked_back:  # somebody more important
            self._kill_in(left_s)
            return
        self._yielding = self._loop.create_task(self._follow_grace(client, lease), name="gpuboss-grace")
        self._yield(words.notice(lease.notice), self._order.preempt_signal, left_s)

    def _on_lost(self, lease: Lease) -> None:
        if self._child.has_ended:
            return
        self._yield(f"lease {words.short_id(lease.id)} is over", signal.SIGTERM, _LOST_GRACE_S)

    def _yield(self, why: str, number: int, grace_s: float) -> None:
        self._asked_back = True
        name = signal.Signals(number).name
        self._child.signal_leader(number)
        self._child.signal(signal.SIGCONT)  # one that is suspended would not hear it
        self._kill_in(grace_s)
        self._progress.say(f"{why}: the command gets {name}, and SIGKILL in {grace_s:.0f} s")

    def _kill_in(self, grace_s: float) -> None:
        """Kill the command then, unless it is to be killed before."""
        at_s = time.monotonic() + grace_s
        if at_s < self._kill_at_s:
            self._kill_at_s = at_s
            self._loop.call_later(grace_s, self._kill)

    def _kill(self) -> None:
        if self._killed or self._child.has_ended:  # what it left is being ended
            return
        self._killed = True
        kill_all(self._child, self._lease_id)
        self._progress.say("the grace is over: the command is killed")

    async def _follow_grace(self, client: Client, lease: Lease) -> None:
        """Say that we heard the notice, and see whether whoever gave it shortens the grace; until cancelled."""
        with contextlib.suppress(errors.GpubossError):  # it stands, whether or not that is known
            await client.ack(lease)
        while True:
            await asyncio.sleep(client.timings.tick_s)
            with contextlib.suppress(errors.GpubossError):
                now = await client.find(lease.id)
                if now is not None and now.notice is not None:
                    self._kill_in(max(0.0, now.notice.left_s))

    # -- 4 -------------------------------------------------------------------------------------------------------------

    async def _end(self, client: Client, lease: Lease, job: JobControl) -> None:
        """End what the command left, then give the lease back."""
        number, grace_s = int(signal.SIGTERM), _REST_GRACE_S
        if self._asked_back:
            number, grace_s = self._order.preempt_signal, max(0.0, self._kill_at_s - time.monotonic())
        left = await end_leftovers(self._child, lease.id, number, grace_s=grace_s, hurry=job.hurry)
        if self._yielding is not None:
            self._yielding.cancel()
            await asyncio.gather(self._yielding, return_exceptions=True)
        if left:
            pids = ", ".join(map(str, sorted(left)))
            self._progress.insist(f"processes {pids} survive SIGKILL; their memory stays leased until they are gone")
            return
        self._child.collect()
        try:
            await client.release(lease)
        except errors.GpubossError as error:  # the command has ended as it did, and the keeper sees us end
            self._progress.say(f"the keeper gives the lease back: {error.message}")


def _open_files(path: Path) -> list[int]:
    """Our open descriptors of a file, if it is there: the lease's lock, which the library keeps open."""
    try:
        wanted = path.stat()
        return [
            int(name)
            for name in os.listdir("/dev/fd")  # noqa: PTH208 (numbers, not paths)
            if _is_file(int(name), wanted)
        ]
    except OSError:
        return []


def _is_file(handle: int, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), wanted)
    except OSError:  # the listing's own, closed by now
        return False
