"""The system's own count of kills for want of memory, wherever it keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference import oom_kills


@pytest.mark.parametrize(
    ("group", "file"),
    [
        ("0::/user.slice/boss.service", "user.slice/boss.service/memory.events"),
        ("0::/", "memory.events"),
        ("4:cpu,memory:/docker/abc", "memory/docker/abc/memory.oom_control"),
    ],
)
def test_the_machines_count_and_that_of_the_own_group(tmp_path: Path, group: str, file: str) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "vmstat").write_text("nr_free_pages 7\noom_kill 3\npgscan 4\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"9:name=systemd:/\n{group}\n")
    counter = tmp_path / "groups" / file
    counter.parent.mkdir(parents=True)
    counter.write_text("oom 9\noom_kill 40\noom_kill_disable 0\n")
    assert oom_kills.count(tmp_path / "proc", tmp_path / "groups") == 43


def test_where_nothing_is_counted_it_stays_0(tmp_path: Path) -> None:
    assert oom_kills.count(tmp_path, tmp_path) == 0
    (tmp_path / "vmstat").write_text("pgscan 4\n")
    assert oom_kills.count(tmp_path, tmp_path) == 0


def test_it_can_be_read_here() -> None:
    assert oom_kills.count() >= 0
