"""A measured figure beside its bar, and a table of them. Used by both benchmark programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Figure", "print_table"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One comparison with its bar."""

    name: str
    ours: float
    peer: float | None
    """None where the bar is a number of its own."""
    unit: str
    bar: float
    """`ours` must be at most this (at least, where `higher_is_better`)."""
    rule: str
    """The bar in words."""
    higher_is_better: bool = False

    @property
    def held(self) -> bool:
        """True when the bar is met."""
        return self.ours >= self.bar if self.higher_is_better else self.ours <= self.bar


def print_table(figures: Sequence[Figure], title: str) -> None:
    """To standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "Model Boss", "peer", "bar", "", title=title)
    for figure in figures:
        table.add_row(
            figure.name,
            f"{figure.ours:.2f} {figure.unit}",
            "" if figure.peer is None else f"{figure.peer:.2f} {figure.unit}",
            f"{figure.bar:.2f} {figure.unit} ({figure.rule})",
            "held" if figure.held else "MISSED",
        )
    Console().print(table)
