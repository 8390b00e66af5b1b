"""Completion scripts: bash's is tried in a bash, the others are read."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from gpuboss.cli.completion import script_for
from gpuboss.cli.parser import COMMANDS

BASH = shutil.which("bash")


def complete(*line: str) -> set[str]:
    """What bash offers for the last word."""
    words = " ".join(f"'{word}'" for word in line)
    asked = f"COMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _gpuboss"
    program = f"{script_for('bash')}\n{asked}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    assert BASH is not None
    done = subprocess.run([BASH, "--norc", "-c", program], capture_output=True, text=True, check=True)
    assert not done.stderr
    return set(done.stdout.split())


@pytest.mark.skipif(BASH is None, reason="there is no bash")
def test_bash_completes_commands_options_and_values() -> None:
    assert {*COMMANDS, "--help"} <= complete("gpuboss", "")
    assert complete("gpuboss", "re") == {"release"}
    assert complete("gpuboss", "run", "--pre") == {"--preemptible", "--preempt-signal"}
    assert complete("gpuboss", "run", "--priority", "b") == {"batch"}
    assert complete("gpuboss", "completion", "f") == {"fish"}
    assert "true" in complete("gpuboss", "run", "--vram", "1GiB", "--", "tru")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_in_every_script(shell: str) -> None:
    script = script_for(shell)
    for word in (*COMMANDS, "preempt-signal", "state-dir", "force", "interval", "batch"):
        assert word in script
    assert "@" not in script.replace("${COMPREPLY[@]}", ""), "everything was filled in"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_can_read_theirs(shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell}")
    subprocess.run([program, "-n"], input=script_for(shell), text=True, check=True)
