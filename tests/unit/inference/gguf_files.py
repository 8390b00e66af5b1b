"""Small GGUF files for tests, written by the `gguf` library, which is the referee of our own reader."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

Values = Mapping[str, object]

LLAMA: Values = {
    "context_length": 4096,
    "embedding_length": 64,
    "block_count": 4,
    "feed_forward_length": 96,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
}
"""A model with grouped heads of 8."""


def write_gguf(
    path: Path,
    values: Values = LLAMA,
    *,
    architecture: str = "llama",
    vocabulary: int = 16,
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    norms: Mapping[str, tuple[int, ...]] | None = None,
    general: Values | None = None,
    chat_template: bool = False,
    spm: bool = False,
) -> Path:
    """Write a GGUF of f16 tensors, by default embeddings and one per block; `values` stand under the architecture.

    With `norms` (f32) and `spm` (a tokenizer) it can be whole enough for an engine.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (general or {}).items():
        _add(writer, key, value)
    for key, value in values.items():
        _add(writer, f"{architecture}.{key}", value)
    if spm:
        _add_sentencepiece(writer, vocabulary)
    elif vocabulary:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"token {number}" for number in range(vocabulary)])
        writer.add_token_scores([0.5] * vocabulary)
        writer.add_token_merges([f"m {number}" for number in range(vocabulary)])
    if chat_template:
        writer.add_chat_template("{{ messages }}" * 100)
    if tensors is None:
        blocks = values.get("block_count", 0)
        assert isinstance(blocks, int)
        tensors = {"token_embd.weight": (16, 64)} | {f"blk.{block}.ffn_up.weight": (64, 32) for block in range(blocks)}
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, dtype=np.float16))
    for name, shape in (norms or {}).items():
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sentencepiece(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    """A tokenizer that an engine accepts."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"t{number}" for number in range(vocabulary - 3))])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([2, 3, 3, *[1] * (vocabulary - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(value)


def raw_gguf(*, keys: bytes = b"", key_count: int = 0, tensors: bytes = b"", tensor_count: int = 0) -> bytes:
    """A file by hand, for lies that the library would not write."""
    return b"GGUF" + struct.pack("<IQQ", 3, tensor_count, key_count) + keys + tensors


def raw_text(text: str) -> bytes:
    """A string as GGUF stores it."""
    return struct.pack("<Q", len(text)) + text.encode()


def raw_tensor(name: str, shape: tuple[int, ...], *, kind: int = 1, offset: int = 0) -> bytes:
    """A tensor's description."""
    return raw_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
