"""A picture of one run of `python -m benchmarks.scheduler`: time by tickets, and time by kind of event."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Figures = Mapping[str, float]
COLOURS = ("#2f7ebc", "#9ecae1")


def draw(growth: Mapping[int, Figures], kinds: Mapping[str, Mapping[str, Figures]], path: Path) -> None:
    """Write a PNG: on the left a line over the number of tickets, on the right bars by event, p99 as a mark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for name, colour in (("p50_ms", "#08519c"), ("p99_ms", "#e0a458")):
        left.plot(list(growth), [row[name] for row in growth.values()], marker="o", color=colour, label=name[:3])
    left.set(title="one decision, 100 models, 64 devices", xlabel="waiting tickets", ylabel="ms", xscale="log")
    left.set_ylim(bottom=0)
    left.legend(frameon=False)
    width = 0.8 / len(kinds)
    for offset, ((title, rows), colour) in enumerate(zip(kinds.items(), COLOURS, strict=True)):
        places = [place + offset * width for place in range(len(rows))]
        right.bar(places, [row["p50_ms"] for row in rows.values()], width, color=colour, label=f"{title}, p50")
        marks = [row["p99_ms"] for row in rows.values()]
        right.scatter(places, marks, marker="_", color="black", label="p99" if not offset else None)
        right.set_xticks([place - offset * width / 2 for place in places], list(rows), rotation=30, ha="right")
    right.set(title="10,000 tickets, by event", ylabel="ms")
    right.legend(frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
