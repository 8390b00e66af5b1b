"""Version texts, options hashes, machine names, ninja's lines and the pinned archive's hash."""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from inference.engines import errors
from inference.engines.accelerator import Accelerator
from inference.engines.machine import describe_cpuinfo, machine_tag, processor_tag
from inference.engines.progress import parse_ninja, run_logged, telling_lines
from inference.engines.recipe import VERSION, llama_server_recipe
from inference.engines.source import Archive, check_hash
from inference.engines.versions import MIN_BUILD, parse_version

# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown", "usable"),
    [
        ("version: 9500 (abcdef12)\nbuilt with GNU 12", "b9500", True),
        (f"version: {MIN_BUILD} (abc)", f"b{MIN_BUILD}", True),
        (f"version: {MIN_BUILD - 1} (abc)", f"b{MIN_BUILD - 1}", False),
        ("ggml_cuda_init: found 1 CUDA devices:\n  Device 0: X\nversion: 9297 (b0df4c0cf)", "b9297", True),
        ("version: 0.5.0-dev (build 1, commit 0c1e570)", "0.5.0-dev", True),
        ("version: 0.5.0 (build 0, commit unknown)", "0.5.0", True),
        ("version: 1.2.3", "1.2.3", True),
        ("version: 0 (unknown)", "b0", False),
    ],
)
def test_both_forms_of_version_are_read_and_judged(text: str, shown: str, usable: bool) -> None:
    version = parse_version(text)
    assert version is not None
    assert str(version) == shown
    assert (version.problem is None) is usable


@pytest.mark.parametrize("text", ["", "llama.cpp", "conversion: 5 (x)", "version: (unknown)"])
def test_what_holds_no_version_is_none(text: str) -> None:
    assert parse_version(text) is None


# -- options hash ------------------------------------------------------------------------------------------------------


def test_the_key_is_stable_and_changes_with_everything_that_changes_the_result() -> None:
    recipe = llama_server_recipe(Accelerator.CPU, environment={})
    assert recipe.key == llama_server_recipe(Accelerator.CPU, environment={"HOME": "/x"}).key
    assert recipe.key.startswith(f"{VERSION}-")
    others = [
        llama_server_recipe(Accelerator.CUDA, ("-DGGML_CUDA=ON",), {}),
        llama_server_recipe(Accelerator.CPU, environment={"CXXFLAGS": "-O1"}),
        replace(recipe, version="0.3.99"),
        replace(recipe, machine="elsewhere"),
        replace(recipe, targets=("llama-server",)),
    ]
    assert len({recipe.key, *(other.key for other in others)}) == 1 + len(others)


INTEL = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
microcode\t: {microcode}
cpu MHz\t\t: {mhz}
flags\t\t: fpu sse sse2 avx avx2 {flags}

processor\t: 1
vendor_id\t: Other
"""


def test_the_processor_is_named_by_its_instruction_sets_and_not_by_what_updates_change() -> None:
    def tag(microcode: str = "0x1", mhz: str = "2000.0", flags: str = "") -> str:
        return processor_tag(describe_cpuinfo(INTEL.format(microcode=microcode, mhz=mhz, flags=flags)))

    assert tag() == tag(microcode="0x2", mhz="3100.5", flags="user_shstk ibrs")
    assert tag() != tag(flags="avx512f")
    assert "GenuineIntel 6 143" in describe_cpuinfo(INTEL)


def test_an_arm_processor_has_a_name_too() -> None:
    text = "processor\t: 0\nFeatures\t: fp asimd sve i8mm evtstrm\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"
    assert describe_cpuinfo(text).split() == ["0x41", "0xd4f", "asimd", "i8mm", "sve"]


def test_the_machine_has_a_name_without_spaces() -> None:
    assert " " not in machine_tag()
    assert "/" not in machine_tag()


# -- running and reading -----------------------------------------------------------------------------------------------


def test_ninja_lines_are_counted_and_others_are_not() -> None:
    assert parse_ninja("[12/209] Building CXX object a.o") == (12, 209, "Building CXX object a.o")
    assert parse_ninja("warning: [1/2] is a fraction") is None


def test_a_command_is_logged_with_its_output_and_status(tmp_path: Path) -> None:
    log, seen = tmp_path / "log", list[str]()
    assert run_logged(["sh", "-c", "echo one; echo two >&2; exit 3"], log, {"PATH": "/bin"}, on_line=seen.append) == 3
    assert seen == ["one", "two"]
    assert "$ sh -c" in log.read_text()


def test_the_lines_that_tell_are_the_errors_or_else_the_last(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("start\na.cpp:3:1: error: no such thing\n" + "noise\n" * 50)
    assert telling_lines(log) == "  a.cpp:3:1: error: no such thing"
    log.write_text("-- fine\nCMake Error in CMakeLists.txt:\n  CUDA_ARCHITECTURES is wrong\n\n-- Configuring done\n")
    assert "CUDA_ARCHITECTURES is wrong" in telling_lines(log)
    log.write_text("one\ntwo\nthree\n")
    assert telling_lines(log, 2) == "  two\n  three"


# -- the archive -------------------------------------------------------------------------------------------------------


def archive_with(path: Path, names: dict[str, bytes]) -> Archive:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in names.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(member, io.BytesIO(content))
    return Archive(path, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def test_only_the_engine_tree_is_unpacked_and_nothing_outside_of_it(tmp_path: Path) -> None:
    archive = archive_with(
        tmp_path / "a.tar.gz",
        {
            "pkg-1/setup.py": b"no",
            "pkg-1/vendor/llama.cpp/CMakeLists.txt": b"yes",
            "pkg-1/vendor/llama.cpp/tools/run.sh": b"yes",
            "pkg-1/vendor/llama.cpp/models/huge.gguf": b"no",
            "pkg-1/vendor/llama.cpp/../../../escaped": b"no",
        },
    )
    tree = archive.prepare(tmp_path, tmp_path / "log", lambda progress: None)
    files = sorted(str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file())
    assert files == ["CMakeLists.txt", "tools/run.sh"]
    assert (tree / "tools/run.sh").stat().st_mode & 0o100
    assert not (tmp_path / "escaped").exists()


def test_an_archive_with_another_hash_is_refused_before_anything_is_unpacked(tmp_path: Path) -> None:
    archive = archive_with(tmp_path / "a.tar.gz", {"pkg-1/vendor/llama.cpp/CMakeLists.txt": b"yes"})
    with pytest.raises(errors.HashMismatch) as caught:
        replace(archive, sha256="0" * 64).prepare(tmp_path, tmp_path / "log", lambda progress: None)
    assert archive.sha256 in caught.value.message
    assert "0" * 64 in caught.value.message
    assert not list(tmp_path.glob("source*"))


def test_an_archive_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.DownloadFailed, match=r"nowhere\.tar\.gz"):
        check_hash(tmp_path / "nowhere.tar.gz", "0" * 64)


def test_unpacking_that_was_interrupted_starts_again(tmp_path: Path) -> None:
    archive = archive_with(tmp_path / "a.tar.gz", {"pkg-1/vendor/llama.cpp/CMakeLists.txt": b"yes"})
    (tmp_path / "source.part").mkdir()
    (tmp_path / "source.part" / "half").write_text("")
    tree = archive.prepare(tmp_path, tmp_path / "log", lambda progress: None)
    assert [path.name for path in tree.iterdir()] == ["CMakeLists.txt"]
