"""Where the configuration comes from, which source wins, and how each is told its mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coordinator.config_files import BadInput, find_config, load_settings
from coordinator.config_template import config_template, manifest_template
from coordinator.settings import Settings
from gpuboss.devices import DeviceKind, DeviceSpec
from gpuboss.units import GIB
from inference.manifest import read_manifest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def load(here: Path, text: str | None = None, flags: dict[str, object] | None = None, **environ: str) -> Settings:
    if text is not None:
        write(here / "model-boss.yaml", text)
    return load_settings(flags=flags, environ={"XDG_CONFIG_HOME": str(here / "xdg"), **environ}, cwd=here).settings


def problems(here: Path, text: str | None = None, flags: dict[str, object] | None = None, **environ: str) -> list[str]:
    with pytest.raises(BadInput) as caught:
        load(here, text, flags, **environ)
    return [str(problem) for problem in caught.value.problems]


# -- which file -------------------------------------------------------------------------------------------------------


def test_the_places_in_their_order(here: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(here / "xdg")}
    assert find_config(None, environ, here) in (None, Path("/etc/model-boss/model-boss.yaml"))
    user = write(here / "xdg" / "model-boss" / "model-boss.yaml", "")
    assert find_config(None, environ, here) == user
    local = write(here / "model-boss.yaml", "")
    assert find_config(None, environ, here) == local
    named = write(here / "named.yaml", "")
    environ["MODEL_BOSS_CONFIG"] = "named.yaml"
    assert find_config(None, environ, here) == named
    asked = write(here / "asked.yaml", "")
    assert find_config(asked, environ, here) == asked


def test_a_file_that_somebody_named_must_be_there(here: Path) -> None:
    with pytest.raises(BadInput, match=f"^MODEL_BOSS_CONFIG: {here / 'x.yaml'} does not exist$"):
        find_config(None, {"MODEL_BOSS_CONFIG": "x.yaml"}, here)
    with pytest.raises(BadInput, match=r"^--config: .*/y.yaml does not exist$"):
        find_config(Path("y.yaml"), {}, here)


def test_without_a_file_everything_is_at_its_default(here: Path) -> None:
    assert load(here) == Settings()


# -- which source wins ------------------------------------------------------------------------------------------------


def test_flags_beat_the_environment_beats_the_file(here: Path) -> None:
    text = "port: 1001\nhost: 127.0.0.1\n"
    assert load(here, text).port == 1001
    assert load(here, text, MODEL_BOSS_PORT="1002").port == 1002
    assert load(here, text, {"port": 1003}, MODEL_BOSS_PORT="1002").port == 1003
    assert load(here, text, {"port": None}, MODEL_BOSS_PORT="1002").port == 1002, "None: the flag was not given"


def test_every_variable(here: Path) -> None:
    settings = load(
        here,
        MODEL_BOSS_HOST="::1",
        MODEL_BOSS_PORT="1234",
        MODEL_BOSS_STATE_DIR="state",
        MODEL_BOSS_MODELS_DIRS="a:/b",
        MODEL_BOSS_API_KEY="secret",
        MODEL_BOSS_LLAMA_SERVER="~/bin/llama-server",
        GPUBOSS_DEVICES="sim0=8GiB",
        GPUBOSS_URL="redis://127.0.0.1",
        GPUBOSS_STATE_DIR="/other",
    )
    assert (settings.host, settings.port) == ("::1", 1234)
    assert settings.state_dir == here / "state", "ours wins over gpuboss's"
    assert settings.models_dirs == (here / "a", Path("/b"))
    assert settings.api_key == "secret"
    assert settings.engines.llama_server == Path.home() / "bin" / "llama-server"
    assert settings.device_specs() == (DeviceSpec("sim0", DeviceKind.SIM, 8 * GIB),)
    assert settings.store == "redis://127.0.0.1"


def test_empty_variables_are_not_set(here: Path) -> None:
    assert load(here, MODEL_BOSS_PORT="", MODEL_BOSS_API_KEY=" ") == Settings()


def test_paths_in_the_file_start_at_the_file(here: Path) -> None:
    text = "models_dirs: [m, ~/n, /o]\nstate_dir: s\nengines: {llama_server: ../e}\n"
    file = write(here / "etc" / "c.yaml", text)
    settings = load_settings(file, environ={"MODEL_BOSS_STATE_DIR": "t"}, cwd=here).settings
    assert settings.models_dirs == (here / "etc" / "m", Path.home() / "n", Path("/o"))
    assert settings.engines.llama_server == here / "etc" / ".." / "e"
    assert settings.state_dir == here / "t", "what is given from outside starts here"
    assert settings.manifests_dir == here / "etc" / "manifests", "and so does the default"


def test_flags_reach_into_sections(here: Path) -> None:
    settings = load(here, "queue: {max_waiting: 7}\n", {"queue.aging_s": 5, "devices": "sim0=1GiB"})
    assert (settings.queue.max_waiting, settings.queue.aging_s) == (7, 5)
    assert settings.device_specs() is not None


def test_it_knows_where_each_value_came_from(here: Path) -> None:
    write(here / "model-boss.yaml", "host: '::1'\nqueue:\n  aging_s: 5m\nport: 1\n")
    environ = {"MODEL_BOSS_PORT": "2"}
    loaded = load_settings(flags={"log_level": "debug"}, environ=environ, cwd=here)
    assert loaded.file == here / "model-boss.yaml"
    assert loaded.origin("host") == "model-boss.yaml:1"
    assert loaded.origin("queue.aging_s") == "model-boss.yaml:3"
    assert loaded.origin("port") == "MODEL_BOSS_PORT"
    assert loaded.origin("log_level") == "--log-level"
    assert loaded.origin("reserve") == "default"
    assert loaded.settings.queue.aging_s == 300


# -- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host: ::1\nprot: 3\n", "model-boss.yaml:2: unknown key 'prot'; nearest is 'port'"),
        ("port: 70000\n", "model-boss.yaml:1: port: must be between 0 and 65535, got 70000"),
        ("port: '80'\n", "model-boss.yaml:1: port: expected a whole number, got '80'"),
        ("queue: {max_wait: 3}\n", "model-boss.yaml:1: queue: unknown key 'max_wait'; nearest is 'max_wait_s'"),
        ("max_waiting: 3\n", "model-boss.yaml:1: unknown key 'max_waiting'; it belongs under 'queue:', indented"),
        ("queue: fast\n", "model-boss.yaml:1: queue: expected keys and values, got 'fast'"),
        (
            "devices:\n  - {id: a, kind: gpu, vram: 1GiB}\n",
            "model-boss.yaml:2: devices.0.kind: unknown device kind 'gpu'; declared devices are of kind sim or cpu",
        ),
        (
            "devices:\n  - {id: a, kind: cuda, vram: 1GiB}\n",
            (
                "model-boss.yaml:2: devices.0.kind: devices of kind cuda are found, not declared; "
                "leave devices out to use them"
            ),
        ),
        ("devices:\n  - {id: a, kind: sim}\n", "model-boss.yaml:2: key 'devices.0.vram' is missing"),
        (
            "devices:\n- {id: a, kind: sim, vram: 1GiB}\n- {id: a, kind: sim, vram: 1GiB}\n",
            "model-boss.yaml:1: devices: device 'a' is declared twice",
        ),
        ("models_dirs: models\n", "model-boss.yaml:1: models_dirs: expected a list, got 'models'"),
        (
            "log_level: verbose\n",
            "model-boss.yaml:1: log_level: 'verbose' is not one of debug, info, warning, error",
        ),
        (
            "api_key: x\n",
            (
                "model-boss.yaml:1: api_key: keys do not belong into this file; "
                "set the environment variable MODEL_BOSS_API_KEY"
            ),
        ),
        ("a: 1\na: 2\n", "model-boss.yaml:2: key 'a' is given twice (first on line 1)"),
    ],
)
def test_what_a_mistake_in_the_file_is_told(here: Path, text: str, expected: str) -> None:
    assert problems(here, text) == [expected]


def test_mistakes_from_outside_name_the_variable_or_the_flag(here: Path) -> None:
    (told,) = problems(here, "port: 1\n", MODEL_BOSS_PORT="eighty")
    assert told == "MODEL_BOSS_PORT: port: expected a whole number, got 'eighty'"
    (told,) = problems(here, "port: 1\n", {"port": 70000}, MODEL_BOSS_PORT="eighty")
    assert told == "--port: port: must be between 0 and 65535, got 70000"
    (told,) = problems(here, GPUBOSS_DEVICES="sim0")
    assert told.startswith("GPUBOSS_DEVICES: devices: device 'sim0' is not understood")


def test_all_mistakes_are_told_at_once(here: Path) -> None:
    told = problems(here, "prot: 3\nport: x\nqueue:\n  max_waiting: 0\n", MODEL_BOSS_HOST="::1")
    assert [line.split(": ")[0] for line in told] == ["model-boss.yaml:1", "model-boss.yaml:2", "model-boss.yaml:4"]


def test_a_named_directory_is_no_configuration(here: Path) -> None:
    with pytest.raises(BadInput, match="is a directory, not a YAML file"):
        load_settings(here, environ={}, cwd=here)


# -- what `init` writes -----------------------------------------------------------------------------------------------


def uncommented(template: str) -> str:
    """The template after somebody removed the mark before every key; `# text` is prose."""
    lines = [line.removeprefix("#") for line in template.splitlines() if not re.match(r" *# \S", line)]
    return "\n".join(lines)


def test_the_template_as_written_changes_nothing(here: Path) -> None:
    assert load(here, config_template()) == Settings()


def test_the_template_holds_every_key_at_its_default(here: Path) -> None:
    text = config_template()
    settings = load(here, uncommented(text))
    examples = {
        "default_model",
        "models_dirs",
        "state_dir",
        "store",
        "devices",
        "allowed_hosts",
        "engines",
        "external",
        "manifests",
        "min_residency_s",
    }
    assert settings.model_fields_set == Settings.model_fields.keys() - {"api_key"}
    assert settings.model_dump(exclude=examples) == Settings().model_dump(exclude=examples)
    assert settings.queue == Settings().queue


def test_the_template_names_the_folders_it_is_given(here: Path) -> None:
    assert load(here, config_template((Path("/models"),))).models_dirs == (Path("/models"),)


def test_the_manifest_template_is_no_manifest_until_its_marks_are_removed(here: Path) -> None:
    file = write(here / "m.yaml", manifest_template())
    assert read_manifest(file) is None
    file.write_text(uncommented(manifest_template()))
    read = read_manifest(file)
    assert read is not None
    assert read[0].id == "my-model"
    assert max(len(line) for line in manifest_template().splitlines()) <= 120
