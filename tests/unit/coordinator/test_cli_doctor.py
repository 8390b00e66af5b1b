"""`model-boss doctor`: healthy is exit 0, broken is exit 1, and every finding that is not right names its remedy."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import app, checks
from coordinator.config_files import load_settings
from coordinator.settings import Settings
from gpuboss.cli.findings import Finding, Verdict
from gpuboss.errors import DeviceError
from inference.engines import accelerator
from inference.engines.accelerator import Accelerator, Choice
from tests.unit.coordinator.fake_broker import fake_broker

VARIABLES = ("MODEL_BOSS_API_KEY", "MODEL_BOSS_LLAMA_SERVER", "MODEL_BOSS_CONFIG", "GPUBOSS_STATE_DIR", "GPUBOSS_URL")


@pytest.fixture(autouse=True)
def bare_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A home with a llama-server on PATH and nothing else."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "llama-server", "version: 9500 (abc)")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.chdir(tmp_path)
    return


def program(path: Path, says: str) -> None:
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def configure(**keys: Any) -> Settings:
    """A model-boss.yaml in the working directory, read."""
    keys = {"port": free_port(), "devices": [{"id": "sim0", "kind": "sim", "vram": "8GiB"}]} | keys
    Path("model-boss.yaml").write_text(json.dumps(keys))
    return load_settings().settings


def doctor(code: int) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == code, result.output
    shown: dict[str, Any] = json.loads(result.stdout)
    return shown


def only(check: Callable[[Settings], Iterator[Finding]], settings: Settings) -> Finding:
    (finding,) = check(settings)
    return finding


# -- the whole -----------------------------------------------------------------------------------------------------


def test_a_healthy_machine_is_no_failure_and_every_check_speaks() -> None:
    configure()
    shown = doctor(0)
    assert shown["ok"] is True
    spoke = {finding["check"] for finding in shown["findings"]}
    assert spoke == {"program", "config", "access", "port", "state", "store", "devices", "engine", "models"}


def test_for_people_there_is_a_line_each_with_the_remedy_below() -> None:
    configure()
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "ok      engine      llama-server b9500 (PATH)" in result.stdout
    assert "warning models" in result.stdout
    assert "-> put GGUF files into a folder" in result.stdout
    assert result.stdout.endswith("\n0 broken, 1 warning\n")


def test_a_broken_configuration_is_told_with_file_and_line_and_ends_the_examination() -> None:
    Path("model-boss.yaml").write_text("host: 127.0.0.1\nprot: 8210\n")
    shown = doctor(1)
    assert shown["ok"] is False
    assert [finding["check"] for finding in shown["findings"]] == ["program", "config"]
    assert "model-boss.yaml:2" in shown["findings"][-1]["text"]
    assert "port" in shown["findings"][-1]["text"], "the key that was meant"


def test_one_broken_thing_does_not_hide_the_others() -> None:
    configure(engines={"llama_server": "nowhere"}, host="0.0.0.0")
    shown = doctor(1)
    broken = {finding["check"] for finding in shown["findings"] if finding["verdict"] == "broken"}
    assert broken == {"access", "engine"}


# -- each ----------------------------------------------------------------------------------------------------------


def test_a_manifest_that_everybody_may_change_is_broken_with_the_command_that_cures_it() -> None:
    configure()
    manifest = Path("manifests/x.yaml")
    manifest.parent.mkdir()
    manifest.write_text("id: x\n")
    manifest.chmod(0o666)
    findings = list(checks.check_config(load_settings()))
    assert [finding.verdict for finding in findings] == [Verdict.OK, Verdict.BROKEN]
    assert findings[1].remedy == f"chmod o-w {manifest.absolute()}"


def test_a_taken_port_names_who_has_it_and_what_to_change() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        finding = only(checks.check_port, configure(port=taken.getsockname()[1]))
    assert finding.verdict is Verdict.BROKEN
    assert str(os.getpid()) in finding.text
    assert "--port" in finding.text


def test_a_port_taken_by_a_broker_is_as_it_should_be() -> None:
    with fake_broker() as broker:
        broker.answers["GET /health"] = {"status": "ok", "problems": [], "uptime_s": 1.0}
        finding = only(checks.check_port, configure(port=int(broker.url.rpartition(":")[2])))
    assert finding.verdict is Verdict.OK
    assert "answers" in finding.text


def test_a_state_directory_that_is_a_file_is_broken() -> None:
    Path("file").write_text("")
    finding = only(checks.check_state, configure(state_dir="file/state"))
    assert finding.verdict is Verdict.BROKEN
    assert "state_dir" in finding.text


def test_little_disk_is_a_warning_with_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = configure(state_dir="state")
    monkeypatch.setattr(checks, "LITTLE_DISK_BYTES", 1 << 62)
    finding = only(checks.check_state, settings)
    assert finding.verdict is Verdict.WARNING
    assert "iB left" in finding.text
    assert finding.remedy is not None


def test_a_named_store_that_does_not_answer_is_broken_and_named() -> None:
    finding = only(checks.check_store, configure(store=f"redis://127.0.0.1:{free_port()}"))
    assert finding.verdict is Verdict.BROKEN
    assert "redis://127.0.0.1" in str(finding.remedy)


def test_devices_that_cannot_be_read_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = configure()

    def broken(*_: object) -> None:
        raise DeviceError("the NVIDIA driver does not answer")

    monkeypatch.setattr(checks, "discover", broken)
    finding = only(checks.check_devices, settings)
    assert (finding.verdict, finding.text) == (Verdict.BROKEN, "the NVIDIA driver does not answer")


def test_declared_devices_are_shown() -> None:
    assert only(checks.check_devices, configure()).text == "sim0 (simulated device): 8GiB, not measured"


def test_no_engine_is_broken_and_the_remedy_builds_one(tmp_path: Path) -> None:
    (tmp_path / "bin" / "llama-server").unlink()
    finding = only(checks.check_engine, configure())
    assert finding.verdict is Verdict.BROKEN
    assert finding.remedy == "model-boss engines install llama-server"


def test_an_engine_named_by_the_environment_is_told_under_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_BOSS_LLAMA_SERVER", "/nowhere/llama-server")
    finding = only(checks.check_engine, configure())
    assert finding.verdict is Verdict.BROKEN
    assert finding.text == "MODEL_BOSS_LLAMA_SERVER names /nowhere/llama-server, which does not exist"


def test_a_named_engine_that_does_not_run_is_broken(tmp_path: Path) -> None:
    program(tmp_path / "mine", "segmentation fault")
    finding = only(checks.check_engine, configure(engines={"llama_server": "mine"}))
    assert finding.verdict is Verdict.BROKEN
    assert "segmentation fault" in finding.text


def test_an_engine_without_the_gpu_that_is_here_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from inference.engines import cache
    from inference.engines.machine import machine_tag
    from inference.engines.recipe import VERSION

    Path("bin/llama-server").unlink()
    entry = cache.Installed(cache.engines_dir() / f"{VERSION}-a", VERSION, "cpu", machine_tag(), "0.5.0", 1.0)
    entry.binary.parent.mkdir(parents=True)
    program(entry.binary, "version: 0.5.0")
    cache.write_note(entry, entry.directory)
    monkeypatch.setattr(accelerator, "detect", lambda tools: Choice(Accelerator.CUDA, "1 NVIDIA GPU(s) (X)"))
    settings = configure()
    assert [finding.verdict for finding in checks.check_engine(settings)] == [Verdict.OK, Verdict.WARNING]
    hint = Choice(Accelerator.CPU, "", hint="1 NVIDIA GPU(s) (X), but nvcc is missing")
    monkeypatch.setattr(accelerator, "detect", lambda tools: hint)
    assert [finding.text for finding in checks.check_engine(settings)][1] == hint.hint


def test_a_broken_model_is_broken_with_file_and_line() -> None:
    Path("manifests").mkdir()
    Path("manifests/x.yaml").write_text("id: x\npath: nowhere.gguf\n")
    findings = list(checks.check_models(configure()))
    assert findings[0].verdict is Verdict.BROKEN
    assert "manifests/x.yaml:2" in findings[0].text
    assert "nowhere.gguf" in findings[0].text
