"""Who may import whom: `gpuboss <- inference <- coordinator`, and policy that knows neither clock nor network."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("gpuboss", "inference", "coordinator")
"""Each may import itself and those before it."""

POLICY = ("scheduler", "plan", "board", "overtaking", "claim", "sight", "slot_view", "refusals", "queue", "placement",
          "eviction", "events", "actions", "model", "errors", "slot_state", "demand", "yielding",
          "fault", "fault_refusals", "breaker", "watchdog", "places", "habits", "slots", "state", "returning", "raised",
          "explain", "forecast", "simulation/world", "simulation/ledger", "simulation/trace",
          "simulation/policies", "simulation/peer", "simulation/peers")  # fmt: skip
"""Modules of `inference` that decide. They take time as an argument and do nothing to the outside."""
PURE = {"__future__", "bisect", "collections", "copy", "dataclasses", "enum", "functools", "heapq", "itertools", "math",
        "pathlib", "types", "typing"}  # fmt: skip
"""What of the standard library they use. `pathlib` only to name paths."""
PURE_OF_OURS = {"gpuboss.priority", "gpuboss.units"} | {f"inference.{name.replace('/', '.')}" for name in POLICY}


def imports(source: str) -> set[str]:
    """What the source imports anywhere, also inside functions; `from a import b` gives both `a` and `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {name.name for name in names}
            case ast.ImportFrom(module=module, names=names, level=level):
                assert not level, "imports are absolute in this project"
                found |= {str(module)} | {f"{module}.{name.name}" for name in names}
    return found


def forbidden_layers(package: str, source: str) -> set[str]:
    later = LAYERS[LAYERS.index(package) + 1 :]
    return {name for name in imports(source) if name.split(".")[0] in later}


def impure(source: str) -> set[str]:
    """Imports that a policy module must not have."""
    found = set()
    for name in imports(source):
        ours = any(name == allowed or name.startswith(f"{allowed}.") for allowed in PURE_OF_OURS)
        if not ours and name not in {"inference", "gpuboss"} and name.split(".")[0] not in PURE:
            found.add(name)
    return found


@pytest.mark.parametrize("package", LAYERS)
def test_no_package_imports_a_later_one(package: str):
    for path in sorted((ROOT / package).rglob("*.py")):
        assert not forbidden_layers(package, path.read_text()), f"{path.relative_to(ROOT)} reaches above its layer"


@pytest.mark.parametrize("module", POLICY)
def test_policy_imports_nothing_impure(module: str):
    assert not impure((ROOT / "inference" / f"{module}.py").read_text())


@pytest.mark.parametrize("module", ["priority", "units"])
def test_what_policy_borrows_from_gpuboss_is_pure_too(module: str):
    assert impure((ROOT / "gpuboss" / f"{module}.py").read_text()) <= {"datetime", "datetime.timedelta"}


@pytest.mark.parametrize(
    "line",
    [
        "import time",
        "import asyncio",
        "from random import choice",
        "from redis import Redis",
        "from gpuboss import client",
        "from inference import pool",
        "import inference.slot",
        "import aiohttp.web",
    ],
)
def test_an_impure_import_is_noticed_even_inside_a_function(line: str):
    assert impure(f"def decide():\n    {line}\n")


def test_an_import_against_the_direction_is_noticed():
    assert forbidden_layers("inference", "from coordinator.app import create_app")
    assert forbidden_layers("gpuboss", "import inference")
    assert not forbidden_layers("coordinator", "import inference, gpuboss")
