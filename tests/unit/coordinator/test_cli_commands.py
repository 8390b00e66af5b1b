"""The command line as a whole: help, completion, imports, engines, serve and demo without a broker."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from coordinator.cli import app, demo, serve
from coordinator.cli.engines import plain_reporter
from coordinator.cli.output import ExitCode
from gpuboss.state_dir import HostLock, StateDir
from inference.engines.progress import Progress, Stage

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = (
    *("serve", "demo", "init", "ps", "models", "explain", "load", "unload", "logs", "doctor"),
    *("trace", "simulate", "config", "engines"),
)
SUBCOMMANDS = ("config show", "config path", "config schema", "config check", "engines list", "engines install")


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def bare_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No engine, no configuration, no compiler."""
    for variable in ("MODEL_BOSS_LLAMA_SERVER", "MODEL_BOSS_CONFIG", "CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("PATH", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- help ----------------------------------------------------------------------------------------------------------


def test_help_lists_every_command_and_the_exit_status() -> None:
    told = run("--help").stdout
    for command in COMMANDS:
        assert re.search(rf"^\W*{command} ", told, re.MULTILINE), command
    assert "3 no broker answers" in " ".join(told.split())


@pytest.mark.parametrize("command", [*COMMANDS, *SUBCOMMANDS])
def test_every_command_explains_itself_with_an_example(command: str) -> None:
    told = run(*command.split(), "--help").stdout
    assert "Example: " in told


@pytest.mark.parametrize("command", ["ps", "models", "explain", "load", "unload", "logs", "doctor"])
def test_what_prints_can_print_json(command: str) -> None:
    assert "--json" in run(command, "--help").stdout


def test_the_version_is_told() -> None:
    assert re.fullmatch(r"model-boss \d+\.\d+.*\n", run("--version").stdout)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, coordinator.cli; "
        "print(sorted({'fastapi', 'uvicorn', 'aiohttp', 'redis', 'psutil', 'rich.progress'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_shell_completes_commands() -> None:
    script = Path(sys.executable).parent / "model-boss"
    environment = {
        **os.environ,
        "_MODEL_BOSS_COMPLETE": "complete_bash",
        "COMP_WORDS": "model-boss unl",
        "COMP_CWORD": "1",
    }
    done = subprocess.run([script], env=environment, capture_output=True, text=True, check=False)
    assert "unload" in done.stdout.split()


def test_the_shell_completes_no_models_without_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    from coordinator.cli.link import complete_model

    monkeypatch.setenv("MODEL_BOSS_URL", "http://127.0.0.1:1")
    assert complete_model("ro") == []


# -- engines -------------------------------------------------------------------------------------------------------


def test_without_an_engine_the_list_says_where_it_looked(bare_home: Path) -> None:
    shown = json.loads(run("engines", "list", "--json").stdout)
    assert [(entry["origin"], entry["used"]) for entry in shown] == [("PATH", False), ("cache", False)]
    assert "engines install" in run("engines", "list").stdout


def test_without_a_compiler_the_other_ways_are_told_and_nothing_is_written(bare_home: Path) -> None:
    told = run("engines", "install", "llama-server", code=ExitCode.FAILED).stderr
    for words in ("no C and C++ compilers", "build-essential", "MODEL_BOSS_LLAMA_SERVER", "brew", "--accelerator cpu"):
        assert words in told
    assert list(bare_home.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("vllm",), "unknown engine 'vllm'"), (("llama-server", "--accelerator", "tpu"), "cpu, cuda, hip, vulkan, metal")],
)
def test_unknown_engines_and_accelerators_are_wrong_usage(
    bare_home: Path, arguments: tuple[str, ...], words: str
) -> None:
    assert words in run("engines", "install", *arguments, code=ExitCode.USAGE).stderr


def test_a_source_that_is_another_one_is_refused(bare_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    (bare_home / "x.tar.gz").write_bytes(b"not it")
    told = run("engines", "install", "llama-server", "--source", "x.tar.gz", code=ExitCode.FAILED).stderr
    assert "is not the pinned source" in told


def test_progress_in_a_log_is_a_line_for_each_stage_and_tenth() -> None:
    lines: list[str] = []
    report = plain_reporter(lines.append)
    report(Progress(Stage.CONFIGURE, "cmake looks at the machine"))
    for done in range(1, 101):
        report(Progress(Stage.COMPILE, f"file {done}", done, 100))
    assert "configure cmake looks at the machine" in lines[0]
    assert [line.split("compile ")[1] for line in lines[1:]] == [f"{tenth}%" for tenth in range(0, 101, 10)]


# -- serve, demo ---------------------------------------------------------------------------------------------------


def test_serve_with_a_wrong_flag_names_the_flag() -> None:
    assert "--port" in run("serve", "--port", "70000", code=ExitCode.USAGE).stderr


def test_serve_with_a_broken_file_names_file_and_line(bare_home: Path) -> None:
    (bare_home / "model-boss.yaml").write_text("prot: 1\n")
    assert "model-boss.yaml:1" in run("serve", code=ExitCode.USAGE).stderr


def test_serve_says_at_once_that_no_model_will_load(bare_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve.warn_without_engine(None)
    assert "engines install llama-server" in capsys.readouterr().err
    serve.warn_without_engine(bare_home / "nowhere")
    assert "does not exist" in capsys.readouterr().err


def test_the_demo_outside_of_a_checkout_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "DEMO", tmp_path)
    assert "source checkout" in run("demo", code=ExitCode.FAILED).stderr


def test_the_demo_without_an_engine_says_how_to_get_one(bare_home: Path) -> None:
    assert "make setup" in run("demo", code=ExitCode.FAILED).stderr


def test_a_second_broker_or_demo_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model-boss.yaml").write_text("state_dir: state\n")
    monkeypatch.setattr(demo, "DEMO", tmp_path)
    monkeypatch.setattr("inference.engines.find_llama_server", lambda named: Path("llama-server"))
    monkeypatch.setattr("coordinator.logs.configure", lambda level: None)
    with HostLock(StateDir.resolve(tmp_path / "state").lock_path("broker"), note="http://127.0.0.1:8210"):
        told = run("serve", "--config", str(tmp_path / "model-boss.yaml"), code=1).stderr
        assert "for http://127.0.0.1:8210; end that one, or give this one a directory of its own with --state-" in told
        told = run("demo", code=1).stderr
        assert told.endswith("for http://127.0.0.1:8210; end that one\n"), "it has no such option"


def test_the_line_to_paste_is_a_streamed_chat_request() -> None:
    words = shlex.split(demo.curl("http://127.0.0.1:8210", "robin"))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8210/v1/chat/completions"]
    body = json.loads(words[-1])
    assert (body["model"], body["stream"]) == ("robin", True)
    assert body["messages"][0]["content"] == "Who are you?"


# -- make ----------------------------------------------------------------------------------------------------------


def test_every_target_the_readme_promises_is_in_make_help() -> None:
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("help", "setup", "demo", "test", "lint", "types", "bench", "clean"):
        assert f"make {target} " in told


def test_a_python_that_is_too_old_is_told_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "pyproject.toml").touch()
    done = subprocess.run(["make", "PYTHON=", "setup"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "no Python 3.11 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_typer_builds_the_command_tree() -> None:
    assert set(typer.main.get_command(app).commands) == set(COMMANDS)
