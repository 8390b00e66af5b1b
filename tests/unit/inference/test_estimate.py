"""Claims add up as llama-server allocates, contexts fit, and what the owner said wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuboss.units import GIB, MIB, parse_bytes
from inference.estimate import Claim, Peak, Room, Seen, Wish, claim
from inference.gguf_header import GgufHeader, read_header
from tests.unit.inference.gguf_files import LLAMA, write_gguf

F16 = 2


def header(path: Path, architecture: str = "llama", **values: object) -> GgufHeader:
    keys = {**LLAMA, **{key.replace("__", "."): value for key, value in values.items()}}
    return read_header(write_gguf(path / "m.gguf", keys, architecture=architecture))


def cache_of(made: Claim) -> int:
    """The KV cache in a claim's own words, which are rounded."""
    return parse_bytes(made.basis.split("KV cache ")[1].split(" ")[0])


def about(size: float) -> Any:
    return pytest.approx(size, rel=0.01)


def large(path: Path, architecture: str = "llama", **values: object) -> GgufHeader:
    """A model whose cache is worth measuring: 32 layers, 8 key and value heads of 128."""
    shape: dict[str, object] = {
        "block_count": 32,
        "embedding_length": 4096,
        "attention.head_count": 32,
        "attention.head_count_kv": 8,
        "context_length": 131072,
    }
    return header(path, architecture, **{**shape, **values})


def test_the_cache_is_layers_times_heads_times_context(tmp_path: Path) -> None:
    made = claim((large(tmp_path),), 0, Wish(context=8192), None)
    assert cache_of(made) == about(8192 * 32 * 8 * (128 + 128) * F16)


def test_parallel_requests_each_have_their_context(tmp_path: Path) -> None:
    one = claim((large(tmp_path),), 0, Wish(context=4096), None)
    four = claim((large(tmp_path),), 0, Wish(context=4096, parallel=4), None)
    assert cache_of(four) == about(4 * cache_of(one))
    assert four.context == 4096, "context is per request"
    assert four.bytes > one.bytes


def test_a_quantised_cache_is_smaller(tmp_path: Path) -> None:
    small = claim((large(tmp_path),), 0, Wish(context=4096, cache_type_k="q8_0", cache_type_v="q4_0"), None)
    assert cache_of(small) == about(4096 * 32 * 8 * 128 * (34 / 32 + 18 / 32))


def test_heads_may_be_of_another_size_than_their_share_of_the_width(tmp_path: Path) -> None:
    values = {"attention.key_length": 256, "attention.value_length": 64}
    made = claim((large(tmp_path, **values),), 0, Wish(context=4096), None)
    assert cache_of(made) == about(4096 * 32 * 8 * (256 + 64) * F16)


def test_layers_without_key_heads_have_no_cache(tmp_path: Path) -> None:
    made = claim((large(tmp_path, **{"attention.head_count_kv": [8, 0, 0, 0] * 8}),), 0, Wish(context=4096), None)
    assert cache_of(made) == about(4096 * 8 * 8 * 256 * F16)


@pytest.mark.parametrize("told", [{}, {"attention.sliding_window_pattern": 6}, {"pattern": True}])
def test_sliding_windows_keep_little(tmp_path: Path, told: dict[str, object]) -> None:
    values: dict[str, object] = {"block_count": 24, "attention.sliding_window": 1024}
    values |= {"attention.sliding_window_pattern": [True] * 5 + [False]} if told.pop("pattern", None) else told
    if isinstance(values.get("attention.sliding_window_pattern"), list):
        values["attention.sliding_window_pattern"] = ([True] * 5 + [False]) * 4
    made = claim((large(tmp_path, "gemma3", **values),), 0, Wish(context=32768), None)
    per_cell = 8 * 256 * F16
    assert cache_of(made) == about((4 * 32768 + 20 * (1024 + 512)) * per_cell)


