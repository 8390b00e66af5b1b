"""The script that gets a Redis for the tests: it installs nothing, does its work once, and says why it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import fetch_redis

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_package_manager_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert fetch_redis.on_path() is None
    with pytest.raises(fetch_redis.Unobtainable, match="no redis-server >= 7 on PATH, and no apt-get"):
        fetch_redis.fetch()


def test_make_setup_goes_on_without_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/fetch_redis.py"],
        cwd=ROOT,
        env={"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "those that need it are skipped" in done.stdout


def test_a_failed_download_leaves_nothing_that_looks_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in ("apt-get", "apt-cache", "dpkg", "dpkg-query"):
        (tmp_path / tool).write_text(f"#!/bin/sh\necho '{tool}: no network' >&2\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(fetch_redis.Unobtainable, match="apt-get: no network"):
        fetch_redis.fetch()
    assert list(fetch_redis.cache_dir().iterdir()) == []


def test_what_was_got_once_is_not_got_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = tmp_path / "model-boss" / "test-servers" / "redis" / "bin" / "redis-server"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho 'Redis server v=7.0.15 sha=0'\n")
    program.chmod(0o755)
    monkeypatch.setattr(fetch_redis, "_unpack_into", lambda *args, **more: pytest.fail("fetched again"))
    assert fetch_redis.fetch() == program
