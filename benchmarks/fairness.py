"""`python -m benchmarks.fairness`: many callers, three models, room for one: Model Boss beside llama-server's router.

1. Overload, when all models are asked for alike, and when one of them is popular: how many requests a second the router
   can answer is measured first. Then half as many again come at random moments, the same for both servers in turn: how
   long everything takes, and how long callers wait. What can be expected of this: docs/decisions/0014.
2. Steady traffic on one model, and somebody who wants another one now and then: how long that one waits. Model Boss
   says at most `max_overtaken_s` + the longest running request + a load; in the router it is left to chance, and its
   callers give up once that bound is over.
3. In one more round of 1, what Model Boss says about when somebody's turn will be is compared with when it was.

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
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import big_models, fairness_plot, targets
from benchmarks.eta_samples import BAR, Listener, Statement, share_good
from benchmarks.figures import Figure, print_table
from benchmarks.measures import default_binary
from benchmarks.open_loop import Answer, Arrival, Callers, Demand, arrivals
from inference.queue import QueueLimits

OUT = Path(__file__).resolve().parent / "out"
OVERLOAD = 1.5
MAKESPAN, WAIT, WAIT_FOR_OTHERS = 1.25, 1.5, 0.5
"""Of the router's; why these and not less, docs/decisions/0014 says."""
ALIKE, POPULAR = "alike", "popular"
FIRST, *OTHERS = big_models.NAMES
SCENES: dict[str, Demand] = {
    ALIKE: {FIRST: 1, **dict.fromkeys(OTHERS, 1)},
    POPULAR: {FIRST: 8, **dict.fromkeys(OTHERS, 1)},
}
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


FULL = Effort(capacity_s=15.0, arrivals_s=30.0, rounds=3, probes=3)
QUICK = Effort(capacity_s=6.0, arrivals_s=8.0, rounds=1, probes=1)


@dataclass(slots=True)
class Course:
    """What one server did."""

    rounds: dict[str, list[list[Answer]]] = field(default_factory=lambda: {scene: [] for scene in SCENES})
    """The answers of each round of the overload, by scene."""
    steady: list[Answer] = field(default_factory=list)
    probes: list[Answer] = field(default_factory=list)
    """Those for another model."""

    def makespan_s(self, scene: str) -> float:
        """From the first arrival until everybody was answered; the median of the rounds."""
        return statistics.median(
            max(one.over_s for one in answers) - min(one.came_s for one in answers) for answers in self.rounds[scene]
        )

    def wait_s(self, scene: str, models: Collection[str] = big_models.NAMES) -> float:
        """The wait that 95 % of the models' callers did not exceed; the median of the rounds."""
        return statistics.median(
            _p95([_waited_s(one) for one in answers if one.model in models]) for answers in self.rounds[scene]
        )

    def wait_for_others_s(self, scene: str) -> float:
        """The same, of the callers of all models but the first."""
        return self.wait_s(scene, OTHERS)

    def failures(self) -> int:
        """Requests of the overload that got no answer."""
        return sum(one.waited_s is None for rounds in self.rounds.values() for answers in rounds for one in answers)


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
        "capacities": run.capacities,
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
    capacities: dict[str, float] = field(default_factory=dict)
    """Requests a second that the router answered, by scene."""
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
            for scene, demand in SCENES.items():
                capacity = run.capacities[scene] = asyncio.run(_capacity(router.port, setup, demand, effort.capacity_s))
                report(f"{scene}: the router answers {capacity:.1f} requests/s")
                for turn in range(effort.rounds):
                    coming = arrivals(demand, rate=OVERLOAD * capacity, seconds=effort.arrivals_s, seed=turn + 1)
                    for server, port in servers.items():
                        run.courses[server].rounds[scene].append(asyncio.run(_overload(port, coming)))
                    report(f"round {turn + 1} of {effort.rounds}, {len(coming)} requests: {_line(run, scene)}")
                coming = arrivals(demand, rate=OVERLOAD * capacity, seconds=effort.arrivals_s, seed=0)
                asyncio.run(_listen(ours.port, coming, run))
            load_s = asyncio.run(_cold(ours.port, setup))
            for server in (ours.name, router.name):  # ours first: it says how long anybody waits
                course = run.courses[server]
                bound_s = run.bound_s or QueueLimits().max_overtaken_s + load_s
                asyncio.run(_steadily(servers[server], effort.probes, bound_s, course))
                if server == ours.name:
                    run.bound_s = bound_s + max(one.over_s - one.came_s for one in course.steady)
                waits = ", ".join("none" if one.waited_s is None else f"{one.waited_s:.1f} s" for one in course.probes)
                report(f"beside steady traffic, {server}: {waits}")
    return run


