"""llama.cpp's `llama-server`: GGUF models of every category, on a unix socket of its own.

Registered in `backends/__init__.py`; which arguments a manifest may not give is in `llama_args.py`, what its last words
mean in `llama_faults.py`. The measurements behind the defaults are in docs/decisions/0005-starting-llama-server.md.

- `--opt value`, never `--opt=value`: llama-server does not know the latter.
- The key goes by environment: arguments can be read by every user of the machine.
- Its answers carry `--alias` as `model`; embeddings and rerank echo the request's `model` instead.
- After a stream it closes the connection without having announced it.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, Literal

import orjson
import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from gpuboss.devices import Device, DeviceKind
from gpuboss.units import MIB
from inference.backends import llama_args, llama_faults
from inference.backends.base import Command, Launch, Readiness, Routes
from inference.errors import EngineDied, LoadFailed, ModelBroken
from inference.fault import Fault
from inference.gguf_header import BadGguf, read_header
from inference.model import Category, Model
from inference.process import Exited
from inference.proxy import EngineClient
from inference.validation import Flag, Whole

__all__ = ["BACKEND", "LlamaServer", "LlamaServerOptions"]

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]

THREAD_BYTES: Final = 64 * MIB
"""Of weights are worth a thread: in smaller models threads wait for each other longer than they compute."""
MOST_DEFAULT_BATCH: Final = 8192
"""Tokens an embedding or rerank model takes at once unless told otherwise; its whole input has to fit."""

_GET, _POST = frozenset({"GET"}), frozenset({"POST"})
_INHERITED: Final = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR", "LANG")
_GPUS: Final = (DeviceKind.CUDA, DeviceKind.ROCM, DeviceKind.METAL)


class LlamaServerOptions(BaseModel):
    """What a manifest may say under `options:`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    flash_attn: Literal["on", "off", "auto"] = Field(default="auto", description="Flash attention.")
    cache_type_k: CacheType = Field(default="f16", description="Type of the KV cache's keys.")
    cache_type_v: CacheType = Field(
        default="f16", description="Type of the KV cache's values; other than f16 needs flash_attn."
    )
    batch_size: Whole | None = Field(default=None, ge=1, le=1 << 20, description="Most tokens per step of a prompt.")
    ubatch_size: Whole | None = Field(default=None, ge=1, le=1 << 20, description="Most tokens computed at once.")
    threads: Whole | None = Field(
        default=None, ge=1, le=1024, description="CPU threads; one per 64 MiB of weights, at most the physical cores."
    )
    threads_batch: Whole | None = Field(default=None, ge=1, le=1024, description="The same while a prompt is read.")
    pooling: Literal["mean", "cls", "last"] | None = Field(
        default=None, description="How an embedding model makes one vector of many; the file's own way, else mean."
    )
    cache_ram_mb: Whole = Field(
        default=0, ge=0, description="Host memory in MiB for earlier prompts; no lease accounts for it."
    )
    context_checkpoints: Whole = Field(
        default=1, ge=0, le=1024, description="Saved states per request of models with a sliding window."
    )
    warmup: Flag = Field(default=True, description="Compute once before the model counts as loaded.")

    @field_validator("flash_attn", mode="before")
    @classmethod
    def _yaml_reads_on_as_true(cls, value: object) -> object:
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


class LlamaServer:
    """The backend `llama-server`; see `backends.Backend` for what each member is for."""

    name: Final = "llama-server"
    categories: Final = frozenset({Category.LLM, Category.EMBEDDING, Category.RERANK, Category.VISION})
    options: Final = LlamaServerOptions
    stop_grace_s: Final = 0.0
    routes: Final[Routes] = {
        "/health": _GET,
        "/metrics": _GET,
        "/props": _GET,
        "/slots": _GET,
        "/lora-adapters": _GET,  # its POST changes the model for everybody; a request may say `lora` for itself
        "/v1/models": _GET,
        "/v1/chat/completions": _POST,
        "/v1/completions": _POST,
        "/v1/embeddings": _POST,
        "/v1/rerank": _POST,
        "/v1/reranking": _POST,
        "/v1/responses": _POST,
        "/v1/messages": _POST,
        "/v1/messages/count_tokens": _POST,
        "/v1/chat/completions/input_tokens": _POST,
        "/v1/responses/input_tokens": _POST,
        "/v1/audio/transcriptions": _POST,
        "/completion": _POST,
        "/embedding": _POST,
        "/rerank": _POST,
        "/infill": _POST,
        "/tokenize": _POST,
        "/detokenize": _POST,
        "/apply-template": _POST,
    }

    def check_args(self, extra_args: Sequence[str]) -> None:
        """ValueError, naming what to use instead, for an argument that is not the manifest's to set."""
        llama_args.split(extra_args)

    def command(self, model: Model, launch: Launch) -> Command:
        """See `Backend.command`."""
        try:
            options = LlamaServerOptions.model_validate(dict(model.options))
            extra_args = llama_args.split(model.extra_args)
        except (ValidationError, ValueError) as error:
            message = f"the manifest of '{model.id}' says what {self.name} cannot do: {error}"
            raise ModelBroken(message, fault=Fault.BAD_ARGUMENTS) from error
        argv = [
            *(str(launch.binary), "--host", str(launch.socket)),
            *("--model", str(model.path), "--alias", model.id),
            *("--ctx-size", str(model.context * model.parallel), "--parallel", str(model.parallel)),
            *("--fit", "off", "--offline", "--no-ui", "--slots", "--metrics", "--log-colors", "off"),
            *_device_args(model, launch),
            *_category_args(model, options),
            *_option_args(model, options),
            *extra_args,
        ]
        return Command(tuple(argv), _environment(model, launch))

    async def probe(self, engine: EngineClient) -> Readiness:
        """See `Backend.probe`."""
        try:
            response = await engine.open("GET", "/health")
            body = await response.read()
        except EngineDied:
            return Readiness(ready=False)
        match response.status:
            case 200:
                return Readiness(ready=True)
            case 503:
                return Readiness(ready=False)
            case status:
                message = f"the engine of '{engine.name}' answers /health with {status}: {body[:200]!r}"
                raise LoadFailed(message, fault=Fault.CRASH)

    async def progress(self, engine: EngineClient) -> Hashable | None:
        """See `Backend.progress`. It answers at once, but counts a prompt's tokens only after each `batch_size`."""
        response = await engine.open("GET", "/slots")
        body = await response.read()
        if response.status != 200:
            return None
        return tuple(_counts(slot) for slot in orjson.loads(body))

    def diagnose(self, ended: Exited, last_lines: Sequence[str]) -> Fault:
        """See `Backend.diagnose`."""
        return llama_faults.diagnose(ended, last_lines)


