"""A picture of one run: a box per server and figure, so that spread is seen as well as the median."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

UNITS = {
    "latency": (1e3, "ms, 4-token answer, 1 connection"),
    "throughput": (1.0, "requests/s, 4 connections"),
    "swap": (1e3, "ms, last byte to first byte"),
    "cold start": (1e3, "ms to the first byte"),
}
COLOURS = {"direct": "#9aa5b1", "router": "#e0a458", "model-boss": "#2f7ebc"}


def draw(samples: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Write a PNG with one panel per figure; samples as `measures` returns them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(samples), figsize=(4 * len(samples), 4), constrained_layout=True)
    for panel, (kind, by_target) in zip(panels, samples.items(), strict=True):
        scale, unit = UNITS[kind]
        values = [[sample * scale for sample in row] for row in by_target.values()]
        boxes = panel.boxplot(values, tick_labels=list(by_target), patch_artist=True, medianprops={"color": "black"})
        for box, name in zip(boxes["boxes"], by_target, strict=True):
            box.set_facecolor(COLOURS[name])
        panel.set_title(kind)
        panel.set_ylabel(unit)
        panel.set_ylim(bottom=0)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
