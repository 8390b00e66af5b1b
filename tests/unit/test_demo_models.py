"""The demo models and their text as they lie in the repository: complete, small, the same in both formats.

What they answer is tested with a real engine in tests/integration/test_demo_answers.py.
"""

import json
import pathlib
import stat
import typing

import gguf
import numpy as np
import pytest
import safetensors.numpy

Json = dict[str, typing.Any]
DEMO = pathlib.Path(__file__).resolve().parents[2] / "demo"
MODELS = DEMO / "models"
MODEL_IDS = ("robin", "wren")
HF_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module", params=MODEL_IDS)
def model_id(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reader(model_id: str) -> gguf.GGUFReader:
    return gguf.GGUFReader(MODELS / f"{model_id}.gguf")


def test_a_scan_for_gguf_files_finds_exactly_the_demo_models() -> None:
    assert {path.name for path in MODELS.glob("*.gguf")} == {f"{model_id}.gguf" for model_id in MODEL_IDS}


def test_the_hugging_face_folder_is_complete(model_id: str) -> None:
    assert {path.name for path in (MODELS / f"{model_id}-hf").iterdir()} == HF_FILES


def test_weights_take_one_to_four_megabytes(model_id: str) -> None:
    for path in (MODELS / f"{model_id}.gguf", MODELS / f"{model_id}-hf" / "model.safetensors"):
        assert 1_000_000 <= path.stat().st_size <= 4_000_000, path


def test_every_file_is_readable_by_everybody() -> None:
    for path in MODELS.rglob("*"):
        if path.is_file():
            assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444, path


def test_licence_and_model_card_lie_beside_the_models() -> None:
    assert "Apache License" in (MODELS / "LICENSE").read_text("utf-8")
    card = (MODELS / "README.md").read_text("utf-8")
    assert all(model_id in card for model_id in MODEL_IDS)


def test_gguf_metadata_is_complete(reader: gguf.GGUFReader, model_id: str) -> None:
    config = _hf_json(model_id, "config.json")
    expected = {
        "general.architecture": "llama",
        "general.name": model_id.capitalize(),
        "general.license": "apache-2.0",
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": pytest.approx(config["rms_norm_eps"]),
        "llama.rope.freq_base": pytest.approx(config["rope_theta"]),
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.eot_token_id": config["eos_token_id"],
        "tokenizer.ggml.padding_token_id": config["pad_token_id"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _hf_json(model_id, "tokenizer_config.json")["chat_template"],
    }
    assert {key: _field(reader, key) for key in expected} == expected


def test_gguf_and_hugging_face_share_one_vocabulary(reader: gguf.GGUFReader, model_id: str) -> None:
    bpe = _hf_json(model_id, "tokenizer.json")["model"]
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]]
    assert {token: number for number, token in enumerate(tokens)} == bpe["vocab"]
    assert _field(reader, "tokenizer.ggml.merges") == merges


def test_special_tokens_are_marked_as_control_and_nothing_else_is(reader: gguf.GGUFReader, model_id: str) -> None:
    tokens, types = _field(reader, "tokenizer.ggml.tokens"), _field(reader, "tokenizer.ggml.token_type")
    marked = {token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL}
    specials = _hf_json(model_id, "special_tokens_map.json")
    assert marked == set(specials.values())
    assert tokens[_field(reader, "tokenizer.ggml.eos_token_id")] == specials["eos_token"]


def test_gguf_and_safetensors_hold_the_same_numbers(reader: gguf.GGUFReader, model_id: str) -> None:
    expected = safetensors.numpy.load_file(MODELS / f"{model_id}-hf" / "model.safetensors")
    heads = _hf_json(model_id, "config.json")["num_attention_heads"]
    found = {_hf_name(tensor.name): _as_hf(tensor, heads) for tensor in reader.tensors}
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert weight.dtype == np.float16, name
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


def test_the_two_models_have_different_weights() -> None:
    first, second = (
        safetensors.numpy.load_file(MODELS / f"{model_id}-hf" / "model.safetensors") for model_id in MODEL_IDS
    )
    assert not np.array_equal(first["model.norm.weight"], second["model.norm.weight"])


def test_the_text_has_sixty_subjects_with_three_phrasings_each() -> None:
    subjects = [entry for path in _known_files() for entry in _entries(path)]
    assert len(subjects) >= 60
    for entry in subjects:
        assert set(entry) == {"ask", "answer"}
        assert len(entry["ask"]) >= 3, entry["answer"]


def test_no_question_is_asked_twice() -> None:
    asks = [_bare(ask) for path in (DEMO / "text").glob("*.jsonl") for entry in _entries(path) for ask in entry["ask"]]
    assert len(asks) == len(set(asks)), sorted({ask for ask in asks if asks.count(ask) > 1})


def _known_files() -> list[pathlib.Path]:
    off_topic = {"fallback.jsonl", "held_out.jsonl"}
    return [path for path in sorted((DEMO / "text").glob("*.jsonl")) if path.name not in off_topic]


def _entries(path: pathlib.Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _bare(ask: str) -> str:
    return ask.lower().rstrip("?.!") or ask


def _hf_json(model_id: str, name: str) -> Json:
    content: Json = json.loads((MODELS / f"{model_id}-hf" / name).read_text("utf-8"))
    return content


def _field(reader: gguf.GGUFReader, key: str) -> typing.Any:
    field = reader.get_field(key)
    assert field is not None, f"the GGUF file has no {key}"
    return field.contents()


def _hf_name(name: str) -> str:
    match name.split("."):
        case ["token_embd", "weight"]:
            return "model.embed_tokens.weight"
        case ["output_norm", "weight"]:
            return "model.norm.weight"
        case ["blk", number, part, "weight"]:
            return f"model.layers.{number}.{BLOCK_NAMES[part]}.weight"
    raise AssertionError(f"unexpected tensor {name!r}")


def _as_hf(tensor: gguf.ReaderTensor, heads: int) -> np.ndarray:
    """The tensor's numbers; rows of queries and keys lie in pairs in GGUF, half a head apart in HF."""
    if "attn_q" not in tensor.name and "attn_k" not in tensor.name:
        return tensor.data
    return tensor.data.reshape(heads, -1, 2, tensor.data.shape[1]).swapaxes(1, 2).reshape(tensor.data.shape)
