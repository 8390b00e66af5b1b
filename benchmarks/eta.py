"""`python -m benchmarks.eta`: how good the stated times of somebody's turn are, in simulated lives of a pool.

In each life some models share less room than they need, requests for them come at random, and take and load for times
of their own. Every now and then everybody in the queue is told when their turn will be (`inference/forecast.py`), from
what was measured so far; later it is seen when it was. A statement is good if it is wrong by at most 30 %. The exit
code is 1 when fewer than 80 % are. Results go to `benchmarks/out/`. What a real broker says is measured in
`python -m benchmarks.fairness`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import eta_plot
from benchmarks.eta_samples import BAR, Statement, share_good
from benchmarks.figures import Figure, print_table
from gpuboss.priority import CLASSES
from inference import actions, events
from inference.forecast import Forecast
from inference.queue import QueueLimits
from inference.scheduler import Scheduler
from inference.simulation.devices import parse_devices
from inference.simulation.trace import Request, TraceModel
from inference.simulation.world import Times, World

OUT = Path(__file__).resolve().parent / "out"
GIB = 1 << 30
REQUESTS = 150
MEASURED = 30
"""Requests that must have had their turn before anything is stated: what they took is what statements rest on."""
OFTEN = 0.1
"""The part of the ticks at which everybody is told."""


@dataclass(slots=True)
class Outcome:
    """What was said in one life, or in all."""

    statements: list[Statement] = field(default_factory=list)
    silent: int = 0
    """How often somebody who waited was told nothing."""
    took_s: list[float] = field(default_factory=list)
    """Seconds of the processor for each look ahead."""


def main() -> int:
    """Parse arguments, live, print, write JSON and PNG."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eta",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python -m benchmarks.eta\n  python -m benchmarks.eta --quick --json",
    )
    parser.add_argument("--quick", action="store_true", help="6 lives instead of 40: a look, not a figure")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    arguments = parser.parse_args()
    outcome = Outcome()
    for seed in range(6 if arguments.quick else 40):
        life = Life(seed).lived()
        outcome.statements += life.statements
        outcome.silent += life.silent
        outcome.took_s += life.took_s
        if not arguments.json:
            share = share_good(life.statements)
            print(f"  life {seed}: {len(life.statements)} statements, {share:.0%} good", flush=True)
    figure = _figure(outcome)
    document = {
        "figures": [asdict(figure) | {"held": figure.held}],
        "silent": outcome.silent,
        "forecast_ms": statistics.median(outcome.took_s) * 1e3,
        "statements": [asdict(one) for one in outcome.statements],
    }
    OUT.mkdir(exist_ok=True)
    (OUT / "eta.json").write_text(json.dumps(document, indent=1))
    eta_plot.draw(outcome.statements, OUT / "eta.png")
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        print(f"  a look ahead takes {document['forecast_ms']:.0f} ms of the processor, at p50")
        print_table([figure], "When will it be my turn?")
    return 0 if figure.held else 1


def _figure(outcome: Outcome) -> Figure:
    rule = f"at least {BAR:.0%} within 30 %; {len(outcome.statements)} statements, {outcome.silent} times none"
    share = share_good(outcome.statements)
    return Figure("good ETAs", 100 * share, None, "%", 100 * BAR, rule, higher_is_better=True)


class Life:
    """One pool, from its first request to its last."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = random.Random(seed)
        self._models = [
            TraceModel(
                id=f"m{number}",
                claim_bytes=6 * GIB,
                load_s=rng.uniform(1.0, 8.0),
                parallel=rng.choice((1, 1, 2)),
            )
            for number in range(rng.choice((3, 5)))
        ]
        self._service_s = {model.id: rng.uniform(0.5, 4.0) for model in self._models}
        devices = rng.choice((1, 1, 2))
        self._rate = rng.choice((0.4, 0.8, 1.2)) * devices / statistics.fmean(self._service_s.values())
        self._classes = rng.choice(((CLASSES["normal"],), (CLASSES["normal"], CLASSES["low"])))
        self._scheduler = Scheduler(QueueLimits())
        self._had_turn_s: dict[str, float] = {}
        self._said: list[tuple[str, float, float]] = []
        """Who was told what, and when."""
        self._outcome = Outcome()
        self._world = World(
            self._scheduler,
            devices=parse_devices(f"{devices}x8GiB"),
            models={model.id: model.as_model() for model in self._models},
            times=Times(
                load_s={model.id: model.load_s or 0.0 for model in self._models}, service_s=dict(self._service_s)
            ),
            requests=self._requests(),
            watcher=self._watch,
        )

    def lived(self) -> Outcome:
        """Live, and compare."""
        self._world.begin()
        self._world.run()
        self._outcome.statements += [
            Statement(eta_s, self._had_turn_s[ticket_id] - at_s)
            for ticket_id, at_s, eta_s in self._said
            if ticket_id in self._had_turn_s
        ]
        return self._outcome

    def _requests(self) -> Iterator[Request]:
        rng, at_s = self._rng, 0.0
        for _ in range(REQUESTS):
            at_s += rng.expovariate(self._rate)
            model = self._models[min(int(rng.expovariate(0.9)), len(self._models) - 1)]
            usual_s = self._service_s[model.id]
            yield Request(
                at_s=at_s,
                model=model.id,
                priority=rng.choice(self._classes),
                service_s=max(0.05, rng.gauss(usual_s, 0.3 * usual_s)),
            )

    def _watch(self, event: events.Event, decided: Sequence[actions.Action]) -> None:
        now_s = self._world.now_s
        for action in decided:
            if isinstance(action, actions.Grant):
                self._had_turn_s[action.ticket_id] = now_s
        told = isinstance(event, events.Tick) and len(self._had_turn_s) > MEASURED and self._rng.random() < OFTEN
        if told and self._scheduler.waiting_count:
            self._tell(now_s)

    def _tell(self, now_s: float) -> None:
        began_s = time.thread_time()
        forecast = Forecast(self._scheduler.copy(), now_s)
        forecast.run()
        self._outcome.took_s.append(time.thread_time() - began_s)
        for ticket in self._scheduler.waiting():
            if ticket.id in forecast.turns_s:
                self._said.append((ticket.id, now_s, forecast.turns_s[ticket.id] - now_s))
            else:
                self._outcome.silent += 1


if __name__ == "__main__":
    sys.exit(main())