def test_a_latent_cache_holds_one_vector_for_keys_and_values(tmp_path: Path) -> None:
    values = {"attention.key_length": 576, "attention.value_length": 512, "attention.key_length_mla": 192}
    values |= {"attention.value_length_mla": 128, "attention.head_count_kv": 1}
    made = claim((large(tmp_path, "deepseek2", **values),), 0, Wish(context=4096), None)
    assert cache_of(made) == about(4096 * 32 * 576 * F16)


def test_recurrent_layers_have_a_state_instead(tmp_path: Path) -> None:
    values = {"ssm.conv_kernel": 4, "ssm.inner_size": 4096, "ssm.state_size": 128, "ssm.group_count": 16}
    made = claim((large(tmp_path, "qwen3next", **values),), 0, Wish(context=4096, parallel=2), None)
    assert cache_of(made) == about(2 * 4096 * 8 * 8 * 256 * F16), "one layer in four"
    state = 2 * 24 * (3 * (4096 + 2 * 16 * 128) + 4096 * 128) * 4
    assert f"recurrent state {state / MIB:.1f}MiB" in made.basis


def test_an_encoder_keeps_nothing(tmp_path: Path) -> None:
    made = claim((large(tmp_path, "bert", **{"attention.causal": False}),), 0, Wish(context=512), None)
    assert "KV cache 0B" in made.basis


def test_parts_and_projector_are_counted(tmp_path: Path) -> None:
    one = header(tmp_path)
    alone = claim((one,), 0, Wish(context=512), None).bytes
    assert claim((one, one), 5 * MIB, Wish(context=512), None).bytes >= alone + 5 * MIB
    assert "projector 5MiB" in claim((one,), 5 * MIB, Wish(), None).basis


def test_layers_kept_off_the_device_are_not_claimed_there(tmp_path: Path) -> None:
    model = large(tmp_path)
    whole = claim((model,), 0, Wish(context=8192), Room(80 * GIB, "cuda"))
    half = claim((model,), 0, Wish(context=8192, gpu_layers=16), Room(80 * GIB, "cuda"))
    assert cache_of(half) == about(cache_of(whole) / 2)
    assert "16 of 32 layers" in half.basis
    on_host = claim((model,), 0, Wish(context=8192, gpu_layers=16), Room(80 * GIB, "cpu"))
    assert cache_of(on_host) == cache_of(whole), "host memory holds all of them"


