"""The command line of `gpuboss`: what is understood, what is not, and what the help says."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuboss import errors
from gpuboss.cli import exits
from gpuboss.cli.exits import Exit, exit_codes, exit_of
from gpuboss.cli.parser import COMMANDS, parse
from gpuboss.priority import OVER_PINNED

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30


def test_a_run_as_the_manual_shows_it() -> None:
    line = "run --vram 20GiB --gpus 2 --priority batch --wait 2h --preemptible --grace 60s --name sft-12 "
    told = parse([*line.split(), "--", "python", "train.py", "--vram", "1", "--", "x"])
    assert (told.vram, told.gpus, told.priority, told.wait, told.grace) == (20 * GIB, 2, 50, 7200.0, 60.0)
    assert (told.preemptible, told.name, told.quiet) == (True, "sft-12", False)
    assert told.command == ["python", "train.py", "--vram", "1", "--", "x"], "what is behind the first -- is not ours"


def test_what_is_not_said() -> None:
    told = parse(["run", "--exclusive", "--", "true"])
    assert (told.vram, told.gpus, told.priority, told.wait, told.grace) == (None, 1, 10, None, 30.0)
    assert (told.preempt_signal, told.device, told.preemptible) == (signal.SIGTERM, None, False)


def test_a_run_over_pinned_models_comes_before_every_class_and_has_no_other() -> None:
    assert parse(["run", "--vram", "1GiB", "--over-pinned", "--", "true"]).priority == OVER_PINNED < 0
    with pytest.raises(SystemExit):
        parse(["run", "--vram", "1GiB", "--over-pinned", "--priority", "low", "--", "true"])


def test_the_command_may_follow_without_a_mark() -> None:
    told = parse(["run", "--vram", "1GiB", "python", "-c", "print()"])
    assert told.command == ["python", "-c", "print()"]


@pytest.mark.parametrize(
    ("word", "number"),
    [("TERM", signal.SIGTERM), ("sigusr1", signal.SIGUSR1), ("12", signal.SIGUSR2)],
)
def test_signals_by_name_and_number(word: str, number: int) -> None:
    assert parse(["run", "--vram", "1GiB", "--preempt-signal", word, "--", "true"]).preempt_signal == number


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "COMMAND"),
        ("frobnicate", "invalid choice"),
        ("run -- true", "one of the arguments --vram --exclusive is required"),
        ("run --vram 1GiB --exclusive -- true", "not allowed with"),
        ("run --vram 1GiB", "no command is given"),
        ("run --vram 1GiB --", "no command is given"),
        ("run --vram lots -- true", 'write it like "20GiB"'),
        ("run --vram 0 -- true", "is nothing"),
        ("run --vram 1GiB --gpus 0 -- true", "no number above 0"),
        ("run --vram 1GiB --priority soon -- true", "urgent (1), high (5)"),
        ("run --vram 1GiB --wait never -- true", 'write it like "30s"'),
        ("run --vram 1GiB --preempt-signal NAP -- true", "write it like TERM"),
        ("run --vram 1GiB --name \x1b -- true", "printable"),
        ("adopt", "--pid"),
        ("adopt --pid x", "no number above 0"),
        ("release", "ID"),
        ("release ''", "names no lease"),
        ("completion tcsh", "bash"),
    ],
)
def test_wrong_usage_is_2_and_says_what_is_right(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(shlex.split(arguments))
    assert ended.value.code == Exit.USAGE
    said = capsys.readouterr().err
    assert words in said
    assert "--help" in said


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_help_has_examples_and_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*command.split(), "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "examples:\n" in said
    assert f"  gpuboss {command}".rstrip() in said
    assert exit_codes(command or None) in said
    assert all(len(line) <= 120 for line in said.splitlines())


def test_every_exit_code_is_explained() -> None:
    assert _codes(None) == set(map(int, Exit))
    assert set().union(*map(_codes, COMMANDS)) == set(map(int, Exit))


def test_a_command_is_told_its_own_exit_codes() -> None:
    assert _codes("completion") == {0, 2, 71}
    assert _codes("release") == {0, 1, 2, 69, 71, 77, 78}
    assert _codes("run") == set(map(int, Exit)) - {1}
    assert "0    the command's own exit code" in exit_codes("run")
    assert "0    done\n       run: the command's own exit code" in exit_codes()


def _codes(command: str | None) -> set[int]:
    begins = [line[:7].strip() for line in exit_codes(command).splitlines()[1:]]
    return {int(number) for number in begins if number}


def test_every_error_has_an_exit_code() -> None:
    kinds = {errors.GpubossError}
    while more := {below for kind in kinds for below in kind.__subclasses__()} - kinds:
        kinds |= more
    ours = {kind for kind in kinds if kind.__module__ == errors.__name__}
    assert ours == set(exits._BY_ERROR)


def test_an_error_of_a_kind_unheard_of_is_told_by_its_parent() -> None:
    class Special(errors.LeaseRefused):
        """Of somebody else."""

    assert exit_of(Special("no")) is Exit.REFUSED


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("run", {"asyncio", "redis", "rich", "dataclasses", "gpuboss.client"}), ("supervise", {"rich"})],
)
def test_a_run_loads_nothing_that_it_does_not_need(module: str, heavy: set[str]) -> None:
    """`run` forks the command before the rest is loaded, and nothing of it draws tables."""
    program = f"import sys; import gpuboss.cli.{module}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert f"gpuboss.cli.{module}" in loaded
    assert not loaded & heavy


def test_help_loads_nothing_heavy() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from gpuboss.cli import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "gpuboss.cli.parser" in loaded
    assert not loaded & {"asyncio", "redis", "rich", "dataclasses", "gpuboss.client"}
