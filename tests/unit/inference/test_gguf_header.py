"""The header reader agrees with the gguf library on good files; it refuses bad ones with numbers, whatever they say."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import gguf
import pytest

from inference import gguf_header
from inference.gguf_header import TYPE_SIZES, BadGguf, HeaderCache, read_header
from tests.unit.inference.gguf_files import LLAMA, raw_gguf, raw_tensor, raw_text, write_gguf


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(BadGguf) as caught:
        read_header(path)
    return str(caught.value)


def test_it_reads_what_the_library_reads(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", vocabulary=300, chat_template=True)
    header, referee = read_header(path), gguf.GGUFReader(path)
    assert header.architecture == "llama"
    for key, value in LLAMA.items():
        assert header.number(key) == value == referee.fields[f"llama.{key}"].contents()
    assert header.vocabulary == len(referee.fields["tokenizer.ggml.tokens"].data) == 300
    assert header.tensor_count == len(referee.tensors)
    assert header.tensor_bytes == sum(int(tensor.n_bytes) for tensor in referee.tensors)
    assert header.file_bytes == path.stat().st_size
    assert header.has_chat_template
    assert header.split == (0, 1)


def test_it_knows_which_bytes_belong_to_which_block(tmp_path: Path) -> None:
    header = read_header(write_gguf(tmp_path / "m.gguf"))
    assert header.layer_bytes == dict.fromkeys(range(4), 64 * 32 * 2)
    assert header.tensor_bytes == 4 * 64 * 32 * 2 + 16 * 64 * 2


def test_type_sizes_are_the_librarys() -> None:
    assert {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()} == dict(TYPE_SIZES)


def test_values_per_layer_may_be_one_number_or_an_array(tmp_path: Path) -> None:
    header = read_header(write_gguf(tmp_path / "m.gguf", {**LLAMA, "attention.head_count_kv": [2, 0, 2, 0]}))
    assert header.per_layer("attention.head_count", 4) == (8, 8, 8, 8)
    assert header.per_layer("attention.head_count_kv", 4) == (2, 0, 2, 0)
    assert header.per_layer("attention.head_count_kv", 5) is None, "an array that is too short tells nothing"
    assert header.per_layer("attention.sliding_window", 4) is None


def test_a_large_vocabulary_is_stepped_over_and_not_kept(tmp_path: Path) -> None:
    header = read_header(write_gguf(tmp_path / "m.gguf", vocabulary=150_000))
    assert header.vocabulary == 150_000
    assert len(header.metadata) < 20
    assert not any(key.startswith("tokenizer.ggml.") and key != "tokenizer.ggml.model" for key in header.metadata)


def test_only_the_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "huge.gguf"
    elements = 1 << 32
    path.write_bytes(raw_gguf(tensors=raw_tensor("token_embd.weight", (elements,), kind=24), tensor_count=1))
    os.truncate(path, (1 << 32) + 4096)  # sparse
    reads: list[int] = []
    pread = os.pread

    def counted(descriptor: int, count: int, offset: int) -> bytes:
        data = pread(descriptor, count, offset)
        reads.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    assert read_header(path).tensor_bytes == elements
    assert reads
    assert sum(reads) <= 1 << 20


def test_a_file_cut_anywhere_is_truncated(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", chat_template=True).read_bytes()
    last_tensor_padding = 32
    cuts = {*range(4, 200), *range(200, len(whole) - last_tensor_padding, 97)}
    for cut in cuts:
        assert "truncated" in refusal(tmp_path / "cut.gguf", whole[:cut]), cut


def test_a_truncated_file_says_what_it_needs_and_has(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    message = refusal(tmp_path / "cut.gguf", whole[:-1000])
    assert f"{len(whole):,}" in message
    assert f"{len(whole) - 1000:,}" in message
    assert "download it again" in message


def test_flipped_bytes_are_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    chance = random.Random(7)
    refused = 0
    path = tmp_path / "flipped.gguf"
    for _ in range(1500):
        flipped = bytearray(whole)
        for _ in range(chance.choice((1, 1, 1, 4, 16))):
            flipped[chance.randrange(min(len(whole), 1400))] = chance.choice(
                (0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256))
            )
        path.write_bytes(flipped)
        try:
            header = read_header(path)
        except BadGguf:
            refused += 1
        else:
            assert header.tensor_bytes <= len(whole)
    assert 100 < refused < 1500, "both ways were taken"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty (0 bytes)"),
        (b"hello world", "not a GGUF file: it begins with 'hell', not with 'GGUF'"),
        (b"\x7fEL\n", r"not a GGUF file: it begins with '\x7fEL\n', not with 'GGUF'"),
        (b"\xff\x00'\x9b", r"""not a GGUF file: it begins with "\xff\x00'\x9b", not with 'GGUF'"""),
        (b"GG", "not a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version 1"),
        (b"GGUF" + struct.pack("<I", 99) + bytes(16), "version 99"),
        (raw_gguf(key_count=2**63), "9223372036854775808 keys"),
        (raw_gguf(tensor_count=2**63), "9223372036854775808 tensors"),
        (raw_gguf(key_count=1, keys=struct.pack("<Q", 2**62)), "a name of 4611686018427387904 bytes"),
        (raw_gguf(key_count=1, keys=raw_text("k") + struct.pack("<IIQ", 9, 8, 2**40)), "1099511627776 strings"),
        (raw_gguf(key_count=1, keys=raw_text("k") + struct.pack("<IIQ", 9, 4, 2**61)), "truncated"),
        (raw_gguf(key_count=1, keys=raw_text("k") + struct.pack("<IQ", 8, 2**63)), "truncated"),
        (raw_gguf(key_count=1, keys=raw_text("k") + struct.pack("<II", 77, 0)), "value type 77"),
        (raw_gguf(key_count=1, keys=raw_text("k") + struct.pack("<IIQ", 9, 9, 0)), "value type 9"),
        (raw_gguf(key_count=1, keys=raw_text("general.alignment") + struct.pack("<II", 4, 3)), "alignment 3"),
        (raw_gguf(key_count=1, keys=raw_text("general.alignment") + struct.pack("<II", 4, 0)), "alignment 0"),
        (raw_gguf(tensor_count=1, tensors=raw_text("t") + struct.pack("<I", 5) + bytes(64)), "5 dimensions"),
        (raw_gguf(tensor_count=1, tensors=raw_tensor("t", (2**40, 2**40))), "not possible"),
        (raw_gguf(tensor_count=1, tensors=raw_tensor("t", (32,), offset=2**63)), "not possible"),
        (raw_gguf(tensor_count=1, tensors=raw_tensor("t", (32,), offset=7)), "starts at 7, expected at 0"),
        (raw_gguf(tensor_count=1, tensors=raw_tensor("t", (33,), kind=2)), "rows of 33"),
        (raw_gguf(tensor_count=1, tensors=raw_tensor("t", (1 << 30,))), "truncated: its tensors need 2,147,483,"),
    ],
)
def test_what_a_bad_file_is_told(tmp_path: Path, content: bytes, expected: str) -> None:
    assert expected in refusal(tmp_path / "bad.gguf", content)


def test_more_blocks_than_any_model_has_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"block_count": 2_000_000_000}, tensors={"t": (4,)})
    with pytest.raises(BadGguf, match="2000000000 blocks"):
        read_header(path)


def test_an_unknown_quantisation_counts_by_the_files_size(tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(raw_gguf(tensor_count=1, tensors=raw_tensor("t", (32,), kind=4000)) + bytes(10_000))
    assert 9_900 <= read_header(path).tensor_bytes <= 10_000


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    with pytest.raises(BadGguf, match="is a directory"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(BadGguf, match="not a regular file"):
        read_header(tmp_path / "pipe.gguf")
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "nowhere.gguf")


def test_the_cache_reads_a_file_again_only_when_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    reads: list[Path] = []
    read = read_header

    def counted(path: Path) -> gguf_header.GgufHeader:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(gguf_header, "read_header", counted)
    cache = HeaderCache()
    assert cache.read(path) == cache.read(path)
    assert len(reads) == 1
    path.write_bytes(b"no longer one")
    for _ in range(2):
        with pytest.raises(BadGguf, match="not a GGUF file"):
            cache.read(path)
    assert len(reads) == 2