async def _capacity(port: int, setup: targets.Setup, demand: Demand, seconds: float) -> float:
    """Answers a second, with as many callers as the engines have places."""
    async with Callers(port) as callers:
        enough = asyncio.Event()
        count = len(demand) * setup.parallel
        insisting = asyncio.create_task(callers.insist(demand, callers=count, until=enough))
        await asyncio.sleep(seconds)
        enough.set()
        answers = await insisting
        return sum(one.waited_s is not None for one in answers) / callers.now_s()


async def _overload(port: int, coming: Sequence[Arrival]) -> list[Answer]:
    """All of them answered."""
    async with Callers(port) as callers:
        return await callers.play(coming)


async def _listen(port: int, coming: Sequence[Arrival], run: Run) -> None:
    """The same; what is said meanwhile about whose turn is when goes to `run`."""
    async with Callers(port) as callers:
        listener = Listener(callers)
        async with listener.listening():
            answers = await callers.play(coming)
        statements, silent = listener.compared(answers)
        run.statements += statements
        run.silent += silent


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


async def _steadily(port: int, probes: int, patience_s: float, course: Course) -> None:
    """Callers who keep the first model busy, and one who wants another now and then."""
    async with Callers(port) as callers:
        await callers.ask(FIRST, "first")
        enough = asyncio.Event()
        insisting = asyncio.create_task(callers.insist({FIRST: 1}, callers=STEADY_CALLERS, until=enough))
        for number in range(probes):
            await asyncio.sleep(PAUSE_S)
            other = OTHERS[number % len(OTHERS)]
            course.probes.append(await callers.ask(other, f"probe-{number}", patience_s=patience_s))
        enough.set()
        course.steady += await insisting


def _figures(run: Run) -> list[Figure]:
    router, ours = run.courses["router"], run.courses["model-boss"]
    waits = {name: max(_waited_s(one) for one in course.probes) for name, course in run.courses.items()}
    given_up = sum(one.waited_s is None for one in router.probes)
    beside = (
        f"at most max_overtaken_s + longest request + load; {given_up} of the router's {len(router.probes)} gave up"
    )
    stated = f"at least {BAR:.0%}; {len(run.statements)} statements, {run.silent} times none"
    return [
        _compared("asked for alike: until all are answered", Course.makespan_s, run, ALIKE, MAKESPAN),
        _compared("asked for alike: wait at p95", Course.wait_s, run, ALIKE, WAIT),
        _compared("one is popular: until all are answered", Course.makespan_s, run, POPULAR, MAKESPAN),
        _compared("one is popular: wait at p95", Course.wait_s, run, POPULAR, WAIT),
        _compared(
            "one is popular: wait for the others at p95", Course.wait_for_others_s, run, POPULAR, WAIT_FOR_OTHERS
        ),
        Figure("longest wait beside steady traffic", waits["model-boss"], waits["router"], "s", run.bound_s, beside),
        Figure(
            "ETAs within 30 %", 100 * share_good(run.statements), None, "%", 100 * BAR, stated, higher_is_better=True
        ),
        Figure("requests not answered", ours.failures(), router.failures(), "", 0, "none"),
    ]


def _compared(name: str, measure_of: Callable[[Course, str], float], run: Run, scene: str, bar: float) -> Figure:
    ours, peer = (measure_of(run.courses[server], scene) for server in ("model-boss", "router"))
    return Figure(name, ours, peer, "s", bar * peer, f"at most {bar:g} x the router's")


def _waited_s(answer: Answer) -> float:
    """How long its caller waited, in vain perhaps."""
    return answer.waited_s if answer.waited_s is not None else answer.over_s - answer.came_s


def _p95(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def _line(run: Run, scene: str) -> str:
    return "; ".join(
        f"{name} {course.makespan_s(scene):.1f} s, wait p95 {course.wait_s(scene):.1f} s "
        f"(others {course.wait_for_others_s(scene):.1f} s)"
        for name, course in run.courses.items()
    )


if __name__ == "__main__":
    sys.exit(main())
