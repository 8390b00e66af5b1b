"""The engines' logs: names, length, last words."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference import engine_log
from inference.engine_log import EngineLog, last_lines, log_path, rotate, without_paths


def test_every_model_has_a_log_of_its_own(tmp_path: Path) -> None:
    ids = ["a/b", "a-b", "a:b", "a.b", "a_b", "a/b:Q4_K_M", "a/b/q4_k_m", "a/b#2", "a#2", "a#21", "a:2"]
    paths = {log_path(tmp_path, model_id) for model_id in ids}
    assert len(paths) == len(ids)
    assert {path.parent for path in paths} == {tmp_path}
    assert not any(set(path.name) & set(":#/") for path in paths)


def test_a_long_log_starts_anew_under_its_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_log, "ROTATE_BYTES", 12)
    path = log_path(tmp_path, "robin")
    rotate(path)  # there is none
    with path.open("ab", buffering=0) as engine:
        engine.write(b"short")
        rotate(path)
        assert path.read_bytes() == b"short"
        engine.write(b"not so short")
        rotate(path)
        engine.write(b"new")
    assert path.read_bytes() == b"new"
    older = path.with_name(path.name + ".1")
    assert older.read_bytes() == b"not so short"
    assert older.stat().st_mode & 0o777 == 0o600


def test_what_is_kept_of_a_log_that_grew_fast_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_log, "ROTATE_BYTES", 100)
    path = log_path(tmp_path, "robin")
    path.write_bytes(b"a" * 10_000 + b"the end\n")
    rotate(path)
    older = path.with_name(path.name + ".1")
    assert (path.stat().st_size, older.stat().st_size) == (0, 100)
    assert older.read_bytes().endswith(b"the end\n")


@pytest.mark.parametrize("when", ["open", "write"])
def test_a_full_disk_costs_the_older_log_and_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine_log, "ROTATE_BYTES", 10)
    path = log_path(tmp_path, "robin")
    path.write_bytes(b"longer than that")
    path.with_name(path.name + ".1").write_bytes(b"what was before")
    monkeypatch.setattr(engine_log, "_private" if when == "open" else "_copy_end", full)
    rotate(path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b""]


async def test_one_lifes_lines_are_found_although_the_log_was_rotated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = log_path(tmp_path, "robin")
    path.write_text("of an earlier life\n")
    log = EngineLog(path)
    await log.begin()
    assert log.last_lines(9) == []
    with path.open("a") as engine:
        engine.write("one\ntwo\n")
        engine.flush()
        assert log.last_lines(9) == ["one", "two"]
        monkeypatch.setattr(engine_log, "ROTATE_BYTES", 8)
        await log.keep_short()
        assert path.stat().st_size == 0
        engine.write("three\n")
        engine.flush()
    assert log.last_lines(9) == ["one", "two", "three"]
    assert log.last_lines(2) == ["two", "three"]


async def test_a_life_that_begins_with_a_long_log_has_said_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_log, "ROTATE_BYTES", 8)
    path = log_path(tmp_path, "robin")
    path.write_text("of an earlier life\n")
    log = EngineLog(path)
    await log.begin()
    assert log.last_lines(9) == []


def test_the_last_lines_are_those_of_this_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert last_lines(path, 3) == []
    path.write_text("old\nold\n")
    start = path.stat().st_size
    assert last_lines(path, 3, since_bytes=start) == []
    with path.open("ab") as file:
        file.write(b"one\n\ntwo \xff\nthree\n")
    assert last_lines(path, 2, since_bytes=start) == ["two \N{REPLACEMENT CHARACTER}", "three"]
    assert last_lines(path, 9, since_bytes=start)[0] == "one"
    assert last_lines(path, 9, since_bytes=start + 1000) == ["old", "old", *last_lines(path, 3)]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("loading model '/home/ann/m/robin.gguf'", "loading model 'robin.gguf'"),
        ("/opt/x/llama-server: not found", "llama-server: not found"),
        ("error: 3/4 of 1.5 GiB at 20 MB/s", "error: 3/4 of 1.5 GiB at 20 MB/s"),
        ("listening on unix:///run/e.sock", "listening on unix://e.sock"),
        ("see https://example.org/docs/a.html", "see https://example.org/docs/a.html"),
    ],
)
def test_callers_are_not_told_where_things_lie(said: str, shown: str) -> None:
    assert without_paths(said) == shown


def test_a_known_path_may_hold_spaces() -> None:
    assert without_paths("open '/a b/c d.gguf'", Path("/a b/c d.gguf")) == "open 'c d.gguf'"
    assert without_paths("open '/x/a b/c d.gguf'", Path("/a b/c d.gguf")) == "open 'a b/c d.gguf'"
