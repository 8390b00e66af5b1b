"""What we claim for a model is what llama-server then takes, by its own log and by its process's memory."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from gpuboss.units import GIB, MIB, parse_bytes
from inference.estimate import Claim, Room, Wish, claim
from inference.gguf_header import read_header
from tests.support import wait_until
from tests.unit.inference.gguf_files import write_gguf

VOCABULARY = 4000


@dataclass(frozen=True)
class Shape:
    """A model of f16 zeros, which loads and computes like a trained one."""

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    window: int = 0
    """With a sliding window it is a gemma3, else a llama."""

    def write(self, path: Path) -> Path:
        head = self.width // self.heads
        tensors = {"token_embd.weight": (VOCABULARY, self.width)}
        norms = {"output_norm.weight": (self.width,)}
        for layer in range(self.layers):
            block = f"blk.{layer}."
            norms |= {f"{block}{name}_norm.weight": (self.width,) for name in ("attn", "ffn")}
            tensors |= {
                f"{block}attn_q.weight": (self.width, self.width),
                f"{block}attn_k.weight": (head * self.kv_heads, self.width),
                f"{block}attn_v.weight": (head * self.kv_heads, self.width),
                f"{block}attn_output.weight": (self.width, self.width),
                f"{block}ffn_gate.weight": (self.inner, self.width),
                f"{block}ffn_up.weight": (self.inner, self.width),
                f"{block}ffn_down.weight": (self.width, self.inner),
            }
            if self.window:
                norms |= {f"{block}{name}_norm.weight": (self.width,) for name in ("post_attention", "post_ffw")}
                norms |= {f"{block}attn_{name}_norm.weight": (head,) for name in "qk"}
        values = {
            "context_length": 32768,
            "embedding_length": self.width,
            "block_count": self.layers,
            "feed_forward_length": self.inner,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.layer_norm_rms_epsilon": 1e-5,
        }
        if self.window:
            values |= {
                "attention.sliding_window": self.window,
                "attention.key_length": head,
                "attention.value_length": head,
            }
        architecture = "gemma3" if self.window else "llama"
        return write_gguf(
            path, values, architecture=architecture, vocabulary=VOCABULARY, tensors=tensors, norms=norms, spm=True
        )


@contextmanager
def engine(
    binary: Path, model: Path, folder: Path, arguments: Mapping[str, object]
) -> Iterator[tuple[psutil.Process, str]]:
    """A loaded llama-server and what it logged."""
    log = folder / "log"
    fixed: dict[str, object] = {"--model": model, "--host": folder / "e.sock", "--fit": "off", "-lv": 4, "--threads": 1}
    command = [str(binary), *(str(part) for pair in (fixed | arguments).items() for part in pair)]
    with log.open("wb") as sink, subprocess.Popen(command, stdout=sink, stderr=sink) as process:
        try:
            wait_until(
                lambda: "llama_server: listening on" in log.read_text() or process.poll() is not None,
                "the engine to load",
            )
            assert process.poll() is None, log.read_text()[-2000:]
            yield psutil.Process(process.pid), log.read_text()
        finally:
            process.kill()


def logged(log: str, what: str) -> float:
    """MiB of the buffers of that name in the engine's log."""
    return sum(float(size) for size in re.findall(rf"{what} buffer size = +([0-9.]+) MiB", log))


def said(made: Claim, what: str) -> float:
    """MiB of one part in the claim's own words."""
    return parse_bytes(made.basis.split(f"{what} ")[1].split(" ")[0]) / MIB


PLAIN = Shape(width=512, inner=1536, layers=4, heads=8, kv_heads=8)


@pytest.mark.parametrize(
    ("shape", "wish"),
    [
        (PLAIN, Wish(context=4096)),
        (PLAIN, Wish(context=4096, flash_attention=False)),
        (PLAIN, Wish(context=4096, cache_type_k="q8_0", cache_type_v="q8_0")),
        (Shape(width=512, inner=1024, layers=6, heads=8, kv_heads=2), Wish(context=8192, parallel=2)),
        (Shape(width=256, inner=2048, layers=3, heads=4, kv_heads=4), Wish(context=500, parallel=4)),
        (Shape(width=256, inner=512, layers=12, heads=4, kv_heads=2, window=512), Wish(context=16384, parallel=2)),
    ],
)
def test_the_claim_is_what_the_engine_takes(llama_server: Path, tmp_dir: Path, shape: Shape, wish: Wish) -> None:
    model = shape.write(tmp_dir / "m.gguf")
    made = claim((read_header(model),), 0, wish, Room(8 * GIB, "cpu"))
    arguments = {
        "--ctx-size": made.context * wish.parallel,
        "--parallel": wish.parallel,
        "--cache-ram": 0,
        "--cache-type-k": wish.cache_type_k,
        "--cache-type-v": wish.cache_type_v,
        "--flash-attn": "on" if wish.flash_attention else "off",
    }
    with engine(llama_server, model, tmp_dir, arguments) as (process, log):
        used = process.memory_info().rss
    assert said(made, "weights") == pytest.approx(logged(log, "model"), rel=0.02)
    assert said(made, "KV cache") == pytest.approx(logged(log, "KV"), rel=0.02)
    compute = logged(log, "compute")
    assert compute <= said(made, "compute") <= 2 * compute + 4
    assert used <= made.bytes <= 2.5 * used, "not too little, and not far too much"
