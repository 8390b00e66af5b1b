"""Manifests are read as their owners meant them; what is wrong with one is told with file, line and what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuboss.units import GIB, MIB
from inference.manifest import Manifest, id_of_broken, read_manifest
from inference.model import Category
from inference.names import check_id, safe_id
from inference.yaml_files import BadInput, read_document


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "m.yaml"


def read(file: Path, text: str) -> Manifest:
    file.write_text(text)
    manifest = read_manifest(file)
    assert manifest is not None
    return manifest[0]


def problems(file: Path, text: str) -> list[str]:
    file.write_text(text)
    with pytest.raises(BadInput) as caught:
        read_manifest(file)
    return str(caught.value).splitlines()


def test_every_key(file: Path) -> None:
    manifest = read(
        file,
        """\
id: team/qwen:0.5b
aliases: ["gpt-*", small]
category: embedding
backend: llama-server
path: ../models/q.gguf
mmproj: ../models/p.gguf
vram: 1.5GiB
context: 8192
parallel: 4
replicas: 2
gpu_layers: 20
options: {cache_type_k: q8_0}
extra_args: [--threads, "4"]
env: {CUDA_VISIBLE_DEVICES: "0"}
pin: true
preload: yes
stay_warm_s: 10m
min_residency_s: 45s
chat_template: chatml
""",
    )
    assert manifest.id == "team/qwen:0.5b"
    assert manifest.aliases == ("gpt-*", "small")
    assert manifest.category is Category.EMBEDDING
    assert manifest.vram_bytes == GIB + 512 * MIB
    assert manifest.extra_args == ("--threads", "4")
    assert manifest.preload
    assert manifest.stay_warm_s == 600
    assert (manifest.replicas, manifest.min_residency_s) == (2, 45)


def test_sizes_in_mib(file: Path) -> None:
    assert read(file, "vram_mb: 100").vram_bytes == 100 * MIB
    assert read(file, "vram: 2097152").vram_bytes == 2 * MIB
    assert read(file, "id: a").vram_bytes is None


def test_a_file_of_comments_is_no_manifest(file: Path) -> None:
    file.write_text("# id: x\n\n")
    assert read_manifest(file) is None


def test_anchors_and_merge_keys_work(file: Path) -> None:
    manifest = read(file, "env: &a {X: '1'}\noptions: {<<: *a, Y: 2}\n")
    assert manifest.options == {"X": "1", "Y": 2}


def test_text_that_yaml_would_turn_into_something_else(file: Path) -> None:
    assert read(file, "id: 2024-01-01").id == "2024-01-01", "a date is text"
    assert read(file, "options: {a: 12:30, b: 010}").options == {"a": "12:30", "b": 8}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("id: a\nvrma: 3\n", ["m.yaml:2: unknown key 'vrma'; nearest is 'vram'"]),
        ("ID: a\n", ["m.yaml:1: unknown key 'ID'; nearest is 'id'"]),
        ("id: a\n\nid: b\n", ["m.yaml:3: key 'id' is given twice (first on line 1)"]),
        ("context: 8k\n", ["m.yaml:1: context: expected a whole number, got '8k'"]),
        ("context:\nparallel:\n", ["m.yaml:2: parallel: expected a whole number, got nothing"]),
        ("parallel: 0\n", ["m.yaml:1: parallel: must be between 1 and 256, got 0"]),
        ("vram_mb: 0\n", ["m.yaml:1: vram_mb: must be more than 0, got 0"]),
        ("gpu_layers: -1\n", ["m.yaml:1: gpu_layers: must be at least 0, got -1"]),
        ("pin: 1\n", ["m.yaml:1: pin: expected true or false, got 1"]),
        ("id: 12\n", ['m.yaml:1: id: expected text, got 12 (put it in quotes: "...")']),
        ("aliases: x\n", ["m.yaml:1: aliases: expected a list, got 'x'"]),
        ("aliases:\n  - ok\n  - 3\n", ['m.yaml:3: aliases.1: expected text, got 3 (put it in quotes: "...")']),
        ("options: 3\n", ["m.yaml:1: options: expected keys and values, got 3"]),
        ("env:\n  A: 1\n", ['m.yaml:2: env.A: expected text, got 1 (put it in quotes: "...")']),
        (
            "category: llmm\n",
            ["m.yaml:1: category: 'llmm' is not one of llm, embedding, rerank, vision; nearest is 'llm'"],
        ),
        ("vram: 1GiB\nvram_mb: 3\n", ["m.yaml:2: vram_mb: vram and vram_mb say the same thing: keep one of them"]),
        ("- a\n", ["m.yaml:1: expected keys and values, got a list"]),
        ("just text\n", ["m.yaml:1: expected keys and values, got a single value"]),
        ("? [a, b]\n: 1\n", ["m.yaml:1: a key must be text, got a list"]),
        ("path: ''\n", ["m.yaml:1: path: must not be empty"]),
    ],
)
def test_what_a_mistake_is_told(file: Path, text: str, expected: list[str]) -> None:
    assert problems(file, text) == expected


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("id: a\nvram: lots\n", ["m.yaml:2: vram: ", "'lots'", "20GiB"]),
        ("vram: -3\n", ["m.yaml:1: vram: ", "-3"]),
        ("vram: [1]\n", ["m.yaml:1: vram: ", "20GiB"]),
        ("stay_warm_s: soon\n", ["m.yaml:1: stay_warm_s: ", "'soon'", "5m"]),
        ("id: Foo Bar\n", ["m.yaml:1: id: ", "'foo-bar' would do"]),
        ("id: ../../etc/passwd\n", ["m.yaml:1: id: "]),
        ("aliases: ['b ad']\n", ["m.yaml:1: aliases.0: "]),
        ("env: {LLAMA_ARG_HOST: x}\n", ["m.yaml:1: env: LLAMA_ARG_HOST", "extra_args"]),
        ("env: {'A B': x}\n", ["m.yaml:1: env: 'A B'"]),
        ("id: [\n", ["m.yaml:2: not valid YAML: "]),
        ("id: a\n  b: c\n", ["m.yaml:2: not valid YAML: "]),
        ("id: \t@\n", ["m.yaml:1: not valid YAML: "]),
        ("id: \x01\n", ["m.yaml: not valid YAML: "]),
        ("id: *nobody\n", ["m.yaml:1: not valid YAML: ", "nobody"]),
        ("id: !!python/object:os.system x\n", ["m.yaml:1: not valid YAML: ", "python"]),
        ("a: &a [*a]\n", ["m.yaml:", "nested"]),
        ("[" * 5000, ["m.yaml: nested"]),
        ("context: " + "9" * 5000, ["m.yaml:1: value "]),
    ],
)
def test_the_gist_of_what_a_mistake_is_told(file: Path, text: str, parts: list[str]) -> None:
    (message,) = problems(file, text)
    for part in parts:
        assert part in message


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(file: Path) -> None:
    told = problems(file, "parallel: 0\ncontxt: 3\nvram: much\n")
    assert [line.split(":")[1] for line in told] == ["1", "2", "3"]


def test_repeated_anchors_cannot_blow_up(file: Path) -> None:
    levels = "".join(f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 9)}]\n" for level in range(1, 9))
    (message,) = problems(file, "l0: &l0 [x]\n" + levels)
    assert "more than 50000 values" in message


def test_files_that_are_none(file: Path, tmp_path: Path) -> None:
    for path, expected in ((tmp_path / "nowhere.yaml", "does not exist"), (tmp_path, "is a directory")):
        with pytest.raises(BadInput, match=expected):
            read_document(path)
    file.write_bytes(b"id: \xff\xfe")
    with pytest.raises(BadInput, match="not UTF-8"):
        read_document(file)
    file.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(BadInput, match="1,048,577 bytes"):
        read_document(file)


def test_the_id_of_a_broken_manifest_is_kept_where_it_can_be_told(file: Path) -> None:
    file.write_text("id: fine\nparallel: 0\n")
    assert id_of_broken(file) == "fine"
    file.write_text("id: Not Fine\n")
    assert id_of_broken(file) is None
    file.write_text("id: [")
    assert id_of_broken(file) is None


def test_ids_of_files_keep_the_quantisation() -> None:
    assert safe_id("Qwen2.5-0.5B-Instruct-Q4_K_M.gguf") == "qwen2.5-0.5b-instruct-q4_k_m"
    assert safe_id("My Model (final)!.GGUF") == "my-model-final"
    assert safe_id("..") == "model"


@given(st.text(max_size=300))
def test_any_file_name_gives_a_usable_id(name: str) -> None:
    assert check_id(safe_id(name)) == safe_id(name)
