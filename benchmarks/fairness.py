"""`python -m benchmarks.fairness`: many callers, three models, room for one: Model Boss beside llama-server's router.

1. Overload: how many requests a second the router can answer is measured first. Then half as many again come at random
   moments, the same for both servers in turn: how long everything takes, and how long callers wait.
2. Steady traffic on one model, and somebody who wants another one now and then: how long that one waits. Model Boss
   says at most `max_overtaken_s` + the longest running request + a load; in the router it is left to chance, and its
   callers give up once that bound is over.
3. During 1, what Model Boss says about when a waiting request's turn will be is compared with when it was.

Both servers run the whole time, with the same engine arguments. Each figure is compared with its bar; the exit code is
1 when one is missed. Results go to `benchmarks/out/`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import big_models, fairness_plot, targets
from benchmarks.eta_samples import BAR, Listener, Statement, share_good
from benchmarks.figures import Figure, print_table
from benchmarks.measures import default_binary
from benchmarks.open_loop import Answer, Arrival, Callers, arrivals
from inference.queue import QueueLimits

OUT = Path(__file__).resolve().parent / "out"
OVERLOAD = 1.5
HALF = 0.5
STEADY_CALLERS = 8
"""Twice as many as the engine serves at once: it is never idle."""
PAUSE_S = 2.0
"""Between two requests for another model, and before the first."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    capacity_s: float
    arrivals_s: float
    """Requests come for so long, per round."""
    rounds: int
    probes: int
    """Requests for another model beside steady traffic."""


FULL = Effort(capacity_s=12.0, arrivals_s=12.0, rounds=6, probes=3)
QUICK = Effort(capacity_s=6.0, arrivals_s=8.0, rounds=2, probes=1)


@dataclass(slots=True)
class Course:
    """What one server did."""

    rounds: list[list[Answer]] = field(default_factory=list)
    """The answers of each round of the overload."""
    steady: list[Answer] = field(default_factory=list)
    probes: list[Answer] = field(default_factory=list)
    """Those for another model."""

    def makespan_s(self) -> float:
        """From the first arrival until everybody was answered; the median of the rounds."""
        spans = [max(one.over_s for one in answers) - min(one.came_s for one in answers) for answers in self.rounds]
        return statistics.median(spans)

    def wait_s(self, part: float) -> float:
        """The wait that so large a part of the callers did not exceed; the median of the rounds."""
        return statistics.median(_quantile([_waited_s(one) for one in answers], part) for answers in self.rounds)


