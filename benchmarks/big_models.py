"""Models whose loads take time, made of random numbers: what they say means nothing, how long they take does.

Used by `fairness.py`. They have the tokenizer and the chat template of a demo model, few layers and wide feed-forward
parts, so that nearly all of the file is read for every token and little is computed besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "demo" / "models" / "robin.gguf"
NAMES = ("amber", "beryl", "coral")
LAYERS, WIDTH, FEED_FORWARD, HEADS = 4, 1024, 7680, 8
CONTEXT = 2048
SIZE_BYTES = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * FEED_FORWARD) * 2
"""Of the layers' weights, in f16: 222 MB."""


def make_models(folder: Path, names: Sequence[str] = NAMES) -> list[Path]:
    """Write the models into the folder, `amber.gguf` and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_make(folder / f"{name}.gguf", seed) for seed, name in enumerate(names, start=1)]


def _make(path: Path, seed: int) -> Path:
    import gguf
    import numpy

    numbers = numpy.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    tokens = _copy_tokenizer(writer)
    writer.add_name(path.stem)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(tokens)
    square = (WIDTH, WIDTH)
    shapes = {"token_embd": (tokens, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.attn_{part}": square for part in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.ffn_{part}": (FEED_FORWARD, WIDTH) for part in ("gate", "up")}
        shapes[f"blk.{layer}.ffn_down"] = (WIDTH, FEED_FORWARD)
    norms = [f"blk.{layer}.{part}_norm" for layer in range(LAYERS) for part in ("attn", "ffn")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", numpy.ones(WIDTH, dtype=numpy.float32))
    for name, shape in shapes.items():
        weights = numbers.standard_normal(shape, dtype=numpy.float32) * 0.02
        writer.add_tensor(f"{name}.weight", weights.astype(numpy.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _copy_tokenizer(writer: object) -> int:
    """Everything a file says about its tokenizer; how many tokens there are."""
    import gguf

    assert isinstance(writer, gguf.GGUFWriter)
    fields = gguf.GGUFReader(TOKENIZER).fields
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    return len(fields["tokenizer.ggml.tokens"].contents())
