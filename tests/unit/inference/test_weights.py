"""Where no engine's figures are to be had, tensors, then sizes, then names tell what a model takes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from gpuboss.units import GIB, MIB
from inference.safetensors_header import BadSafetensors, tensor_bytes
from inference.weights import by_name, weigh

DEMO = Path(__file__).parents[3] / "demo" / "models"


def safetensors(path: Path, header: object, data: int) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * data)
    return path


def tensor(begin: int, end: int) -> dict[str, object]:
    return {"dtype": "F16", "shape": [(end - begin) // 2], "data_offsets": [begin, end]}


def test_a_safetensors_model_weighs_what_its_tensors_do(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "a": tensor(0, 3 * MIB), "b": tensor(3 * MIB, 5 * MIB)}
    files = [safetensors(tmp_path / f"model-{n}.safetensors", header, 5 * MIB) for n in (1, 2)]
    weight = weigh(files, "whatever")
    assert weight is not None
    assert weight.bytes == 12 * MIB
    assert weight.basis == "tensors of its files 10MiB x 1.2"


def test_a_real_file_is_read(tmp_path: Path) -> None:
    file = DEMO / "robin-hf" / "model.safetensors"
    assert 0.99 * file.stat().st_size < tensor_bytes(file) < file.stat().st_size


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "a header of -1 bytes in a file of 0"),
        (struct.pack("<Q", 1 << 60) + b"{}", "a header of 1152921504606846976 bytes in a file of 10"),
        (struct.pack("<Q", 2) + b"{]", "no JSON"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "no JSON"),
        (struct.pack("<Q", 2) + b"[]", "no JSON object"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "lies at None of 0 bytes"),
    ],
)
def test_a_file_that_lies_is_refused_with_numbers(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(BadSafetensors, match=why):
        tensor_bytes(tmp_path / "m.safetensors")


@pytest.mark.parametrize("offsets", [[0, 11], [-1, 4], [5, 4], [0, 1 << 70], [0.5, 4], [0], "04"])
def test_a_tensor_outside_its_file_is_refused(tmp_path: Path, offsets: object) -> None:
    file = safetensors(tmp_path / "m.safetensors", {"a": {"data_offsets": offsets}}, 10)
    with pytest.raises(BadSafetensors, match="of 10 bytes"):
        tensor_bytes(file)


def test_a_folder_is_no_safetensors_file(tmp_path: Path) -> None:
    with pytest.raises(BadSafetensors, match="not a regular file"):
        tensor_bytes(tmp_path)


def test_a_file_that_is_not_whole_weighs_by_its_size(tmp_path: Path) -> None:
    file = safetensors(tmp_path / "m.safetensors", {"a": tensor(0, GIB)}, 10 * MIB)
    weight = weigh([file], "m-7b")
    assert weight is not None
    assert weight.bytes == pytest.approx(13 * MIB, rel=0.001)
    assert weight.basis == "file 10MiB x 1.3"


def test_a_gguf_file_has_a_smaller_factor(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"\0" * 10 * MIB)
    weight = weigh([file], "m")
    assert weight is not None
    assert (weight.bytes, weight.basis) == (11 * MIB, "file 10MiB x 1.1")


@pytest.mark.parametrize(
    ("name", "billions", "bits"),
    [
        ("llama-2-7b.Q4_K_M.gguf", 7, 5),
        ("Mixtral-8x7B-Instruct-v0.1-Q5_K_M.gguf", 8 * 7 * 5 / 6, 6),
        ("Qwen3-30B-A3B-IQ4_XS.gguf", 30, 5),
        ("Meta-Llama-3.1-8B-Instruct", 8, 16),
        ("qwen2.5-0.5b-instruct-q8_0.gguf", 0.5, 9),
        ("gemma-3-270m-it-F16.gguf", 0.27, 16),
        ("gpt-oss-20b-mxfp4.gguf", 20, 5),
        ("some_13b_f32", 13, 32),
    ],
)
def test_a_name_tells_parameters_and_bits(name: str, billions: float, bits: int) -> None:
    weight = by_name(name)
    assert weight is not None
    assert weight.bytes == pytest.approx(billions * 1e9 * bits / 8 * 1.2, rel=0.001)
    assert f"of {bits} bits x 1.2" in weight.basis


@pytest.mark.parametrize("name", ["phi-3-mini-4k", "tinystories", "model-v0.1", "a3b", "qwen2.5"])
def test_a_name_without_a_size_tells_nothing(name: str) -> None:
    assert by_name(name) is None


def test_what_is_not_there_is_weighed_by_its_name(tmp_path: Path) -> None:
    weight = weigh([tmp_path / "gone-7b-q4_0.gguf"], "gone-7b-q4_0.gguf")
    assert weight is not None
    assert weight.basis == "7b in its name: 7e9 parameters of 5 bits x 1.2"
    assert weigh([tmp_path / "gone.gguf"], "gone.gguf") is None
