from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuboss.devices import parse_devices
from gpuboss.reception import conflict
from gpuboss.settings import LedgerSettings, Timings, describe_devices


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttl_s": 10.0},
        {"renew_deadline_s": 3.9},
        {"beat_s": 0.0},
        {"tick_s": 5.0},
        {"tick_s": 0.0},
        {"linger_s": -1.0},
    ],
)
def test_timings_that_cannot_be_right_are_refused(wrong: dict[str, float]) -> None:
    Timings()
    with pytest.raises(ValueError, match="timings cannot be right"):
        Timings(**wrong)


@pytest.mark.parametrize("devices", [None, parse_devices("sim0=8GiB,cpu=1MiB")])
def test_settings_travel_as_json(devices: object) -> None:
    settings = LedgerSettings(Path("/x"), devices, "unix:///s", 5, Timings(linger_s=1.0))  # type: ignore[arg-type]
    assert LedgerSettings.from_wire(json.loads(json.dumps(settings.to_wire())), Path("/x")) == settings


def test_the_environment_names_devices_and_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUBOSS_DEVICES", "sim0=8GiB")
    monkeypatch.setenv("GPUBOSS_URL", "redis://box")
    settings = LedgerSettings.from_environment()
    assert (describe_devices(settings.devices), settings.store_url) == ("sim0=8GiB", "redis://box")
    monkeypatch.delenv("GPUBOSS_DEVICES")
    monkeypatch.setenv("GPUBOSS_URL", "")
    assert LedgerSettings.from_environment() == LedgerSettings()


def test_only_what_is_said_can_conflict() -> None:
    found, sims = LedgerSettings(), LedgerSettings(devices=parse_devices("sim0=8GiB"))
    shared = LedgerSettings(store_url="redis://:secret@box")
    assert conflict(sims, found) is None
    assert conflict(shared, found) is None
    assert conflict(sims, sims) is None
    assert conflict(found, sims) == "sim0=8GiB"
    assert conflict(sims, LedgerSettings(devices=parse_devices("sim0=9GiB"))) == "sim0=9GiB"
    assert conflict(found, shared) == "the store redis://box"
