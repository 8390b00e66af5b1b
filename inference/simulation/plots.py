"""Pictures of simulated runs side by side. matplotlib is wanted only here, and only once something is drawn.

Called by `coordinator/cli/simulate.py`; reads `report.py` and `journal.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.simulation.journal import End, Journal
from inference.simulation.replay import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PlotsMissing", "draw", "require"]

COLOURS = ("#2f7ebc", "#e0a458", "#5fa55a", "#a05195", "#d45087")
_MOST_POINTS = 4000
"""More would make the picture larger, not clearer."""


class PlotsMissing(Exception):
    """matplotlib is not installed; the message says how to get it."""


def require() -> None:
    """Raise PlotsMissing now rather than after a long run."""
    _pyplot()


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write a PNG: how long requests waited, how many waited when, and the swaps and use of each policy."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    for outcome, colour in zip(outcomes, COLOURS, strict=False):
        _waits(panels[0, 0], outcome, colour)
        _queue(panels[0, 1], outcome, colour)
    panels[0, 0].set(title="waits", xlabel="seconds", ylabel="share of the requests served", ylim=(0, 1.02))
    panels[0, 0].set_xscale("symlog", linthresh=1.0)
    panels[0, 0].set_xlim(left=0)
    panels[0, 1].set(title="queue", xlabel="seconds", ylabel="requests waiting")
    panels[0, 1].set_xlim(left=0)
    panels[0, 1].set_ylim(bottom=0)
    panels[0, 0].legend(frameon=False)
    _bars(panels[1, 0], outcomes, "swaps", [float(one.report.swaps) for one in outcomes])
    _use(panels[1, 1], outcomes)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise PlotsMissing(
            "pictures need matplotlib: pip install 'model-boss[plots]', or leave --out away and take --json"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _waits(panel: Axes, outcome: Outcome, colour: str) -> None:
    turns = outcome.journal.turns.values()
    waits = sorted(turn.waited_s for turn in turns if turn.end is End.SERVED and turn.waited_s is not None)
    shares = [(index + 1) / len(waits) for index in range(len(waits))]
    panel.step(_thin(waits), _thin(shares), where="post", color=colour, label=outcome.report.policy)


def _queue(panel: Axes, outcome: Outcome, colour: str) -> None:
    points = outcome.journal.queue
    begin_s = _begin_s(outcome.journal)
    moments, counts = [at_s - begin_s for at_s, _ in points], [count for _, count in points]
    panel.step(_thin(moments), _thin(counts), where="post", color=colour, label=outcome.report.policy, linewidth=0.8)


def _begin_s(journal: Journal) -> float:
    return journal.queue[0][0] if journal.queue else 0.0


def _bars(panel: Axes, outcomes: Sequence[Outcome], title: str, values: list[float]) -> None:
    names = [outcome.report.policy for outcome in outcomes]
    panel.bar(names, values, color=COLOURS[: len(names)])
    panel.set_title(title)


def _use(panel: Axes, outcomes: Sequence[Outcome]) -> None:
    """Bars of what was held, with what had work before them."""
    names = [outcome.report.policy for outcome in outcomes]
    panel.bar(names, [100 * one.report.use.held for one in outcomes], color="#d0d7de", label="held by a model")
    panel.bar(names, [100 * one.report.use.busy for one in outcomes], color=COLOURS[0], label="by one with work")
    panel.set(title="device memory over time", ylabel="%", ylim=(0, 115), yticks=range(0, 101, 20))
    panel.legend(frameon=False, loc="upper center", ncols=2)


def _thin(values: Sequence[float]) -> Sequence[float]:
    step = max(1, len(values) // _MOST_POINTS)
    return [*values[::step], *values[-1:]]