BACKEND = LlamaServer()


def _counts(slot: Mapping[str, Any]) -> Hashable:
    """Which request one of the engine's places works on, and its tokens so far; an idle one shows its last request."""
    made = sum(token["n_decoded"] for token in slot.get("next_token", ()))
    read = slot.get("n_prompt_tokens"), slot.get("n_prompt_tokens_processed")
    return slot["is_processing"], slot.get("id_task"), *read, made


def _device_args(model: Model, launch: Launch) -> list[str]:
    """Where the layers go. What is leased is all that is visible, in index order, see `_environment`."""
    gpus = [device for device in launch.leased if device.kind in _GPUS]
    if not gpus:
        return ["--device", "none"]  # also for `sim`, which plays a GPU with host memory
    args = ["--gpu-layers", "999" if model.gpu_layers is None else str(model.gpu_layers)]
    if len(gpus) > 1:
        args += ["--tensor-split", ",".join(str(launch.shares[device.id] // MIB) for device in gpus)]
    return args


def _category_args(model: Model, options: LlamaServerOptions) -> list[str]:
    args: list[str] = []
    if model.mmproj is not None:
        args += ["--mmproj", str(model.mmproj)]
    if model.chat_template is not None:
        # The registry turned what was a file into its path.
        is_file = model.chat_template.startswith("/") and os.path.isfile(model.chat_template)  # noqa: PTH113 (may be a text)
        args += ["--chat-template-file" if is_file else "--chat-template", model.chat_template]
    match model.category:
        case Category.EMBEDDING:
            pooling = options.pooling or ("mean" if not _pools_itself(model) else None)
            args += ["--embeddings", *(("--pooling", pooling) if pooling else ())]
        case Category.RERANK:
            args.append("--rerank")
        case Category.LLM | Category.VISION:
            pass
    return args


def _option_args(model: Model, options: LlamaServerOptions) -> list[str]:
    whole_input = model.category in (Category.EMBEDDING, Category.RERANK)
    batch = options.batch_size or (min(max(model.context, 512), MOST_DEFAULT_BATCH) if whole_input else None)
    ubatch = options.ubatch_size or (batch if whole_input else None)
    values: Mapping[str, object] = {
        "--flash-attn": options.flash_attn,
        "--cache-type-k": options.cache_type_k,
        "--cache-type-v": options.cache_type_v,
        "--batch-size": batch,
        "--ubatch-size": ubatch,
        "--threads": options.threads or _default_threads(model),
        "--threads-batch": options.threads_batch,
        "--cache-ram": options.cache_ram_mb,
        "--ctx-checkpoints": options.context_checkpoints,
    }
    args = [part for name, value in values.items() if value is not None for part in (name, str(value))]
    return args if options.warmup else [*args, "--no-warmup"]


def _default_threads(model: Model) -> int:
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = min(cores, len(os.sched_getaffinity(0)))
    return min(cores, 1 + model.file_bytes // THREAD_BYTES)


def _pools_itself(model: Model) -> bool:
    """Whether the file says how to make one vector of many; without, llama-server refuses the OpenAI endpoint."""
    try:
        return (read_header(model.path).number("pooling_type") or 0) > 0
    except (BadGguf, OSError):
        return False  # the engine will say what is wrong with the file


def _environment(model: Model, launch: Launch) -> dict[str, str]:
    """Nothing is inherited but what finds libraries and programs; a user's llama.cpp configuration must not count."""
    home = str(launch.home)
    return {
        **{name: os.environ[name] for name in _INHERITED if name in os.environ},
        # A thread that waits shall sleep: where others use the cores too, spinning made decoding 50 times slower.
        "OMP_WAIT_POLICY": "passive",
        **_visible(launch.leased),
        **model.env,
        "HOME": home,
        "XDG_CONFIG_HOME": home,
        "XDG_CACHE_HOME": home,
        "HF_HUB_OFFLINE": "1",
        "LLAMA_API_KEY": launch.api_key,
    }


def _visible(leased: Sequence[Device]) -> dict[str, str]:
    """The variables that hide every GPU that is not leased."""
    cuda = [device.id for device in leased if device.kind is DeviceKind.CUDA]
    rocm = [device.id for device in leased if device.kind is DeviceKind.ROCM]
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(cuda), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if not any(name.startswith("PCI-") for name in rocm):  # a card without a unique id cannot be named
        visible["ROCR_VISIBLE_DEVICES"] = ",".join(rocm)
    return visible
