"""Writes a model as GGUF and as a Hugging Face folder from the same f16 weights; `check` reads both back."""

import json
import pathlib
import typing

import gguf
import numpy as np
import safetensors.numpy

from demo_training import model, text, tokenizer

__all__ = ["Weights", "gguf_path", "hf_folder", "read_gguf", "read_hf", "write"]

Weights = dict[str, np.ndarray[typing.Any, np.dtype[np.float16]]]
"""Weights by their name in `model.Llama`."""

_MODE = 0o644  # safetensors would write files only their owner can read
_DESCRIPTION = "A tiny model that answers questions about Model Boss and GPU memory."
_LICENCE = "apache-2.0"
_BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_path(out: pathlib.Path, persona: text.Persona) -> pathlib.Path:
    """Where the GGUF file goes: directly in `out`, where a scan for *.gguf finds it."""
    return out / f"{persona.model_id}.gguf"


def hf_folder(out: pathlib.Path, persona: text.Persona) -> pathlib.Path:
    """Where the Hugging Face files go."""
    return out / f"{persona.model_id}-hf"


def write(out: pathlib.Path, persona: text.Persona, weights: Weights, tokenizer_json: str) -> None:
    """Write both forms below `out`, readable by everybody."""
    folder = hf_folder(out, persona)
    folder.mkdir(parents=True, exist_ok=True)
    shape = model.Shape()
    _write_gguf(gguf_path(out, persona), persona, shape, weights, tokenizer_json)
    named = {f"model.{name}": np.ascontiguousarray(weight) for name, weight in weights.items()}
    safetensors.numpy.save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_text(tokenizer_json, "utf-8")
    for name, content in _hf_settings(shape).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    for path in (gguf_path(out, persona), *folder.iterdir()):
        path.chmod(_MODE)


def read_hf(out: pathlib.Path, persona: text.Persona) -> tuple[Weights, str]:
    """Weights and tokenizer.json of a written model."""
    folder = hf_folder(out, persona)
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    named = {name.removeprefix("model."): weight for name, weight in weights.items()}
    return named, (folder / "tokenizer.json").read_text("utf-8")


def read_gguf(out: pathlib.Path, persona: text.Persona) -> Weights:
    """Weights of a written GGUF file under the names and in the order of rows that `model.Llama` has."""
    shape = model.Shape()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_path(out, persona)).tensors}
    weights: Weights = {}
    for name in model.Llama(shape).state_dict():
        data = tensors[_gguf_name(name)].data
        weights[name] = _uninterleave(data, shape.heads) if _is_rotated(name) else data
    return weights


def _write_gguf(
    path: pathlib.Path, persona: text.Persona, shape: model.Shape, weights: Weights, tokenizer_json: str
) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(persona.name)
    writer.add_description(_DESCRIPTION)
    writer.add_license(_LICENCE)
    writer.add_size_label("1M")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_vocab_size(shape.vocabulary)
    _add_tokenizer(writer, tokenizer_json)
    for name, weight in weights.items():
        data = _interleave(weight, shape.heads) if _is_rotated(name) else weight
        # llama.cpp wants norms in f32; the numbers stay those of the f16 weights.
        writer.add_tensor(_gguf_name(name), data.astype(np.float32) if data.ndim == 1 else data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer_json: str) -> None:
    vocabulary, merges = tokenizer.merges_of(tokenizer_json)
    special, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([special if token in tokenizer.SPECIALS else normal for token in vocabulary])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokenizer.BOS)
    writer.add_eos_token_id(tokenizer.EOS)
    writer.add_eot_token_id(tokenizer.EOS)
    writer.add_pad_token_id(tokenizer.PAD)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_chat_template(tokenizer.CHAT_TEMPLATE)


def _hf_settings(shape: model.Shape) -> dict[str, dict[str, typing.Any]]:
    pad, bos, eos = tokenizer.SPECIALS
    ids = {"bos_token_id": tokenizer.BOS, "eos_token_id": tokenizer.EOS, "pad_token_id": tokenizer.PAD}
    specials = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "float16",
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.feed_forward,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads,
            "head_dim": shape.head_size,
            "hidden_act": "silu",
            "max_position_embeddings": shape.context,
            "rms_norm_eps": shape.norm_epsilon,
            "rope_theta": shape.rope_theta,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            **ids,
        },
        "generation_config.json": {**ids, "do_sample": False},
        "special_tokens_map.json": specials,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shape.context,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": False,
            "add_eos_token": False,
            "chat_template": tokenizer.CHAT_TEMPLATE,
            **specials,
        },
    }


def _gguf_name(name: str) -> str:
    match name.removesuffix(".weight").split(".", maxsplit=2):
        case ["embed_tokens"]:
            return "token_embd.weight"
        case ["norm"]:
            return "output_norm.weight"
        case ["layers", number, part]:
            return f"blk.{number}.{_BLOCK_NAMES[part]}.weight"
    raise ValueError(f"no GGUF name for the weight {name!r}")


def _is_rotated(name: str) -> bool:
    return "q_proj" in name or "k_proj" in name


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp rotates them: pairs side by side instead of half a head apart."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _uninterleave(weight: np.ndarray, heads: int) -> np.ndarray:
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
