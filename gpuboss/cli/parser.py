"""The command line of `gpuboss`: commands, options, and the help that explains them with examples.

Called by the package's `main`; `completion.py` reads the same parser. Nothing here imports what a command needs.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from gpuboss.cli.exits import Exit, exit_codes
from gpuboss.priority import CLASSES, NORMAL, OVER_PINNED, parse_priority
from gpuboss.units import parse_duration, parse_memory

__all__ = ["COMMANDS", "build", "own_version", "parse"]

T = TypeVar("T")
_LONGEST_NAME = 100

_ENVIRONMENT = """\
environment:
  GPUBOSS_STATE_DIR  where the ledger is kept (default: /var/lib/gpuboss where it exists, else ~/.local/state/gpuboss)
  GPUBOSS_DEVICES    devices to declare instead of those found, such as sim0=8GiB,sim1=24GiB
  GPUBOSS_URL        a Redis or Valkey that several hosts share (default: a private one on this host)
"""

_TOP_EXAMPLES = """\
examples:
  gpuboss run --vram 20GiB -- python train.py    wait for 20 GiB of a GPU, then train
  gpuboss run --exclusive --gpus 2 -- ./bench    two whole GPUs
  gpuboss ps                                     who holds memory, and who waits for it
  gpuboss top                                    the same, live
  gpuboss doctor                                 what is wrong, and what to do about it
  GPUBOSS_DEVICES=sim0=8GiB gpuboss devices      try it on devices that are only declared
"""

COMMANDS = {
    "run": "wait for device memory, run a command with it, and give it back",
    "devices": "devices of this host: size, leased, observed, used by others, free",
    "ps": "leases: holders and waiters, in queue order",
    "top": "devices and leases, live",
    "adopt": "give a running process a lease for the memory it uses",
    "release": "ask a holder to give its memory back, or end it",
    "node": "this host's keeper: process, store, epoch, state directory, warnings, rows",
    "doctor": "check store, keeper, devices, permissions and state directory",
    "events": "follow what happens to leases",
    "completion": "print a shell's completion script",
}
"""Every command, and what it does."""


class _Parser(argparse.ArgumentParser):
    """Exits with our number for wrong usage, and names the command to ask for help."""

    def error(self, message: str) -> NoReturn:
        self.exit(Exit.USAGE, f"{self.prog}: {message}\ntry `{self.prog} --help`\n")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments understood; ends the process for `--help` and wrong usage. `command` is the command's own words."""
    ours, command = _split(arguments)
    parser = build()
    told = parser.parse_args(ours)
    if told.what == "run":
        told.command = [*told.command, *command]
        if not told.command:
            parser.error("run: no command is given: gpuboss run --vram 20GiB -- python train.py")
    return told


def build() -> argparse.ArgumentParser:
    """The whole parser."""
    parser = _Parser(
        prog="gpuboss",
        description="Leases on device memory: who may use how much of which device.",
        epilog=f"{_TOP_EXAMPLES}\n{_ENVIRONMENT}\n{exit_codes()}",
        formatter_class=_formatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, fill in _FILL.items():
        command = commands.add_parser(name, help=COMMANDS[name], formatter_class=_formatter)
        fill(command)
        if name != "completion":
            command.add_argument("--state-dir", type=Path, metavar="DIR", help="as GPUBOSS_STATE_DIR")
    return parser


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=24, width=118)


class _Version(argparse.Action):
    """`--version`: looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"gpuboss {own_version()}")
        parser.exit()


def own_version() -> str:
    """The distribution's."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version("model-boss")
    except PackageNotFoundError:
        return "of a source tree that is not installed"


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """`run`'s own arguments, and everything behind the first `--`."""
    words = list(arguments)
    if words[:1] != ["run"] or "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


# -- the commands --------------------------------------------------------------------------------------------------


