"""A picture of one run of `python -m benchmarks.leases`: pairs per second, and how the store's work grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

COLOURS = {"hold()": "#2f7ebc", "reslock": "#e0a458"}
SHADES = ("#9ecae1", "#4292c6", "#08519c")


def draw(
    samples: Mapping[str, Sequence[float]],
    growth: Mapping[str, Mapping[str, Sequence[float]]],
    waiters: Sequence[int],
    path: Path,
) -> None:
    """Write a PNG: a box per library, then a panel per operation with a line per number of devices."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 1 + len(growth), figsize=(4 * (1 + len(growth)), 4), constrained_layout=True)
    boxes = panels[0].boxplot(
        list(samples.values()), tick_labels=list(samples), patch_artist=True, medianprops={"color": "black"}
    )
    for box, name in zip(boxes["boxes"], samples, strict=True):
        box.set_facecolor(COLOURS[name])
    panels[0].set_title("leases taken and given back")
    panels[0].set_ylabel("pairs/s")
    panels[0].set_ylim(bottom=0)
    for panel, (operation, lines) in zip(panels[1:], growth.items(), strict=True):
        for (devices, seconds), shade in zip(lines.items(), SHADES, strict=True):
            panel.plot(waiters, [value * 1e3 for value in seconds], marker="o", color=shade, label=_named(devices))
        panel.set(title=operation, xlabel="waiters", ylabel="ms", xscale="log", yscale="log", ylim=(0.1, 100))
        panel.legend(frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _named(devices: str) -> str:
    return "1 device" if devices == "1" else f"{devices} devices"
