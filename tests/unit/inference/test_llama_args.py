"""Which arguments of llama-server a manifest may give, and the ones it gets from us."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from gpuboss.devices import Device, DeviceKind
from inference.backends import Launch, llama_server
from inference.backends.llama_args import split
from inference.backends.llama_server import BACKEND, LlamaServerOptions
from inference.model import Category, Model

MODEL = Model("robin", Category.LLM, "llama-server", Path("/m/robin.gguf"), 1 << 30, "a test", 1 << 20, 4096)
MIB = 1 << 20
CARDS = tuple(Device(f"GPU-{n}", DeviceKind.CUDA, "card", n, 1 << 34, 0, measured=True) for n in range(3))


def argv(model: Model = MODEL, shares: dict[str, int] | None = None) -> str:
    """The arguments as one text."""
    place = Launch(
        Path("/bin/llama-server"), Path("/run/e.sock"), "key", shares or {"GPU-0": 100 * MIB}, CARDS, Path("/home/x")
    )
    return " ".join(BACKEND.command(model, place).argv) + " "


def test_both_spellings_of_a_value_become_two_arguments() -> None:
    assert split(["--temp=0.5", "--top-k", "40", "--min-p 0.1", "--seed", "-1", "-s", "-.5"]) == [
        *("--temp", "0.5", "--top-k", "40", "--min-p", "0.1", "--seed", "-1", "-s", "-.5")
    ]
    assert split(["--override-kv=a.b=int:1", "--jinja", "-ot", r"blk\..*=CPU"]) == [
        *("--override-kv", "a.b=int:1", "--jinja", "-ot", r"blk\..*=CPU")
    ]


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("--port=80", "Model Boss sets it itself"),
        ("--port 80", "Model Boss sets it itself"),
        ("--port", "Model Boss sets it itself"),
        ("--api_key=x", "Model Boss sets it itself"),
        ("-m", "the key 'path'"),
        ("--hf-repo=a/b", "the key 'path'"),
        ("--fim-qwen-7b-default", "the key 'path'"),
        ("--ctx_size=8", "the key 'context'"),
        ("-np=2", "the key 'parallel'"),
        ("--alias=gpt-4o", "the key 'id'"),
        ("--embeddings", "the key 'category'"),
        ("-ctk", "'cache_type_k' under options"),
        ("--rpc=a:1", "devices"),
    ],
)
def test_what_is_ours_is_refused_by_name_with_a_way_out(argument: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"extra_args: -+[a-z0-9-]+ is not yours to set.*{remedy}"):
        split(["--temp=1", argument])
    with pytest.raises(ValueError, match="not yours to set"):
        BACKEND.check_args([argument])


def test_every_option_of_ours_is_refused_as_an_argument() -> None:
    """Else one that is added to the command line could be given twice, and the manifest's would win."""
    given = {word for word in argv().split() if word.startswith("-")}
    for category in Category:
        model = replace(MODEL, category=category, mmproj=Path("/m/p.gguf"), chat_template="{{ x }}")
        given |= {word for word in argv(model, {"GPU-0": MIB, "GPU-1": MIB}).split() if word.startswith("--")}
    harmless = {"--no-ui"}
    for word in given - harmless:
        with pytest.raises(ValueError, match="not yours to set"):
            split([word])


def test_context_is_per_request() -> None:
    assert "--ctx-size 12288 --parallel 3 " in argv(replace(MODEL, parallel=3))


def test_layers_go_where_the_lease_is() -> None:
    assert "--gpu-layers 999 " in argv()
    assert "--gpu-layers 7 " in argv(replace(MODEL, gpu_layers=7))
    assert "--device none " in argv(shares={"elsewhere": 1})
    assert "--tensor-split" not in argv()
    assert "--tensor-split 300,100 " in argv(shares={"GPU-2": 100 * MIB, "GPU-1": 300 * MIB})


def test_small_models_get_one_thread_and_large_ones_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 16)
    monkeypatch.setattr(llama_server.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert "--threads 1 " in argv()
    assert "--threads 3 " in argv(replace(MODEL, file_bytes=150 * MIB))
    assert "--threads 8 " in argv(replace(MODEL, file_bytes=1 << 40))
    assert "--threads 5 " in argv(replace(MODEL, options={"threads": 5}))


def test_a_vision_model_gets_its_projector() -> None:
    assert "--mmproj /m/p.gguf " in argv(replace(MODEL, category=Category.VISION, mmproj=Path("/m/p.gguf")))


def test_an_embedding_model_takes_its_whole_input_at_once() -> None:
    text = argv(replace(MODEL, category=Category.EMBEDDING))
    assert "--embeddings --pooling mean " in text
    assert "--batch-size 4096 --ubatch-size 4096 " in text
    assert "--ubatch-size 8192 " in argv(replace(MODEL, category=Category.RERANK, context=1 << 17))


def test_a_template_is_a_file_or_a_text(tmp_path: Path) -> None:
    assert "--chat-template chatml " in argv(replace(MODEL, chat_template="chatml"))
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    assert f"--chat-template-file {file} " in argv(replace(MODEL, chat_template=str(file)))


@pytest.mark.parametrize(("written", "read"), [(True, "on"), (False, "off"), ("auto", "auto"), ("on", "on")])
def test_flash_attention_may_be_written_as_yaml_likes_it(written: object, read: str) -> None:
    assert LlamaServerOptions.model_validate({"flash_attn": written}).flash_attn == read
