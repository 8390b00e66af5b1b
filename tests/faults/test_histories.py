"""Fault histories: a thousand of the ten thousand that `make faults` plays, and those that once went wrong."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.campaign import MUST_HAPPEN, run_many
from tests.faults.checker import check
from tests.faults.history import play
from tests.faults.store import ScriptServer

_HERE = Path(__file__).parent


@pytest.mark.slow
def test_a_thousand_histories_break_no_promise() -> None:
    outcome = run_many("history", range(1000), workers=2)
    assert not outcome.broken, "\n".join(map(str, outcome.broken))
    assert outcome.histories == 1000
    never = [what for what in MUST_HAPPEN["history"] if not outcome.counts[what]]
    assert not never, f"these never happened, so nothing is known about them: {never}"


def test_a_seed_gives_the_same_history_again(fault_server: ScriptServer) -> None:
    traces: list[list[Any]] = [[], []]
    for trace in traces:
        play(fault_server, 4711, keep=trace.append)
    assert len(traces[0]) > 100
    assert json.dumps(traces[0]) == json.dumps(traces[1])


def test_a_trace_is_all_the_checker_needs(fault_server: ScriptServer) -> None:
    trace: list[str] = []
    play(fault_server, 4712, keep=lambda record: trace.append(json.dumps(record)))
    check(json.loads(line) for line in trace)


def test_the_checker_imports_nothing_of_what_it_checks() -> None:
    seen: set[str] = set()
    ours = ["tests.faults.checker"]
    while ours:
        path = _HERE / f"{ours.pop().rpartition('.')[2]}.py"
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            ours += [name for name in names if name.startswith("tests.") and name not in seen]
            seen.update(names)
    assert "tests.faults.memory" in seen
    foreign = {
        name
        for name in seen
        if name.split(".")[0] not in {"__future__", "collections", "json", "pathlib", "sys", "typing", "tests"}
    }
    assert not foreign
    assert all(name.startswith("tests.faults.") for name in seen if name.startswith("tests"))
