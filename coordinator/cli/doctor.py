"""`model-boss doctor`: is everything here that a broker needs? Registered by the package's `app`; `checks.py` looks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from coordinator.cli.link import ConfigOption, JsonOption
from coordinator.cli.output import ExitCode, count, print_json

if TYPE_CHECKING:
    from gpuboss.cli.findings import Finding

_COLOURS = {"ok": "green", "warning": "yellow", "broken": "red"}


def doctor(config: ConfigOption = None, json: JsonOption = False) -> None:
    """Check program, configuration, access, port, state directory, store, devices, engine, models; name each remedy.

    Exit status 1 when something is broken; warnings alone are no failure.
    """
    findings: list[Finding] = []
    for finding in examine(config):
        findings.append(finding)
        if not json:
            _print(finding)
    counts = Counter(finding.verdict.value for finding in findings)
    if json:
        print_json({"ok": not counts["broken"], "findings": [asdict(finding) for finding in findings]})
    elif counts["broken"] or counts["warning"]:
        typer.echo(f"\n{counts['broken']} broken, {count(counts['warning'], 'warning')}")
    else:
        typer.echo("\nall is well")
    if counts["broken"]:
        raise typer.Exit(ExitCode.FAILED)


def examine(config: Path | None) -> Iterator[Finding]:
    """Run every check; with a broken configuration, those that can do without one."""
    from coordinator.cli import checks
    from coordinator.config_files import BadInput, load_settings
    from gpuboss.cli.findings import Finding, Verdict

    yield from checks.check_program()
    try:
        loaded = load_settings(config)
    except BadInput as error:
        for problem in error.problems:
            yield Finding("config", Verdict.BROKEN, str(problem))
        return
    yield from checks.check_config(loaded)
    for check in (
        checks.check_access,
        checks.check_port,
        checks.check_state,
        checks.check_store,
        checks.check_devices,
        checks.check_engine,
        checks.check_models,
    ):
        yield from check(loaded.settings)


def _print(finding: Finding) -> None:
    verdict = finding.verdict.value
    typer.secho(f"{verdict:<8}", fg=_COLOURS[verdict], nl=False)
    typer.echo(f"{finding.check:<12}{finding.text}")
    if finding.remedy is not None:
        typer.echo(f"{'':<20}-> {finding.remedy}")
