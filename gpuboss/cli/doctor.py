"""`gpuboss doctor`: is everything as leases need it? Called by the package's `main`; `checks.py` looks."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import asdict

from gpuboss.cli.checks import examine
from gpuboss.cli.exits import Exit
from gpuboss.cli.findings import Finding, Verdict
from gpuboss.cli.output import print_json

__all__ = ["doctor"]

_COLOURS = {Verdict.OK: "32", Verdict.WARNING: "33", Verdict.BROKEN: "31"}


def doctor(told: argparse.Namespace) -> int:
    """Print every finding; NOT_DONE when something is broken."""
    findings: list[Finding] = []
    for finding in examine(told):
        findings.append(finding)
        if not told.json:
            _print(finding)
    counts = Counter(finding.verdict for finding in findings)
    broken, warnings = counts[Verdict.BROKEN], counts[Verdict.WARNING]
    if told.json:
        print_json({"ok": not broken, "findings": [asdict(finding) for finding in findings]})
    elif broken or warnings:
        print(f"\n{broken} broken, {warnings} {'warning' if warnings == 1 else 'warnings'}")
    else:
        print("\nall is well")
    return Exit.NOT_DONE if broken else Exit.DONE


def _print(finding: Finding) -> None:
    verdict = f"{finding.verdict.value:<8}"
    if sys.stdout.isatty():
        verdict = f"\x1b[{_COLOURS[finding.verdict]}m{verdict}\x1b[0m"
    print(f"{verdict}{finding.check:<13}{finding.text}")
    if finding.remedy is not None:
        print(f"{'':<21}-> {finding.remedy}", flush=True)
