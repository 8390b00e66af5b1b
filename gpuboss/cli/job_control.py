"""Stands between the terminal, whoever signals us, and the command: each sees the other as if we were not there.

Used by `gpuboss.cli.supervise` from the start of the command to its end; calls `child` and `terminal`.

1. Signals that a terminal sends (INT, QUIT, HUP, WINCH) are passed to the command's whole group, others (TERM, USR1,
   USR2) to its first process alone, as if they had been sent there. What was ignored when we began (nohup, background
   jobs of scripts) the command ignores too, for it was forked before.
2. Where standard input and output are the terminal, the command gets the foreground at its start. As part of a pipeline
   it gets it when it asks (SIGTTIN, SIGTTOU), so that `gpuboss run -- x | less` leaves the keyboard to `less`.
3. A command that is suspended suspends us too (with those we share a group with, where the terminal told it alone),
   and goes on when we do.
4. Once the command's first process has ended, an impatient signal only hastens the end of what it left.
5. A command that died of Ctrl-C lets us die of it too, so that a shell's loop around us ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence

from gpuboss.cli.child import Child, Ended, Stopped
from gpuboss.cli.terminal import Terminal

__all__ = ["JobControl", "die_of_interrupt"]

_TO_GROUP = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGWINCH)
_TO_LEADER = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_SUSPENDING = (signal.SIGTSTP, signal.SIGCONT)
_IMPATIENT = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM})
_WANTS_TERMINAL = frozenset({signal.SIGTTIN, signal.SIGTTOU})
_STANDSTILL_S = 1.0
"""Before a command that waits for a terminal it cannot have tries again."""


class JobControl:
    """One command's dealings with signals and terminal. Every method runs in the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, child: Child, terminal: Terminal | None) -> None:
        self.hurry = asyncio.Event()
        """Set when somebody cannot wait for what the command left behind."""
        self._loop = loop
        self._child = child
        self._terminal = terminal
        self._ended: asyncio.Future[Ended] = loop.create_future()
        self._interrupted = False
        """Whether it was the terminal's Ctrl-C that the command died of."""
        self._interrupts_group = False
        """Whether our own group has not seen that Ctrl-C."""

    def start(self, environment: Mapping[str, str], handles: Sequence[int]) -> None:
        """Take over the signals, hand the terminal over, let the command go."""
        for number in (*_TO_GROUP, *_TO_LEADER):  # 1
            self._loop.add_signal_handler(number, self._hear, number)
        self._pass_on_suspending()
        self._loop.add_signal_handler(signal.SIGCHLD, self._look)
        if self._terminal is not None and os.isatty(0) and os.isatty(1):  # 2
            self._terminal.give(self._child.pid)
        self._child.start(environment, handles)
        self._look()  # it may have been killed before its end was listened for

    async def ended(self) -> Ended:
        """Return when the command's first process has ended."""
        return await asyncio.shield(self._ended)

    def interrupt(self) -> bool | None:
        """None: we are to exit as usual. Else the command died of Ctrl-C, and True: only it was told (5)."""
        return self._interrupts_group if self._interrupted else None

    # -- signals -------------------------------------------------------------------------------------------------------

    def _pass_on_suspending(self) -> None:
        for number in _SUSPENDING:
            self._loop.add_signal_handler(number, self._child.signal, number)

    def _hear(self, number: signal.Signals) -> None:
        if self._ended.done():  # 4
            if number in _IMPATIENT:
                self.hurry.set()
        elif number in _TO_GROUP:
            self._child.signal(number)
        else:
            self._child.signal_leader(number)

    # -- the command ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        try:
            match self._child.look():
                case Ended() as ended if not self._ended.done():
                    self._take_leave(ended)
                case Stopped() as stopped:
                    self._stopped(signal.Signals(stopped.signal))
        except OSError as error:  # whoever waits for the end must hear of it
            if not self._ended.done():
                self._ended.set_exception(error)

    def _take_leave(self, ended: Ended) -> None:
        if self._terminal is not None:
            had = self._terminal.is_given
            if ended.signal == signal.SIGINT and (had or self._terminal.is_ours):  # 5
                self._interrupted, self._interrupts_group = True, had
            self._terminal.take()
        self._ended.set_result(ended)

    def _stopped(self, number: signal.Signals) -> None:  # 3
        if number in _WANTS_TERMINAL:
            if self._terminal is not None and self._terminal.give(self._child.pid):  # 2
                self._child.signal(signal.SIGCONT)
                return
            self._suspend(group=True)
            # Where nobody can bring us to the foreground (orphaned), we come back here at once, and so would it.
            self._loop.call_later(_STANDSTILL_S, self._go_on, True)
        elif number is signal.SIGTSTP or (self._terminal is not None and self._terminal.is_given):
            self._go_on(self._suspend(group=self._terminal is not None and self._terminal.is_given))

    def _suspend(self, *, group: bool) -> bool:
        """Stop, as the command has; returns when we are continued. Whether the command had the terminal."""
        had = self._terminal is not None and self._terminal.is_given
        if self._terminal is not None:
            self._terminal.take()
        # CONT too: heard late, it would continue a command that has been suspended again meanwhile.
        for number in _SUSPENDING:
            self._loop.remove_signal_handler(number)
        # Those in our group, such as the script that called us, would have been told as well by the terminal.
        os.kill(0 if group else os.getpid(), signal.SIGTSTP)
        self._pass_on_suspending()
        return had

    def _go_on(self, wants_terminal: bool) -> None:
        if self._ended.done():
            return
        if wants_terminal and self._terminal is not None:
            self._terminal.give(self._child.pid)
        self._child.signal(signal.SIGCONT)


def die_of_interrupt(*, group: bool) -> None:
    """End this process, or its whole group, by SIGINT. Returns only where it is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(0 if group else os.getpid(), signal.SIGINT)
