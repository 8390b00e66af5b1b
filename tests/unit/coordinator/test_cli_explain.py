"""`model-boss explain` against a pretended broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.cli.output import ExitCode
from tests.unit.coordinator.fake_broker import FakeBroker, fake_broker

GIB = 1 << 30
TOLD = {
    "model": "wren",
    "priority": "high",
    "verdict": "evicts",
    "need_bytes": 5 * GIB,
    "position": 1,
    "waiting": 2,
    "eta_s": 3.4,
    "options": [{"sim0": 5 * GIB}],
    "victims": [
        {
            "slot": "robin",
            "model": "robin",
            "freed_bytes": 5 * GIB,
            "priority": "normal",
            "in_flight": 0,
            "idle_s": 12.04,
            "reload_s": None,
        }
    ],
    "blocked_by": [{"name": "queue", "held_bytes": 0, "why": "1 waiting requests come first"}],
    "devices": [
        {
            "id": "sim0",
            "total_bytes": 8 * GIB,
            "reserve_bytes": GIB,
            "others_bytes": 0,
            "claimed_bytes": 5 * GIB,
            "free_bytes": 2 * GIB,
        }
    ],
    "refusal": None,
}


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeBroker]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MODEL_BOSS_API_KEY", raising=False)
    with fake_broker() as fake:
        yield fake


def call(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result


def test_explain_says_what_would_happen_who_would_go_and_what_is_waited_for(broker: FakeBroker) -> None:
    broker.answers["GET /api/v1/explain"] = TOLD
    result = call("explain", "wren", "--priority", "high", "--url", broker.url)
    first, place, goes, _, victim, _, blocker, header, device = result.stdout.splitlines()
    assert first == "wren (class high, needs 5GiB): it would be loaded, and others would go for it"
    assert place == "  place 1 of 2 in the queue, about 4 s"
    assert goes == "  goes to: 5GiB on sim0"
    assert victim.split("\t") == ["robin", "5GiB", "normal", "0", "12.0", "-"]
    assert blocker.split("\t") == ["queue", "-", "1 waiting requests come first"]
    assert header.split("\t") == ["device", "total", "reserve", "others", "claimed", "free"]
    assert device.split("\t") == ["sim0", "8GiB", "1GiB", "0B", "5GiB", "2GiB"]
    assert "\x1b" not in result.stdout, "colours are for terminals"
    assert broker.asked[-1] == "GET /api/v1/explain?model=wren&priority=high"


def test_explain_of_what_would_be_refused_fails_with_the_words(broker: FakeBroker) -> None:
    refused = TOLD | {"verdict": "refused", "refusal": "model 'wren' needs 40GiB", "victims": [], "blocked_by": []}
    broker.answers["GET /api/v1/explain"] = refused | {"options": [], "position": 0, "eta_s": None}
    result = call("explain", "wren", "--url", broker.url, code=ExitCode.FAILED)
    assert "it would be refused" in result.stdout
    assert "model 'wren' needs 40GiB" in result.stdout
    assert "place" not in result.stdout


def test_control_characters_of_an_answer_do_not_reach_the_terminal(broker: FakeBroker) -> None:
    nasty = "\x1b]0;owned\x07\x1b[2J"
    victims = [TOLD["victims"][0] | {"slot": nasty, "priority": nasty}]  # type: ignore[index]  # a list
    told = TOLD | {"model": nasty, "verdict": nasty, "priority": nasty, "refusal": nasty, "options": [{nasty: 1}]}
    broker.answers["GET /api/v1/explain"] = told | {"victims": victims}
    shown = call("explain", "wren", "--url", broker.url).output
    assert shown.count("owned") == 7
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_explain_as_json_holds_everything(broker: FakeBroker) -> None:
    broker.answers["GET /api/v1/explain"] = TOLD
    assert json.loads(call("explain", "wren", "--url", broker.url, "--json").stdout) == TOLD
    unknown = {"message": "no model named 'wrenn'", "code": "model_not_found"}
    broker.answers["GET /api/v1/explain"] = (404, {"error": unknown})
    assert "wrenn" in call("explain", "wrenn", "--url", broker.url, code=ExitCode.FAILED).stderr
