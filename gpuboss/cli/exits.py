"""What the exit status of `gpuboss` means, and which error leads to which.

Used by every command of the package; `parser` prints those that a command may end with. The numbers are those of
sysexits(3) where it has one that fits; `gpuboss run` passes its command's own status on, and 128 + n for one that
signal n ended.
"""

from __future__ import annotations

import enum

from gpuboss import errors

__all__ = ["Exit", "exit_codes", "exit_of", "exit_of_signal"]


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
    SYSTEM = 71
    """The system refuses: the output cannot be written, there are too many open files (EX_OSERR)."""
    WAIT_OVER = 75
    """The memory was not there within --wait: try again later (EX_TEMPFAIL)."""
    REFUSED = 77
    """Refused: more than the devices can ever give, taken out of the queue by somebody, a process that cannot be asked
    or is leased already, or not confirmed (EX_NOPERM)."""
    CONFIG = 78
    """A setting must be changed first: state directory, devices or store (EX_CONFIG)."""
    ASKED_BACK = 79
    """The memory was asked back, and the command was ended for it, however it took that (not of sysexits)."""
    NOT_EXECUTABLE = 126
    """The command of `run` cannot be executed."""
    NOT_FOUND = 127
    """The command of `run` is not there."""


_LOOKING = ("devices", "ps", "top", "node", "events")
_WITH_LEDGER = ("run", "adopt", "release", *_LOOKING)
_OURS_ALONE = ("adopt", "release", *_LOOKING, "doctor", "completion")
_MEANINGS: tuple[tuple[Exit, tuple[str, ...], str], ...] = (
    (Exit.DONE, _OURS_ALONE, "done"),
    (Exit.DONE, ("run",), "the command's own exit code, or 128+n when signal n ended it"),
    (Exit.NOT_DONE, ("adopt",), "there is no such process"),
    (Exit.NOT_DONE, ("release",), "there is no such lease, or its holder does not end"),
    (Exit.NOT_DONE, ("doctor",), "something is broken"),
    (Exit.USAGE, ("run", *_OURS_ALONE), "wrong usage"),
    (Exit.UNAVAILABLE, _WITH_LEDGER, "the ledger cannot be reached now: its keeper or its store does not answer"),
    (Exit.SYSTEM, ("run", *_OURS_ALONE), "the system refuses: the output cannot be written, too many open files"),
    (Exit.WAIT_OVER, ("run", "adopt"), "the memory was not there within --wait; try again later"),
    (Exit.REFUSED, ("run",), "refused: more than the devices can ever give, or not in the queue any more"),
    (
        Exit.REFUSED,
        ("adopt",),
        "refused: more than the devices can ever give, under a lease already, or the ledger's own",
    ),
    (Exit.REFUSED, ("release",), "refused: not confirmed, or an adopted process, which cannot be asked to yield"),
    (Exit.CONFIG, _WITH_LEDGER, "a setting must be changed first; the message names it"),
    (Exit.ASKED_BACK, ("run",), "the memory was asked back, and the command ended for it (whatever its own exit code)"),
    (Exit.NOT_EXECUTABLE, ("run",), "the command cannot be executed"),
    (Exit.NOT_FOUND, ("run",), "there is no such command"),
)
"""Which code of which commands means what."""


def exit_codes(command: str | None = None) -> str:
    """The table for the help of one command, or of all."""
    lines, before = ["exit codes:"], None
    for code, commands, text in _MEANINGS:
        if command is None or command in commands:
            whose = f"{' and '.join(commands)}: " if command is None and len(commands) <= 2 else ""
            lines.append(f"  {'' if code is before else code:<5}{whose}{text}")
            before = code
    return "\n".join(lines) + "\n"


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
