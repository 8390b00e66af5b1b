"""A picture of one run of `python -m benchmarks.eta`: what was said beside what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.eta_samples import GOOD, Statement


def draw(statements: Sequence[Statement], path: Path) -> None:
    """Write a PNG: a dot per statement, and the lines between which it is good."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(5, 5), constrained_layout=True)
    real = [one.real_s for one in statements]
    panel.scatter(real, [one.said_s for one in statements], s=4, alpha=0.3, color="#2f7ebc")
    ends = [0.0, max(real, default=1.0)]
    panel.plot(ends, ends, color="black", linewidth=1)
    for factor in (1 - GOOD, 1 + GOOD):
        panel.plot(ends, [factor * end for end in ends], color="black", linestyle=":", linewidth=1)
    panel.set(title="when will it be my turn?", xlabel="it was, s", ylabel="it was said, s")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
