"""The command's process: held at its gate, and what it says of itself."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.gpuboss.keeper_harness import ROOT

_PROGRAM = """
import json, os, signal, sys
from gpuboss.cli.child import Child, Ended

order = json.loads(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)
child = Child.fork(order["command"])
if order["go"]:
    child.start(order["environment"])
else:
    child._close_gate()
seen = None
while not isinstance(seen, Ended):
    seen = child.look()
again = child.look()
still_there = os.path.exists(f"/proc/{child.pid}")
child.abandon()
child.signal(signal.SIGKILL)  # of no effect: the number may be another's by now
child.abandon()
told = {"code": seen.exit_code, "signal": seen.signal, "again": again == seen, "kept": still_there}
print(json.dumps(told | {"gone": not os.path.exists(f"/proc/{child.pid}")}))
"""


def life(*command: str, go: bool = True, **environment: str) -> tuple[dict[str, Any], str]:
    """How a child fared, and what was written to standard error."""
    order = {"command": command, "go": go, "environment": environment}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(order)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_the_end_of_the_gate_is_no_word_to_go(tmp_path: Path) -> None:
    told, said = life("touch", str(tmp_path / "began"), go=False)
    assert told["code"] == 126
    assert not (tmp_path / "began").exists()
    assert not said


def test_it_goes_with_the_environment_it_is_given(tmp_path: Path) -> None:
    told, _ = life("sh", "-c", f'printf %s "$WORD" >{tmp_path}/word; exit 3', WORD="a=b\nc")
    assert (told["code"], told["signal"]) == (3, None)
    assert (tmp_path / "word").read_text() == "a=b\nc"


def test_its_number_is_kept_until_it_is_collected() -> None:
    told, _ = life("true")
    assert told == {"code": 0, "signal": None, "again": True, "kept": True, "gone": True}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signals_end_is_told(number: int) -> None:
    told, _ = life("sh", "-c", f"kill -{int(number)} $$")
    assert (told["code"], told["signal"]) == (128 + number, number)


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [("no-such-command-anywhere", 127, "command not found"), ("/etc/passwd", 126, "cannot be executed")],
)
def test_what_cannot_be_executed_says_so(program: str, code: int, words: str) -> None:
    told, said = life(program)
    assert told["code"] == code
    assert said == f"gpuboss: {program}{': ' if code == 127 else ' '}{words}" + (
        "\n" if code == 127 else ": Permission denied\n"
    )


def test_dispositions_are_as_a_shell_would_leave_them() -> None:
    """Python ignores SIGPIPE, which must not be inherited; and Ctrl-C is not ours to catch."""
    words = ["grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status"]
    as_usual = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    told, said = life("sh", "-c", f"exec {shlex.join(words)} >&2")
    assert told["code"] == 0
    assert said == as_usual
