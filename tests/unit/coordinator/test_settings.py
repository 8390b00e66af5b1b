"""Settings: every key has a default that works, and a value that cannot work is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from coordinator.settings import Settings, manifest_schema, settings_schema
from gpuboss.devices import DeviceKind, DeviceSpec
from gpuboss.units import GIB, MIB


def test_everything_has_a_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings()
    assert (settings.host, settings.port) == ("127.0.0.1", 8210)
    assert settings.is_loopback
    assert settings.reserve_bytes == 512 * MIB
    assert settings.device_specs() is None
    assert settings.manifests_dir == tmp_path / "manifests"
    assert settings.queue.max_waiting == 512
    assert settings.queue.max_wait_s == 300
    assert (settings.queue.load_grace_s, settings.queue.keep_place_s) == (10, 120)
    assert settings.queue.client_cooldown_s == 0
    assert settings.preempt_grace_s == 30
    assert settings.min_residency_s is None, "three times what the load took"
    assert (settings.stall_s, settings.shutdown_s) == (60, 10)
    assert (settings.on_restart, settings.orphan_grace_s) == ("adopt", 30)
    assert settings.engines.llama_server is None
    assert settings.api_key is None


def test_declared_devices_are_what_the_ledger_takes() -> None:
    settings = Settings.model_validate(
        {"devices": [{"id": "sim0", "kind": "sim", "vram": "8GiB"}, {"id": "cpu", "kind": "cpu", "vram": "1GiB"}]}
    )
    specs = (DeviceSpec("sim0", DeviceKind.SIM, 8 * GIB), DeviceSpec("cpu", DeviceKind.CPU, GIB))
    assert settings.device_specs() == specs
    assert Settings.model_validate({"devices": "sim0=8GiB,cpu=1GiB"}).device_specs() == specs


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "192.168.1.2", "gpu-box")),
    ],
)
def test_which_addresses_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert Settings(host=host).is_loopback is loopback


@pytest.mark.parametrize(
    "keys",
    [
        {"port": 65536},
        {"port": -1},
        {"port": True},
        {"host": ""},
        {"reserve": "much"},
        {"reserve": -1},
        {"queue": {"max_waiting": 0}},
        {"queue": {"max_wait_s": 0}},
        {"queue": {"aging_s": -1}},
        {"queue": {"aging_s": 0.0005}},
        {"queue": {"load_grace_s": -1}},
        {"queue": {"keep_place_s": "2d"}},
        {"queue": {"client_cooldown_s": "2h"}},
        {"min_residency_s": -1},
        {"stall_s": 0},
        {"orphan_grace_s": -1},
        {"shutdown_s": "forever"},
        {"on_restart": "pray"},
        {"log_level": "loud"},
        {"preempt_grace_s": -1},
        {"preempt_grace_s": "25h"},
        {"external": [{"name": "a", "match": "a"}]},
        {"external": [{"name": "a", "match": "a", "vram": 0}]},
        {"external": [{"name": "a", "match": " ", "vram": "1GiB"}]},
        {"external": [{"name": "a", "match": "/(/", "vram": "1GiB"}]},
        {"external": [{"name": "a", "match": "a", "vram": "1GiB", "priority": "soon"}]},
        {"external": [{"name": "a", "match": "a", "vram": "1GiB", "free": "later"}]},
        {"external": [{"name": "a", "match": "a", "vram": "1GiB", "free": "PRAY http://localhost/free"}]},
        {"external": [{"name": "a", "match": "a", "vram": "1GiB", "free": "POST http://localhost/free {"}]},
        {"external": [{"name": "a", "match": "a", "vram": "1GiB", "busy_url": "file:///etc/passwd"}]},
        {"external": [{"name": "a", "match": "a", "vram": "1GiB"}] * 2},
        {"store": "http://localhost"},
        {"devices": []},
        {"devices": [{"id": "a", "kind": "sim", "vram": "1GiB"}] * 2},
        {"devices": [{"id": "a", "kind": "cpu", "vram": "1GiB"}]},
        {"devices": [{"id": "a", "kind": "sim", "vram": 0}]},
        {"devices": "sim0"},
        {"models_dirs": ["a\0b"]},
        {"state_dir": ""},
        {"nonsense": 1},
    ],
)
def test_what_cannot_work_is_refused(keys: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate(keys)


def test_the_key_is_in_no_text_that_is_made_of_the_settings() -> None:
    settings = Settings(api_key="canary")
    assert "canary" not in repr(settings)
    assert "canary" not in str(settings)
    assert "canary" not in settings.model_dump_json()
    assert settings.api_key == "canary"


def test_where_models_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    sources = Settings.model_validate({"models_dirs": ["m"], "default_model": "x"}).model_sources()
    assert sources.models_dirs == (tmp_path / "m",)
    assert sources.hugging_face_cache == tmp_path / "hub"
    assert sources.manifests == tmp_path / "manifests"
    assert not sources.manifests_expected, "nobody named it"
    assert sources.default_model == "x"
    named = Settings.model_validate({"manifests": "manifests", "scan_hf_cache": False}).model_sources()
    assert named.manifests_expected
    assert named.hugging_face_cache is None


def test_schemas_describe_every_key_but_the_secret() -> None:
    schema = json.loads(json.dumps(settings_schema()))
    assert schema["properties"].keys() == Settings.model_fields.keys() - {"api_key"}
    assert schema["additionalProperties"] is False
    assert all(key.get("description") for key in schema["properties"].values())
    assert all(key.get("description") for key in manifest_schema()["properties"].values())


def test_importing_the_settings_imports_little() -> None:
    code = "import sys, coordinator.config_files; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    heavy = {"fastapi", "starlette", "aiohttp", "typer", "rich", "redis", "structlog", "numpy", "psutil", "watchfiles"}
    assert not heavy & set(done.stdout.split())


def test_a_program_beside_us_is_what_inference_takes() -> None:
    keys = {
        "name": "comfyui",
        "match": "ComfyUI/main.py",
        "vram": "12GiB",
        "priority": "low",
        "busy_url": "http://127.0.0.1:8188/queue",
        "free": 'POST http://127.0.0.1:8188/free {"unload_models": true}',
    }
    [spec] = Settings.model_validate({"external": [keys], "preempt_grace_s": "1m"}).external_specs()
    assert (spec.name, spec.vram_bytes, spec.priority, spec.grace_s) == ("comfyui", 12 * GIB, 20, 60.0)
    assert str(spec.busy) == "GET http://127.0.0.1:8188/queue"
    assert spec.free is not None
    assert (spec.free.method, spec.free.body) == ("POST", '{"unload_models": true}')
    [plain] = Settings.model_validate({"external": [keys | {"free": "http://127.0.0.1:8188/free"}]}).external_specs()
    assert str(plain.free) == "POST http://127.0.0.1:8188/free"
