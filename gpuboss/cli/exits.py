"""What the exit status of `gpuboss` means, and which error leads to which.

Used by every command of the package. The numbers are those of sysexits(3) where it has one that fits; `gpuboss run`
passes its command's own status on, and 128 + n for one that signal n ended.
"""

from __future__ import annotations

import enum

from gpuboss import errors

__all__ = ["EXIT_CODES", "Exit", "exit_of", "exit_of_signal"]


class Exit(enum.IntEnum):
    """The exit statuses that are ours."""

    DONE = 0
    """Done; for `run`: the command said so."""
    NOT_DONE = 1
    """The answer is no: the doctor found something broken, there is no such lease or process."""
    USAGE = 2
    """The command line is wrong."""
    UNAVAILABLE = 69
    """The ledger cannot be reached now: its keeper or its store does not answer (EX_UNAVAILABLE)."""
    WAIT_OVER = 75
    """The memory was not there within --wait: try again later (EX_TEMPFAIL)."""
    REFUSED = 77
    """Refused: more than the devices can ever give, or not confirmed (EX_NOPERM)."""
    CONFIG = 78
    """A setting must be changed first: state directory, devices or store (EX_CONFIG)."""
    ASKED_BACK = 79
    """The memory was asked back, and the command was ended for it, however it took that (not of sysexits)."""
    NOT_EXECUTABLE = 126
    """The command of `run` cannot be executed."""
    NOT_FOUND = 127
    """The command of `run` is not there."""


EXIT_CODES = """\
exit codes:
  0    done; `run`: the command's own exit code, or 128+n when signal n ended it
  1    the answer is no: something is broken (doctor), there is no such lease or process
  2    wrong usage
  69   the ledger cannot be reached now: its keeper or its store does not answer
  75   the memory was not there within --wait; try again later
  77   refused: more than the devices can ever give, or not confirmed
  78   a setting must be changed first; the message names it
  79   run: the memory was asked back, and the command was ended for it (whatever its own exit code was)
  126  run: the command cannot be executed
  127  run: there is no such command
"""

_BY_ERROR: dict[type[errors.GpubossError], Exit] = {
    errors.GpubossError: Exit.UNAVAILABLE,
    errors.StateDirError: Exit.CONFIG,
    errors.LockHeld: Exit.CONFIG,
    errors.LedgerConflict: Exit.CONFIG,
    errors.DeviceError: Exit.CONFIG,
    errors.StoreUnavailable: Exit.UNAVAILABLE,
    errors.StoreUnfit: Exit.CONFIG,
    errors.NoEpoch: Exit.UNAVAILABLE,
    errors.StaleFence: Exit.REFUSED,
    errors.LeaseRefused: Exit.REFUSED,
    errors.WaitExpired: Exit.WAIT_OVER,
    errors.ActivationRefused: Exit.WAIT_OVER,
    errors.LedgerBusy: Exit.UNAVAILABLE,
    errors.LedgerDamaged: Exit.UNAVAILABLE,
}


def exit_of(error: errors.GpubossError) -> Exit:
    """The exit status that says what kind of error it was."""
    return next(_BY_ERROR[kind] for kind in type(error).__mro__ if kind in _BY_ERROR)


def exit_of_signal(number: int) -> int:
    """As shells say it."""
    return 128 + number
