"""Which llama-server is used, and why the others are not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from inference import errors
from inference.engines import cache, find_llama_server
from inference.engines.machine import machine_tag
from inference.engines.recipe import VERSION
from inference.engines.resolve import VARIABLE, Origin, list_llama_servers
from inference.engines.versions import MIN_BUILD

Program = Callable[[Path, str], Path]


@pytest.fixture(autouse=True)
def bare_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without engines, and a PATH that is one empty directory."""
    for name in ("bin", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def program(path: Path, version: str = "version: 9500 (abcdef12)") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return path


def built(key: str, *, version: str = VERSION, machine: str | None = None, chosen_at_s: float = 1000.0) -> Path:
    entry = cache.Installed(cache.engines_dir() / key, version, "cpu", machine or machine_tag(), "0.5.0-dev", 1.0)
    program(entry.binary)
    cache.write_note(entry, entry.directory)
    os.utime(entry.directory / "build.json", (chosen_at_s, chosen_at_s))
    return entry.binary


def test_nothing_anywhere_is_none() -> None:
    assert find_llama_server() is None


def test_the_order_is_setting_then_environment_then_path_then_cache(
    bare_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_cache = built(f"{VERSION}-a")
    assert find_llama_server() == in_cache
    on_path = program(bare_home / "bin" / "llama-server")
    assert find_llama_server() == on_path
    monkeypatch.setenv(VARIABLE, str(program(bare_home / "mine")))
    assert find_llama_server() == bare_home / "mine"
    assert find_llama_server(program(bare_home / "configured")) == bare_home / "configured"
    assert [candidate.origin for candidate in list_llama_servers(bare_home / "configured")] == [
        Origin.SETTING,
        Origin.ENVIRONMENT,
        Origin.PATH,
        Origin.CACHE,
    ]


def test_a_program_on_path_that_is_too_old_is_skipped_with_both_numbers(bare_home: Path) -> None:
    program(bare_home / "bin" / "llama-server", "version: 4500 (abcdef12)")
    in_cache = built(f"{VERSION}-a")
    assert find_llama_server() == in_cache
    problem = next(each.problem for each in list_llama_servers() if each.origin is Origin.PATH)
    assert problem is not None
    assert "b4500" in problem
    assert f"b{MIN_BUILD}" in problem


def test_a_program_on_path_that_does_not_run_is_skipped_and_says_why(bare_home: Path) -> None:
    broken = program(bare_home / "bin" / "llama-server")
    broken.write_text("#!/nowhere/interpreter\n")
    assert find_llama_server() is None
    broken.write_text("#!/bin/sh\necho 'libcudart.so.12: cannot open shared object file' >&2; exit 127\n")
    os.utime(broken, (5, 5))
    assert find_llama_server() is None
    assert "libcudart.so.12" in str(list_llama_servers()[0].problem)


@pytest.mark.parametrize(
    ("what", "words"), [("missing", "does not exist"), ("folder", "not a file"), ("plain", "exec")]
)
def test_what_is_named_outright_and_unusable_is_an_error_not_a_search(
    bare_home: Path, monkeypatch: pytest.MonkeyPatch, what: str, words: str
) -> None:
    program(bare_home / "bin" / "llama-server")
    (bare_home / "folder").mkdir()
    (bare_home / "plain").write_text("text")
    monkeypatch.setenv(VARIABLE, str(bare_home / what))
    with pytest.raises(errors.EngineMissing, match=words) as caught:
        find_llama_server()
    assert VARIABLE in caught.value.message
    assert str(bare_home / what) in caught.value.message


def test_an_engine_built_for_another_machine_or_release_is_not_used() -> None:
    built(f"{VERSION}-other", machine="linux-riscv64-glibc9-00000000")
    built("0.3.1-old", version="0.3.1")
    assert find_llama_server() is None
    problems = " ".join(str(candidate.problem) for candidate in list_llama_servers())
    assert "linux-riscv64-glibc9-00000000" in problems
    assert "0.3.1" in problems


def test_of_several_built_engines_the_one_chosen_last_is_used() -> None:
    built(f"{VERSION}-cpu", chosen_at_s=1000)
    cuda = built(f"{VERSION}-cuda", chosen_at_s=2000)
    assert find_llama_server() == cuda
    first = cache.find(f"{VERSION}-cpu")
    assert first is not None
    cache.choose(first)
    assert find_llama_server() == first.binary


def test_a_damaged_or_half_removed_engine_is_as_good_as_not_there() -> None:
    binary = built(f"{VERSION}-a")
    binary.unlink()
    assert find_llama_server() is None
    (cache.engines_dir() / f"{VERSION}-a" / "build.json").write_text("{")
    assert find_llama_server() is None


def test_a_relative_cache_directory_is_ignored_as_xdg_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache.engines_dir() == Path("/home/somebody/.cache/model-boss/engines/llama-server")


def test_finding_imports_the_standard_library_only() -> None:
    code = (
        "import sys; import inference.engines; "
        "print(sorted({'rich', 'typer', 'pydantic', 'aiohttp', 'yaml', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_module_prints_the_path_for_the_makefile(bare_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "inference.engines"]
    assert subprocess.run(command, check=False).returncode == 1
    binary = built(f"{VERSION}-a")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(binary)
    monkeypatch.setenv(VARIABLE, "/nowhere")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "/nowhere" in done.stderr
