"""docs/configuration.md tells every key, and tells it as the program has it."""

from __future__ import annotations

import re

from coordinator.settings import QueueSettings, Settings
from inference.manifest import Manifest
from scripts.write_configuration_page import PAGE, page


def test_the_page_is_what_the_settings_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python scripts/write_configuration_page.py"


def test_every_key_is_on_the_page_and_the_secret_is_not() -> None:
    told = set(re.findall(r"^\| `([^`]+)` \|", page(), re.MULTILINE))
    sections = {"queue", "engines"}
    assert set(Settings.model_fields) - sections - {"api_key"} <= told
    assert {f"queue.{key}" for key in QueueSettings.model_fields} <= told
    assert {"devices[].vram", "external[].busy_url", "engines.llama_server"} <= told
    assert set(Manifest.model_fields) <= told
    assert "api_key" not in told


def test_defaults_and_bounds_are_told() -> None:
    rows = {row.split("`")[1]: row for row in page().splitlines() if row.startswith("| `")}
    assert "| `512MiB` |" in rows["reserve"]
    assert "| `adopt` |" in rows["on_restart"]
    assert "(one of `adopt`, `reap`)" in rows["on_restart"]
    assert "(at least 0, at most 3600)" in rows["queue.client_cooldown_s"]
    assert "| none |" in rows["min_residency_s"]
    assert "| required |" in rows["devices[].kind"]