def main() -> int:
    """Parse arguments, measure, print, write JSON and PNG."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fairness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python -m benchmarks.fairness\n  python -m benchmarks.fairness --quick --json",
    )
    parser.add_argument("--quick", action="store_true", help="one short round: a look, not a figure")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    arguments = parser.parse_args()
    report = (lambda _line: None) if arguments.json else (lambda line: print(f"  {line}", flush=True))
    run = measure(QUICK if arguments.quick else FULL, report)
    figures = _figures(run)
    document = {
        "figures": [asdict(figure) | {"held": figure.held} for figure in figures],
        "capacity": run.capacity,
        "bound_s": run.bound_s,
        "courses": {name: asdict(course) for name, course in run.courses.items()},
        "statements": [asdict(one) for one in run.statements],
    }
    OUT.mkdir(exist_ok=True)
    (OUT / "fairness.json").write_text(json.dumps(document, indent=1))
    fairness_plot.draw(run.courses, run.bound_s, OUT / "fairness.png")
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        print_table(figures, "Three models, room for one; same run")
    return 0 if all(figure.held for figure in figures) else 1


@dataclass(slots=True)
class Run:
    """Everything that was measured."""

    courses: dict[str, Course] = field(default_factory=lambda: {"router": Course(), "model-boss": Course()})
    capacity: float = 0.0
    """Requests a second that the router answered."""
    bound_s: float = 0.0
    """The longest wait that Model Boss allows for beside steady traffic."""
    statements: list[Statement] = field(default_factory=list)
    silent: int = 0
    """How often a waiting request was told nothing."""


def measure(effort: Effort, report: Report) -> Run:
    """Make the models, start both servers, measure everything."""
    run = Run()
    with tempfile.TemporaryDirectory(prefix="mb-bench-", dir="/tmp") as name:
        directory = Path(name)
        big_models.make_models(directory / "models")
        setup = targets.Setup(
            folder=directory / "models",
            models=big_models.NAMES,
            vram="400MiB",
            device="512MiB",
            threads=2,
            engine_args=("--cache-ram", "0", "--ctx-checkpoints", "1"),
        )
        report(f"{len(setup.models)} models of {big_models.SIZE_BYTES / 1e6:.0f} MB are made")
        with (
            targets.router(default_binary(), directory, setup) as router,
            targets.model_boss(default_binary(), directory, setup) as ours,
        ):
            servers = {router.name: router.port, ours.name: ours.port}
            run.capacity = asyncio.run(_capacity(router.port, setup, effort.capacity_s))
            report(f"the router answers {run.capacity:.1f} requests/s")
            for turn in range(effort.rounds):
                rate = OVERLOAD * run.capacity
                coming = arrivals(setup.models, rate=rate, seconds=effort.arrivals_s, seed=turn + 1)
                for server, port in servers.items():
                    answers = asyncio.run(_overload(port, coming, run if server == ours.name else None))
                    run.courses[server].rounds.append(answers)
                report(f"overload, round {turn + 1} of {effort.rounds}, {len(coming)} requests: {_line(run)}")
            load_s = asyncio.run(_cold(ours.port, setup))
            for server in (ours.name, router.name):  # ours first: it says how long anybody waits
                course = run.courses[server]
                bound_s = run.bound_s or QueueLimits().max_overtaken_s + load_s
                asyncio.run(_steadily(servers[server], setup, effort.probes, bound_s, course))
                if server == ours.name:
                    run.bound_s = bound_s + max(one.over_s - one.came_s for one in course.steady)
                waits = ", ".join("none" if one.waited_s is None else f"{one.waited_s:.1f} s" for one in course.probes)
                report(f"beside steady traffic, {server}: {waits}")
    return run


async def _capacity(port: int, setup: targets.Setup, seconds: float) -> float:
    """Answers a second, with as many callers as the engines have places."""
    async with Callers(port) as callers:
        enough = asyncio.Event()
        count = len(setup.models) * setup.parallel
        insisting = asyncio.create_task(callers.insist(setup.models, callers=count, until=enough))
        await asyncio.sleep(seconds)
        enough.set()
        answers = await insisting
        return sum(one.waited_s is not None for one in answers) / callers.now_s()


async def _overload(port: int, coming: Sequence[Arrival], run: Run | None) -> list[Answer]:
    """All of them answered; what is said meanwhile about whose turn is when goes to `run`."""
    async with Callers(port) as callers:
        if run is None:
            return await callers.play(coming)
        listener = Listener(callers)
        async with listener.listening():
            answers = await callers.play(coming)
        statements, silent = listener.compared(answers)
        run.statements += statements
        run.silent += silent
        return answers


async def _cold(port: int, setup: targets.Setup) -> float:
    """Seconds from a request to its first data when nothing is loaded; the longest of the models."""
    waits = []
    async with Callers(port) as callers:
        for model in setup.models:
            for other in setup.models:
                await callers.post(f"/api/v1/models/{other}/unload")
            answer = await callers.ask(model, "cold")
            waits.append(_waited_s(answer))
    return max(waits)


async def _steadily(port: int, setup: targets.Setup, probes: int, patience_s: float, course: Course) -> None:
    """Callers who keep the first model busy, and one who wants another now and then."""
    first, *others = setup.models
    async with Callers(port) as callers:
        await callers.ask(first, "first")
        enough = asyncio.Event()
        insisting = asyncio.create_task(callers.insist([first], callers=STEADY_CALLERS, until=enough))
        for number in range(probes):
            await asyncio.sleep(PAUSE_S)
            other = others[number % len(others)]
            course.probes.append(await callers.ask(other, f"probe-{number}", patience_s=patience_s))
        enough.set()
        course.steady += await insisting


def _figures(run: Run) -> list[Figure]:
    router, ours = run.courses["router"], run.courses["model-boss"]
    span_s, p95_s = router.makespan_s(), router.wait_s(0.95)
    waits = {name: max(_waited_s(one) for one in course.probes) for name, course in run.courses.items()}
    given_up = sum(one.waited_s is None for one in router.probes)
    beside = (
        f"at most max_overtaken_s + longest request + load; {given_up} of the router's {len(router.probes)} gave up"
    )
    stated = f"at least {BAR:.0%} within 30 % or 1 s; {len(run.statements)} statements, {run.silent} times none"
    return [
        Figure("overload, until all are answered", ours.makespan_s(), span_s, "s", HALF * span_s,
               "at most half of the router's"),
        Figure("overload, wait at p95", ours.wait_s(0.95), p95_s, "s", HALF * p95_s, "at most half of the router's"),
        Figure("longest wait beside steady traffic", waits["model-boss"], waits["router"], "s", run.bound_s, beside),
        Figure("good ETAs", 100 * share_good(run.statements), None, "%", 100 * BAR, stated, higher_is_better=True),
    ]  # fmt: skip


def _waited_s(answer: Answer) -> float:
    """How long its caller waited, in vain perhaps."""
    return answer.waited_s if answer.waited_s is not None else answer.over_s - answer.came_s


def _quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def _line(run: Run) -> str:
    return "; ".join(
        f"{name} {course.makespan_s():.1f} s, wait p50 {course.wait_s(0.5):.1f} s, p95 {course.wait_s(0.95):.1f} s"
        for name, course in run.courses.items()
    )


if __name__ == "__main__":
    sys.exit(main())
