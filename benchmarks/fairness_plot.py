"""A picture of one run of `python -m benchmarks.fairness`: every caller's wait over time, the servers side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.open_loop import Answer

COLOURS = ("#e0a458", "#2f7ebc", "#c8553d")


class Waits(Protocol):
    """What one server did: `fairness.Course`."""

    rounds: dict[str, list[list[Answer]]]
    steady: list[Answer]
    probes: list[Answer]


def draw(courses: Mapping[str, Waits], bound_s: float, path: Path) -> None:
    """Write a PNG: the last round of the overload, scene by scene, and below the steady traffic with its bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scenes = list(next(iter(courses.values())).rounds)
    rows = len(scenes) + 1
    size = (5.5 * len(courses), 3.5 * rows)
    figure, panels = pyplot.subplots(rows, len(courses), figsize=size, sharey="row", constrained_layout=True)
    colours = dict(zip(_models(courses), COLOURS, strict=False))
    for column, (name, course) in enumerate(courses.items()):
        for row, scene in enumerate(scenes):
            _scatter(panels[row][column], course.rounds[scene][-1], colours)
            panels[row][column].set_title(f"{name}: overload, {scene}")
        lowest = panels[-1][column]
        _scatter(lowest, [*course.steady, *course.probes], colours)
        lowest.axhline(bound_s, color="black", linestyle=":", linewidth=1, label="bound")
        lowest.set_title(f"{name}: steady traffic on one model")
        lowest.legend(frameon=False)
        for row in range(rows):
            panels[row][column].set(xlabel="came at, s", ylabel="waited, s")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _models(courses: Mapping[str, Waits]) -> list[str]:
    every = (answers for course in courses.values() for rounds in course.rounds.values() for answers in rounds)
    return sorted({one.model for answers in every for one in answers})


def _scatter(panel: object, answers: Sequence[Answer], colours: Mapping[str, str]) -> None:
    """A dot per answer; a cross where somebody gave up."""
    from matplotlib.axes import Axes

    assert isinstance(panel, Axes)
    for model, colour in colours.items():
        own = [one for one in answers if one.model == model]
        served = [(one.came_s, one.waited_s) for one in own if one.waited_s is not None]
        in_vain = [(one.came_s, one.over_s - one.came_s) for one in own if one.waited_s is None]
        panel.scatter([x for x, _ in served], [y for _, y in served], s=9, color=colour, label=model)
        panel.scatter([x for x, _ in in_vain], [y for _, y in in_vain], marker="x", color=colour)
