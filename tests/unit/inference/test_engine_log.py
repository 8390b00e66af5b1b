"""The engines' logs: names, length, last words."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference import engine_log
from inference.engine_log import last_lines, log_path, rotate, without_paths


def test_every_model_has_a_log_of_its_own(tmp_path: Path) -> None:
    ids = ["a/b", "a-b", "a:b", "a.b", "a_b", "a/b:Q4_K_M", "a/b/q4_k_m"]
    paths = {log_path(tmp_path, model_id) for model_id in ids}
    assert len(paths) == len(ids)
    assert {path.parent for path in paths} == {tmp_path}


def test_a_long_log_starts_anew_under_its_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_log, "ROTATE_BYTES", 10)
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
    assert older.read_bytes() == b"shortnot so short"
    assert older.stat().st_mode & 0o777 == 0o600


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
