"""Programs that hold leases, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.integration.gpuboss.keeper_harness import ROOT, LedgerUnderTest

_PROGRAM = """
import json, sys, time
from pathlib import Path
import gpuboss
from gpuboss.settings import LedgerSettings

order = json.loads(sys.argv[1])
settings = LedgerSettings.from_wire(order["settings"], Path(order["state_dir"]))

def say(word):
    print(json.dumps(word), flush=True)
"""


def run(ledger: LedgerUnderTest, body: str, **more: Any) -> subprocess.Popen[str]:
    order = {"state_dir": str(ledger.directory), "settings": ledger.settings.to_wire(), **more}
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM + body, json.dumps(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    ledger.started.append(process)
    return process


def said(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.communicate()[1])
    return json.loads(line)


def output(ledger: LedgerUnderTest, body: str, *, timeout_s: float = 60.0, **more: Any) -> tuple[str, str]:
    """What such a program says and complains of, to its end; that it came to its end by itself."""
    program = run(ledger, body, **more)
    try:
        told, complaints = program.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        program.kill()
        told, complaints = program.communicate()
        raise AssertionError(f"it hung; it said {told!r}, and {complaints}") from None
    assert program.returncode == 0, complaints
    return told, complaints