def test_layers_kept_off_an_accelerator_are_claimed_of_host_memory(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": (1000, 4096)} | {f"blk.{block}.ffn_up.weight": (4096, 1000) for block in range(32)}
    file = write_gguf(
        tmp_path / "m.gguf",
        {
            "block_count": 32,
            "embedding_length": 4096,
            "attention.head_count": 32,
            "attention.head_count_kv": 8,
            "context_length": 131072,
        },
        tensors=tensors,
    )
    model, card = read_header(file), Room(80 * GIB, "cuda")
    whole = claim((model,), 0, Wish(context=8192), card)
    most = claim((model,), 0, Wish(context=8192, gpu_layers=24), card)
    none = claim((model,), 0, Wish(context=8192, gpu_layers=0), card)
    layer_bytes = 4096 * 1000 * F16 + 8192 * 8 * 256 * F16
    assert whole.host_bytes == 0
    # Nine of 32 layers and the embeddings, and buffers to compute with.
    assert most.host_bytes == about(9 * layer_bytes + 4096 * 1000 * F16 + 41 * MIB)
    assert none.bytes < 600 * MIB, "the driver's own and buffers"
    assert none.host_bytes > 32 * layer_bytes
    assert claim((model,), 0, Wish(context=8192, gpu_layers=24), Room(80 * GIB, "cpu")).host_bytes == 0


def test_a_driver_takes_more_than_a_host_process(tmp_path: Path) -> None:
    model = header(tmp_path)
    assert claim((model,), 0, Wish(), Room(GIB, "cuda")).bytes > claim((model,), 0, Wish(), Room(GIB, "cpu")).bytes


def test_a_file_that_tells_nothing_counts_by_its_size(tmp_path: Path) -> None:
    model = read_header(write_gguf(tmp_path / "m.gguf", {"context_length": 512}, tensors={"t": (1000, 1000)}))
    made = claim((model,), 0, Wish(), None)
    assert model.file_bytes * 1.1 <= made.bytes <= model.file_bytes * 1.1 + MIB
    assert "x 1.1" in made.basis


def test_the_default_context_is_what_it_was_trained_for_up_to_32k(tmp_path: Path) -> None:
    assert claim((header(tmp_path, context_length=1000),), 0, Wish(), None).context == 1000
    assert claim((large(tmp_path),), 0, Wish(), None).context == 32768
    assert claim((large(tmp_path),), 0, Wish(), Room(900 * GIB, "sim")).context == 32768


@pytest.mark.parametrize("room_mib", [1000, 1234, 2048, 3000, 4000])
def test_the_default_context_is_the_largest_that_fits_alone(tmp_path: Path, room_mib: int) -> None:
    model, room = large(tmp_path), Room(room_mib * MIB, "sim")
    made = claim((model,), 0, Wish(), room)
    assert 2048 < made.context < 32768
    assert made.context % 256 == 0
    assert made.bytes <= room.bytes
    assert claim((model,), 0, Wish(context=made.context + 256), room).bytes > room.bytes


def test_the_default_context_respects_the_owners_vram(tmp_path: Path) -> None:
    made = claim((large(tmp_path),), 0, Wish(vram_bytes=GIB), Room(80 * GIB, "cuda"))
    assert made.bytes == GIB
    assert made.context < 8192
    assert not made.warnings


def test_what_does_not_fit_at_all_keeps_a_usable_context(tmp_path: Path) -> None:
    made = claim((large(tmp_path),), 0, Wish(), Room(100 * MIB, "sim"))
    assert made.context == 2048
    assert made.bytes > 100 * MIB, "the scheduler refuses it with these numbers"


def test_a_vram_below_the_estimate_is_a_warning_with_both_numbers(tmp_path: Path) -> None:
    made = claim((large(tmp_path),), 0, Wish(vram_bytes=64 * MIB, context=8192), None)
    assert made.bytes == 64 * MIB, "the owner decides"
    (warning,) = made.warnings
    assert "64MiB is less than the estimate of 1." in warning
    assert "KV cache 1GiB" in warning


def seen(size: int, loads: int = 1, host: int = 0) -> Seen:
    """The same was seen whatever the context."""
    return lambda _: Peak(size, loads, host)


def test_what_was_seen_to_be_more_raises_the_claim_at_once(tmp_path: Path) -> None:
    guess = claim((large(tmp_path),), 0, Wish(context=8192), None)
    made = claim((large(tmp_path),), 0, Wish(context=8192), None, seen(3 * GIB))
    assert made.bytes == 3226 * MIB, "with a margin of 5 %"
    assert made.basis.startswith("learned: 3GiB at most in its last load + 5 % (estimate: ")
    assert guess.basis in made.basis


def test_what_was_seen_to_be_less_lowers_the_claim_from_the_third_load_on(tmp_path: Path) -> None:
    card = Room(80 * GIB, "cuda")
    guess = claim((large(tmp_path),), 0, Wish(context=8192), card)
    early = claim((large(tmp_path),), 0, Wish(context=8192), card, seen(GIB, loads=2))
    assert early.bytes == guess.bytes
    assert early.basis.endswith("learned: 1GiB at most in the last 2 loads + 5 %, which is less")
    late = claim((large(tmp_path),), 0, Wish(context=8192), card, seen(GIB, loads=3))
    assert late.bytes == 1076 * MIB
    assert late.basis.startswith("learned: 1GiB at most in the last 3 loads + 5 %")


def test_host_memory_that_nobody_touched_yet_is_claimed_all_the_same(tmp_path: Path) -> None:
    host = Room(80 * GIB, "cpu")
    made = claim((large(tmp_path),), 0, Wish(context=8192), host, seen(100 * MIB, loads=9))
    assert made.bytes == about(8192 * 32 * 8 * 256 * F16 + 41 * MIB), "weights are small here: it is cache and buffers"
    assert "not less than the 1GiB of weights, cache and buffers" in made.basis


def test_small_peaks_have_a_margin_too(tmp_path: Path) -> None:
    made = claim((header(tmp_path),), 0, Wish(context=512), Room(GIB, "cuda"), seen(10 * MIB, loads=5))
    assert made.bytes == 18 * MIB


def test_what_the_host_part_was_seen_to_take_counts_in_the_same_way(tmp_path: Path) -> None:
    wish, card = Wish(context=8192, gpu_layers=16), Room(80 * GIB, "cuda")
    guess = claim((large(tmp_path),), 0, wish, card)
    assert claim((large(tmp_path),), 0, wish, card, seen(GIB, 1, 4 * GIB)).host_bytes == 4301 * MIB
    assert claim((large(tmp_path),), 0, wish, card, seen(GIB, 1, 4 * MIB)).host_bytes == guess.host_bytes
    assert claim((large(tmp_path),), 0, wish, card, seen(GIB, 3, 400 * MIB)).host_bytes == 420 * MIB


def test_of_the_owners_vram_and_what_was_seen_the_larger_counts(tmp_path: Path) -> None:
    generous = claim((large(tmp_path),), 0, Wish(vram_bytes=8 * GIB, context=8192), None, seen(3 * GIB, 5))
    assert generous.bytes == 8 * GIB
    assert generous.basis.startswith("vram in the manifest (learned: 3GiB at most in the last 5 loads")
    assert not generous.warnings
    small = claim((large(tmp_path),), 0, Wish(vram_bytes=2 * GIB, context=8192), None, seen(3 * GIB, 5))
    assert small.bytes == 3226 * MIB
    assert small.basis == "learned: 3GiB at most in the last 5 loads + 5 %; vram in the manifest is 2GiB"
    (warning,) = small.warnings
    assert (
        "2GiB is less than the 3GiB it was seen to take at most in the last 5 loads, so 3.2GiB are claimed" in warning
    )


def test_a_vram_below_the_estimate_that_proved_enough_is_no_warning(tmp_path: Path) -> None:
    card = Room(80 * GIB, "cuda")
    made = claim((large(tmp_path),), 0, Wish(vram_bytes=GIB, context=8192), card, seen(800 * MIB, 3))
    assert made.bytes == GIB
    assert not made.warnings


def test_a_default_context_shrinks_where_the_model_took_more_than_fits_alone(tmp_path: Path) -> None:
    model, room = large(tmp_path), Room(2 * GIB, "cuda")
    guess = claim((model,), 0, Wish(), room)

    def beyond(context: int) -> Peak | None:
        return Peak(guess.bytes + 200 * MIB, 1) if context == guess.context else None

    made = claim((model,), 0, Wish(), room, beyond)
    assert made.context < guess.context
    assert made.bytes <= room.bytes
    assert f"that it took beyond its estimate with {guess.context} tokens" in made.basis
    asked = claim((model,), 0, Wish(context=guess.context), room, beyond)
    assert asked.context == guess.context, "what the owner asks for is refused with numbers, not changed"
    assert asked.bytes > room.bytes
    again = claim((model,), 0, Wish(), room, lambda context: beyond(context) or Peak(GIB, 3))
    assert again.context == made.context
    assert again.basis.startswith("learned: 1GiB"), "the shorter context has figures of its own by then"


def test_a_context_beyond_the_trained_one_is_a_warning(tmp_path: Path) -> None:
    made = claim((header(tmp_path),), 0, Wish(context=8192), None)
    assert made.warnings == ("context 8192 is more than the 4096 tokens the model was trained for",)
    assert made.context == 8192