def _run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpuboss run (--vram SIZE | --exclusive) [options] -- command [argument ...]"
    _describe(
        parser,
        "Wait until the memory is free, run a command with it, and give it back when the command has ended.\n\n"
        "The command sees its devices alone (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, by UUID) and carries its\n"
        "lease's name (GPUBOSS_LEASE). It runs in a process group of its own; signals (INT, TERM, HUP, QUIT, USR1,\n"
        "USR2, WINCH, TSTP, CONT) are passed to it. Whatever it leaves behind is ended before the memory is given\n"
        "back: SIGTERM, then SIGKILL. If gpuboss itself is killed, the command is ended too.\n\n"
        "With --preemptible a more important waiter may ask for the memory, and `gpuboss release` may always: the\n"
        "command gets --preempt-signal, and SIGKILL when --grace is over. Then the exit code is 79, so that a loop\n"
        "may run it again:\n\n"
        "  until gpuboss run --vram 20GiB --preemptible -- ./train; do [ $? = 79 ] || break; done",
        [
            ("--vram 20GiB -- python train.py", "20 GiB of whichever GPU has it"),
            ("--vram 20GiB --gpus 2 -- torchrun train.py", "20 GiB of each of two GPUs"),
            ("--exclusive -- ./benchmark", "a whole GPU, to itself"),
            ("--vram 8GiB --wait 0 -- ./job", "now or not at all (exit code 75)"),
            ("--vram 8GiB --device gpu1 -- ./job", "of that device"),
        ],
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--vram", type=_value(_size), metavar="SIZE", help="memory on each GPU, such as 20GiB or 512MiB")
    size.add_argument("--exclusive", action="store_true", help="the whole of each GPU")
    parser.add_argument("--gpus", type=_value(_count), default=1, metavar="N", help="on how many GPUs (default: 1)")
    _add_devices(parser)
    importance = parser.add_mutually_exclusive_group()
    _add_priority(importance)
    importance.add_argument(
        "--over-pinned",
        action="store_const",
        const=OVER_PINNED,
        dest="priority",
        help="before everybody else: pinned models and urgent requests give way too, after a notice",
    )
    parser.add_argument(
        "--wait",
        type=_value(_seconds),
        metavar="TIME",
        help="how long at most, such as 2h; 0: not at all (default: for ever)",
    )
    parser.add_argument("--preemptible", action="store_true", help="give way to more important waiters, after a notice")
    parser.add_argument(
        "--grace",
        type=_value(_seconds),
        default=30.0,
        metavar="TIME",
        help="from a notice, also that of `gpuboss release`, to SIGKILL (default: 30s)",
    )
    parser.add_argument(
        "--preempt-signal",
        type=_value(_signal),
        default=signal.SIGTERM,
        metavar="SIG",
        help="sent at the notice (default: TERM)",
    )
    parser.add_argument(
        "--name", type=_value(_name), metavar="NAME", help="shown to others (default: the program's name)"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- command ...", help="what to run")


def _devices(parser: argparse.ArgumentParser) -> None:
    _describe(parser, "Devices of this host, and who uses how much of them.", [("", ""), ("--json", "for programs")])
    _add_json(parser)


def _ps(parser: argparse.ArgumentParser) -> None:
    _describe(
        parser,
        "Leases of this ledger: holders first, then waiters in the order of their turns. PID is the process whose\n"
        "memory it is (- where its holder named none); of a waiter, the one that asked.",
        [("", ""), ("--json | jq '.[].holder'", "for programs")],
    )
    _add_json(parser)


def _top(parser: argparse.ArgumentParser) -> None:
    _describe(
        parser,
        "Devices with bars, and leases, kept up to date; q or Ctrl-C leaves.",
        [("", ""), ("--once", "one picture, then exit"), ("--interval 5s", "for a slow line")],
    )
    parser.add_argument("--once", action="store_true", help="print one picture and exit")
    parser.add_argument(
        "--interval", type=_value(_seconds), default=1.0, metavar="TIME", help="between two looks (default: 1s)"
    )
    _add_json(parser, "print one snapshot as JSON and exit")


def _adopt(parser: argparse.ArgumentParser) -> None:
    _describe(
        parser,
        "Give a running process a lease, so that what it uses is nobody else's. The lease ends with the process.\n\n"
        "It claims what the process and its children use now on each GPU. --vram claims that much, on --device, where\n"
        "the process is about to use more or nothing measures it. Nothing is done to the process; it is never asked\n"
        "to yield to others, and `gpuboss release --force` would end it.",
        [("--pid 4711", "what it uses now"), ("--pid 4711 --vram 12GiB --device gpu0 --name comfyui", "")],
    )
    parser.add_argument("--pid", type=_value(_count), required=True, metavar="PID", help="the process")
    parser.add_argument("--vram", type=_value(_size), metavar="SIZE", help="what to claim on each device")
    _add_devices(parser)
    _add_priority(parser)
    parser.add_argument(
        "--name", type=_value(_name), metavar="NAME", help="shown to others (default: the program's name)"
    )
    parser.add_argument(
        "--wait", type=_value(_seconds), default=0.0, metavar="TIME", help="for memory it does not use yet (default: 0)"
    )
    _add_json(parser)


def _release(parser: argparse.ArgumentParser) -> None:
    _describe(
        parser,
        "Ask a holder to give its memory back: it gets a notice, as if somebody more important wanted it.\n"
        "A waiter leaves the queue. --force ends a holder's processes (SIGTERM, then SIGKILL), after confirmation;\n"
        "for an adopted process, which cannot be asked, there is no other way.",
        [
            ("3f2a", "a lease by the first letters of its id"),
            ("sft-12", "or by its holder's name, with or without job:"),
            ("3f2a --force --yes", "end it now, without a question"),
        ],
    )
    parser.add_argument(
        "lease", type=_value(_lease), metavar="ID", help="a lease's id or the beginning of one, or its holder's name"
    )
    parser.add_argument("--force", action="store_true", help="end its processes")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument(
        "--grace", type=_value(_seconds), metavar="TIME", help="until it is ended (default: its own; with --force 10s)"
    )
    _add_json(parser)


def _node(parser: argparse.ArgumentParser) -> None:
    _describe(parser, "This host's keeper, and the rows of its node ledger.", [("", ""), ("--json", "for programs")])
    _add_json(parser)


def _doctor(parser: argparse.ArgumentParser) -> None:
    _describe(
        parser,
        "Check settings, state directory, permissions, store, persistence, keeper, devices and books; every finding\n"
        "that is not right names its remedy. Exit code 1 when something is broken; warnings alone are no failure.\n"
        "A keeper is started where none runs.",
        [("", ""), ("--json | jq .ok", "for programs")],
    )
    _add_json(parser)


def _events(parser: argparse.ArgumentParser) -> None:
    _describe(
        parser,
        "Print what happens to leases as it happens, until interrupted: queued, granted, active, notice, withdrawn,\n"
        "ending, freed, refused, cancelled; epoch (the store began a new life); missed (something went unseen).",
        [("", ""), ("--json | jq -r 'select(.what==\"granted\").holder'", "one JSON object per line")],
    )
    _add_json(parser, "one JSON object per line")


def _completion(parser: argparse.ArgumentParser) -> None:
    _describe(
        parser,
        "Print a completion script.",
        [
            ("bash >> ~/.bashrc", "or: source <(gpuboss completion bash)"),
            ('zsh > "${fpath[1]}/_gpuboss"', ""),
            ("fish > ~/.config/fish/completions/gpuboss.fish", ""),
        ],
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


_FILL: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "run": _run,
    "devices": _devices,
    "ps": _ps,
    "top": _top,
    "adopt": _adopt,
    "release": _release,
    "node": _node,
    "doctor": _doctor,
    "events": _events,
    "completion": _completion,
}


# -- options that several have -------------------------------------------------------------------------------------


def _describe(parser: argparse.ArgumentParser, text: str, examples: Sequence[tuple[str, str]]) -> None:
    shown = [(f"{parser.prog} {words}".rstrip(), note) for words, note in examples]
    width = max(len(words) for words, note in shown if note) if any(note for _, note in shown) else 0
    lines = [f"  {words:<{width}}  {note}".rstrip() for words, note in shown]
    parser.description = text
    parser.epilog = "\n".join(["examples:", *lines, "", exit_codes(parser.prog.split()[-1])])


def _add_json(parser: argparse.ArgumentParser, text: str = "print JSON; sizes in bytes") -> None:
    parser.add_argument("--json", action="store_true", help=text)


def _add_devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        action="append",
        metavar="DEVICE",
        help="only this device, by a name that `gpuboss devices` shows, such as gpu0; may be repeated",
    )


def _add_priority(parser: argparse._ActionsContainer) -> None:
    names = ", ".join(CLASSES)
    parser.add_argument(
        "--priority",
        type=_value(parse_priority),
        default=NORMAL,
        metavar="CLASS",
        help=f"{names}, or 0-1000 (default: normal)",
    )


# -- values --------------------------------------------------------------------------------------------------------


def _value(read: Callable[[str], T]) -> Callable[[str], T]:
    """The reader, whose own message is shown instead of argparse's."""

    def read_or_explain(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read_or_explain


def _size(text: str) -> int:
    size = parse_memory(text)
    if size == 0:
        raise ValueError(f"memory size {text!r} is nothing: ask for some, or leave gpuboss out")
    return size


def _seconds(text: str) -> float:
    return parse_duration(text).total_seconds()


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise ValueError(f"{text!r} is no number above 0")
    return int(text)


def _name(text: str) -> str:
    if not text.strip() or len(text) > _LONGEST_NAME or not text.isprintable():
        raise ValueError(f"{text!r} is no name: 1 to {_LONGEST_NAME} printable characters")
    return text.strip()


def _lease(text: str) -> str:
    if not text.strip():
        raise ValueError(f"{text!r} names no lease: `gpuboss ps` shows those there are")
    return text.strip()


def _signal(text: str) -> signal.Signals:
    name = text.upper()
    try:
        return signal.Signals(int(name)) if name.isdigit() else signal.Signals[f"SIG{name.removeprefix('SIG')}"]
    except (KeyError, ValueError):
        raise ValueError(f"{text!r} is no signal: write it like TERM, SIGUSR1 or 10") from None
