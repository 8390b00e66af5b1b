"""`model-boss simulate`: what devices would do with a stream of requests, under our policy and those of others.

Registered by the package's `app`; calls `inference/simulation/`. `docs/simulate.md` is its manual.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.link import JsonOption
from coordinator.cli.output import ExitCode, count, fail, known_errors, print_json, print_table, say

if TYPE_CHECKING:
    from inference.simulation.replay import Outcome
    from inference.simulation.report import Report
    from inference.simulation.trace import Trace

DEVICES = "2x24GiB"
"""Where a synthetic trace runs if nothing is said."""
_EVERY_POLICY = "all"
_WAITS = {"p50": "p50_s", "p95": "p95_s", "p99": "p99_s", "longest": "max_s"}
"""What of `Waits` is shown, and as what."""
EXAMPLES = (
    "Example: model-boss simulate --trace day.jsonl.gz --policy all --out plots\n\n"
    "Example: model-boss simulate --trace day.jsonl.gz --devices 2x80GiB\n\n"
    "Example: model-boss simulate --synthetic 'models=6 size=4GiB..20GiB load=5s..40s requests=2000 rate=20/m' --json"
)


def simulate(
    trace: Annotated[Path | None, typer.Option("--trace", help="A recorded trace: a file that `trace` wrote.")] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(help="A made-up one instead: words such as 'models=6 size=4GiB..20GiB rate=2/s', or a YAML file."),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="ours, fifo, lru-count, shortest-keepalive or all; may be repeated.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Other devices: 'gpu0=24GiB,gpu1=24GiB', or NODESxGPUSxMEMORY such as 4x8x80GiB. "
            f"When left out: the trace's own, or {DEVICES}."
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="Another value for a key of `queue:`, such as max_overtakes=4; may be repeated."),
    ] = None,
    models_max: Annotated[
        int | None,
        typer.Option(min=1, help="How many models lru-count may load; when left out, as many as surely fit."),
    ] = None,
    stop: Annotated[
        str | None, typer.Option(help="How long the memory of a stopped model takes to come back; 500ms if left out.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write simulation.json and simulation.png to this folder.")] = None,
    json: JsonOption = False,
) -> None:
    """Run a stream of requests through the scheduler on a virtual clock, and compare policies side by side."""
    names = _policies(policy or ["ours"])
    if out is not None:
        _prepare(out)
    subject = _limited(_subject(trace, synthetic, devices), limit or [])
    stop_s = _stop_s(stop)
    outcomes = [_run(subject, name, stop_s=stop_s, models_max=models_max) for name in names]
    document = _document(subject, [outcome.report for outcome in outcomes])
    if out is not None:
        _write(out, document, outcomes)
    if json:
        print_json(document)
        return
    typer.echo(f"{subject.source}: {count(len(subject.requests), 'request')}, {count(len(subject.models), 'model')}")
    print_table(("", *(f">{name}" for name in names)), _rows([outcome.report for outcome in outcomes]))
    for outcome in outcomes:
        _tell_refusals(outcome.report)
    if out is not None:
        typer.echo(f"written: {out / 'simulation.json'}, {out / 'simulation.png'}")


# -- what is simulated ---------------------------------------------------------------------------------------------


def _subject(trace: Path | None, synthetic: str | None, devices: str | None) -> Trace:
    if (trace is None) == (synthetic is None):
        fail("say what to simulate: either --trace FILE or --synthetic SPEC", ExitCode.USAGE)
    from inference.simulation.devices import parse_devices

    try:
        rooms = parse_devices(devices or DEVICES)
    except ValueError as error:
        fail(f"--devices: {error}", ExitCode.USAGE)
    if trace is None:
        return _made_up(str(synthetic), lambda spec: _generate(spec, rooms))
    from inference.simulation.trace_file import read

    with known_errors():
        loaded = read(trace)
    for warning in loaded.warnings:
        say(warning, fg="yellow", err=True)
    return loaded.trace if devices is None else loaded.trace.on(rooms)


def _generate(spec: Any, rooms: Any) -> Trace:
    from inference.simulation.synthetic import generate

    with _bar("requests", spec.requests) as progress:
        return generate(spec, rooms, progress)


def _made_up(text: str, make: Callable[[Any], Trace]) -> Trace:
    from inference.simulation.synthetic import BadSpec, parse_spec, read_spec

    with known_errors():
        try:
            return make(parse_spec(text) if "=" in text else read_spec(Path(text)))
        except BadSpec as error:
            fail(f"--synthetic: {error}", ExitCode.USAGE)


def _limited(trace: Trace, changes: Sequence[str]) -> Trace:
    """The trace with other limits of the queue."""
    from dataclasses import fields

    from inference.simulation.trace import LONGEST_S
    from inference.validation import unknown

    known = {one.name: one for one in fields(trace.limits)}
    values: dict[str, Any] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in known:
            fail(f"--limit: {unknown('key', name, known)}", ExitCode.USAGE)
        try:
            values[name] = int(value) if isinstance(known[name].default, int) else float(value)
        except ValueError:
            fail(f"--limit {change}: write KEY=NUMBER, such as max_overtakes=4", ExitCode.USAGE)
        if values[name] > LONGEST_S:
            fail(f"--limit {change}: at most {LONGEST_S}", ExitCode.USAGE)
    try:
        return replace(trace, limits=replace(trace.limits, **values))
    except ValueError as error:
        fail(f"--limit: {error}", ExitCode.USAGE)


def _policies(wanted: Sequence[str]) -> list[str]:
    from inference.simulation.policies import POLICIES
    from inference.validation import unknown

    names: dict[str, None] = {}
    for name in wanted:
        if name not in POLICIES and name != _EVERY_POLICY:
            fail(f"--policy: {unknown('policy', name, [*POLICIES, _EVERY_POLICY])}", ExitCode.USAGE)
        names |= dict.fromkeys(POLICIES if name == _EVERY_POLICY else [name])
    return list(names)


# -- the runs ------------------------------------------------------------------------------------------------------


def _stop_s(text: str | None) -> float:
    from gpuboss.units import parse_duration
    from inference.simulation.world import STOP_S

    try:
        return STOP_S if text is None else parse_duration(text).total_seconds()
    except ValueError as error:
        fail(f"--stop: {error}", ExitCode.USAGE)


def _run(trace: Trace, policy: str, *, stop_s: float, models_max: int | None) -> Outcome:
    from inference.simulation.replay import replay

    with _bar(policy, len(trace.requests)) as progress:
        return replay(trace, policy, stop_s=stop_s, models_max=models_max, progress=progress)


@contextmanager
def _bar(policy: str, requests: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on standard error, for people who watch."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(policy, total=requests)
        yield lambda count: progress.update(task, completed=count)


# -- what is shown -------------------------------------------------------------------------------------------------


def _prepare(out: Path) -> None:
    """What would stop the results from being written shall stop it before a long run."""
    from inference.simulation.plots import PlotsMissing, require

    try:
        require()
        out.mkdir(parents=True, exist_ok=True)
    except (PlotsMissing, OSError) as error:
        fail(f"--out: {error}")


def _write(out: Path, document: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    from inference.simulation.plots import draw

    (out / "simulation.json").write_text(json_module.dumps(document, indent=1))
    draw(outcomes, out / "simulation.png")


def _document(trace: Trace, reports: Sequence[Report]) -> dict[str, Any]:
    return {
        "source": trace.source,
        "requests": len(trace.requests),
        "devices": {device.id: device.capacity_bytes for device in trace.devices},
        "policies": {report.policy: report.as_json() for report in reports},
    }


def _rows(reports: Sequence[Report]) -> list[tuple[str, ...]]:
    """A row per figure, a column per policy."""
    classes = list(dict.fromkeys(name for report in reports for name in report.waits))
    classes.sort(key=lambda name: name == "all")  # a policy that served a class less has its rows in another order
    rows = [
        _row("served", reports, lambda one: str(one.served)),
        _row("refused, left", reports, lambda one: f"{sum(one.refused.values())}, {one.left}"),
    ]
    for name in classes:
        rows += [_wait_row(name, figure, reports) for figure in _WAITS]
    return [
        *rows,
        _row("loads", reports, lambda one: str(one.loads)),
        _row("of them swaps", reports, lambda one: str(one.swaps)),
        _row("makespan", reports, lambda one: _seconds(one.makespan_s)),
        _row("memory held", reports, lambda one: f"{one.use.held:.0%}"),
        _row("memory at work", reports, lambda one: f"{one.use.busy:.0%}"),
        _row("fairness (Jain)", reports, lambda one: f"{one.fairness.jain:.2f}" if one.served else "-"),
        _row("most overtaken", reports, lambda one: str(one.fairness.most_overtaken)),
        _row("beyond the bound", reports, lambda one: _seconds(one.fairness.beyond_bound_s)),
    ]


def _row(name: str, reports: Sequence[Report], show: Callable[[Report], str]) -> tuple[str, ...]:
    return (name, *map(show, reports))


def _wait_row(name: str, figure: str, reports: Sequence[Report]) -> tuple[str, ...]:
    of_class = [report.waits.get(name) for report in reports]
    shown = (_seconds(getattr(waits, _WAITS[figure])) if waits and waits.count else "-" for waits in of_class)
    return (f"wait {name}: {figure}", *shown)


def _tell_refusals(report: Report) -> None:
    if report.refused:
        reasons = ", ".join(f"{code} {times}" for code, times in report.refused.items())
        typer.echo(f"{report.policy} refused {sum(report.refused.values())} of {report.requests}: {reasons}")


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"
