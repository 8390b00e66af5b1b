"""`model-boss config` and `model-boss init`, as a person or a script calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from coordinator.cli import config
from tests.unit.inference.gguf_files import write_gguf

app = typer.Typer()
app.add_typer(config.app, name="config")
app.command("init")(config.init)


class Shell:
    """Runs commands in a folder of their own and remembers what the last one printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = ""
        self.err = ""

    def run(self, *arguments: str) -> int:
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        self.out, self.err = result.stdout, result.stderr
        return result.exit_code

    def json(self, *arguments: str) -> tuple[int, dict[str, object]]:
        status = self.run(*arguments, "--json")
        return status, json.loads(self.out)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    for name in ("CONFIG", "HOST", "PORT", "STATE_DIR", "MODELS_DIRS", "API_KEY", "LLAMA_SERVER"):
        monkeypatch.delenv(f"MODEL_BOSS_{name}", raising=False)
    for name in ("GPUBOSS_DEVICES", "GPUBOSS_URL", "GPUBOSS_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path)


def test_show_prints_every_key_and_its_source(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.write("model-boss.yaml", "port: 9000\nqueue: {max_waiting: 3}\ndevices: sim0=2GiB\n")
    monkeypatch.setenv("MODEL_BOSS_API_KEY", "canary")
    assert shell.run("config", "show") == 0
    rows = [line.split("\t") for line in shell.out.splitlines()]
    assert ["port", "9000", "model-boss.yaml:1"] in rows
    assert ["queue.max_waiting", "3", "model-boss.yaml:2"] in rows
    assert ["devices", "sim0=2GiB (sim)", "model-boss.yaml:3"] in rows
    assert ["reserve", "512MiB", "default"] in rows
    assert ["manifests", str(shell.folder / "manifests"), "default"] in rows
    assert ["api_key", "set", "MODEL_BOSS_API_KEY"] in rows
    assert "canary" not in shell.out


def test_show_as_json(shell: Shell) -> None:
    file = shell.write("model-boss.yaml", "reserve: 1GiB\n")
    status, shown = shell.json("config", "show")
    assert status == 0
    assert shown["file"] == str(file)
    settings = shown["settings"]
    assert isinstance(settings, dict)
    assert settings["reserve"] == {"value": 1 << 30, "from": "model-boss.yaml:1"}


def test_show_of_a_wrong_file_tells_every_mistake(shell: Shell) -> None:
    shell.write("model-boss.yaml", "prot: 3\nport: x\n")
    assert shell.run("config", "show") == 2
    assert shell.out == ""
    assert "the configuration has 2 problems" in shell.err
    assert "model-boss.yaml:1: unknown key 'prot'; nearest is 'port'" in shell.err
    assert "model-boss.yaml:2: port: expected a whole number, got 'x'" in shell.err


def test_path(shell: Shell) -> None:
    assert shell.run("config", "path") == 1
    assert str(shell.folder / "xdg" / "model-boss" / "model-boss.yaml") in shell.err
    file = shell.write("model-boss.yaml", "")
    assert shell.run("config", "path") == 0
    assert shell.out == f"{file}\n"
    assert shell.run("config", "path", "--config", "nowhere.yaml") == 2


def test_schema(shell: Shell) -> None:
    assert shell.run("config", "schema") == 0
    assert "queue" in json.loads(shell.out)["properties"]
    assert shell.run("config", "schema", "--manifest") == 0
    assert "vram_mb" in json.loads(shell.out)["properties"]


def test_check_of_a_good_library(shell: Shell) -> None:
    shell.write("model-boss.yaml", "models_dirs: [models]\n")
    (shell.folder / "models").mkdir()
    write_gguf(shell.folder / "models" / "tiny.gguf")
    assert shell.run("config", "check") == 0
    assert shell.out == "1 servable model, 0 problems, 0 warnings\n"


def test_check_tells_all_problems_and_fails(shell: Shell) -> None:
    shell.write("model-boss.yaml", "models_dirs: [models, nowhere]\n")
    shell.write("manifests/m.yaml", "path: x.gguf\n\ncontxt: 3\n")
    shell.write("models/bad.gguf", "not one")
    assert shell.run("config", "check") == 1
    assert "problem: manifests/m.yaml:3: unknown key 'contxt'; nearest is 'context'" in shell.out
    assert "problem: models/bad.gguf: is not a GGUF file" in shell.out
    assert f"warning: models_dirs: {shell.folder / 'nowhere'} does not exist" in shell.out
    assert "0 servable models, 2 problems, 1 warning" in shell.out
    status, told = shell.json("config", "check")
    assert status == 1
    assert told["ok"] is False
    assert {
        "where": "manifests/m.yaml",
        "line": 3,
        "message": "unknown key 'contxt'; nearest is 'context'",
    } in told["problems"]  # type: ignore[operator]  # a list, as the line above shows


def test_check_of_a_wrong_configuration(shell: Shell) -> None:
    shell.write("model-boss.yaml", "port: [\n")
    status, told = shell.json("config", "check")
    assert status == 1
    assert told["problems"] != []


def test_init_writes_files_that_check_finds_nothing_wrong_with(shell: Shell) -> None:
    (shell.folder / "models").mkdir()
    assert shell.run("init", "--models", "models") == 0
    assert (shell.folder / "manifests" / "example.yaml").is_file()
    assert "# Port to listen on" in (shell.folder / "model-boss.yaml").read_text()
    assert shell.run("config", "check") == 0
    assert shell.out == "0 servable models, 0 problems, 0 warnings\n"
    write_gguf(shell.folder / "models" / "tiny.gguf")
    assert shell.run("config", "check") == 0
    assert shell.out.startswith("1 servable model,")


def test_init_overwrites_only_when_told_to(shell: Shell) -> None:
    mine = shell.write("model-boss.yaml", "port: 1\n")
    assert shell.run("init") == 1
    assert "model-boss.yaml already exists; --force overwrites" in shell.err
    assert mine.read_text() == "port: 1\n"
    assert not (shell.folder / "manifests").exists(), "nothing is half done"
    assert shell.run("init", "--force") == 0
    assert mine.read_text() != "port: 1\n"


def test_init_elsewhere(shell: Shell) -> None:
    assert shell.run("init", "new/place") == 0
    assert (shell.folder / "new" / "place" / "model-boss.yaml").is_file()
    assert shell.run("init", "other", "--models", "nowhere") == 2
    assert "nowhere is not a folder" in shell.err
