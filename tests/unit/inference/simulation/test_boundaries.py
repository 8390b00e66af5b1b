"""What decides in a simulation knows no clock, no chance and no network; and its manual tells of every word."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.simulation.policies import POLICIES
from inference.simulation.synthetic import WORDS
from tests.unit.test_layering import imports

ROOT = Path(__file__).resolve().parents[4]
IMPURE = {"asyncio", "time", "random", "redis", "socket", "http", "fastapi", "pydantic", "threading", "os"}
DECIDE = ("world", "ledger", "journal", "peer", "peers", "policies", "report", "replay", "trace")


@pytest.mark.parametrize("module", DECIDE)
def test_what_decides_imports_nothing_impure(module: str) -> None:
    source = (ROOT / "inference" / "simulation" / f"{module}.py").read_text()
    assert not {name.split(".")[0] for name in imports(source)} & IMPURE


@pytest.mark.parametrize("word", [*WORDS, *POLICIES])
def test_the_manual_tells_of_every_word_and_policy(word: str) -> None:
    manual = (ROOT / "docs" / "simulate.md").read_text()
    assert f"| `{word}" in manual
