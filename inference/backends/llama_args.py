"""Which of llama-server's arguments a manifest may not give by `extra_args`, and what to say instead.

Called by `llama_server.py`. What is not in the table passes: `extra_args` come from the owner of the manifest, never
from requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["split"]

_OURS = "Model Boss sets it itself"

_OWNED: Final[Mapping[str, tuple[str, ...]]] = {
    "use the key 'path'": (
        *(
            "-m",
            "--model",
            "-mu",
            "--model-url",
            "-dr",
            "--docker-repo",
            "-hf",
            "-hfr",
            "--hf-repo",
            "-hff",
            "--hf-file",
        ),
        *("--models-dir", "--models-preset", "--models-max", "--models-autoload", "--no-models-autoload"),
    ),
    "use the key 'mmproj'": (
        *("-mm", "--mmproj", "-mmu", "--mmproj-url", "--mmproj-auto", "--no-mmproj", "--no-mmproj-auto"),
    ),
    "use the key 'id'": ("-a", "--alias"),
    "use the key 'context'": ("-c", "--ctx-size", "--kv-unified-per-slot"),
    "use the key 'parallel'": ("-np", "--parallel"),
    "use the key 'gpu_layers'": ("-ngl", "--gpu-layers", "--n-gpu-layers"),
    "use the key 'chat_template'": ("--chat-template", "--chat-template-file"),
    "use the key 'category'": ("--embedding", "--embeddings", "--rerank", "--reranking"),
    "use the key 'stay_warm_s'": ("--sleep-idle-seconds",),
    "use 'flash_attn' under options": ("-fa", "--flash-attn"),
    "use 'cache_type_k' under options": ("-ctk", "--cache-type-k"),
    "use 'cache_type_v' under options": ("-ctv", "--cache-type-v"),
    "use 'batch_size' under options": ("-b", "--batch-size"),
    "use 'ubatch_size' under options": ("-ub", "--ubatch-size"),
    "use 'threads' under options": ("-t", "--threads"),
    "use 'threads_batch' under options": ("-tb", "--threads-batch"),
    "use 'pooling' under options": ("--pooling",),
    "use 'cache_ram_mb' under options": ("-cram", "--cache-ram"),
    "use 'context_checkpoints' under options": ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"),
    "use 'warmup' under options": ("--warmup", "--no-warmup"),
    "its devices are those of its lease": (
        *("-dev", "--device", "-ts", "--tensor-split", "-mg", "--main-gpu", "--rpc"),
        *("-fit", "--fit", "-fitt", "--fit-target", "-fitc", "--fit-ctx"),
    ),
    _OURS: (
        *("--host", "--port", "--reuse-port", "--api-key", "--api-key-file", "--api-prefix", "--path"),
        *("--ssl-key-file", "--ssl-cert-file", "--slots", "--no-slots", "--metrics", "--offline"),
        *("--log-file", "--log-disable", "--log-colors"),
    ),
}
_REMEDIES: Final = {name: remedy for remedy, names in _OWNED.items() for name in names}
_DOWNLOADS: Final = re.compile(r"--(?:embd|fim|gpt-oss|vision)-.*-(?:default|spec)")
"""Options that stand for a model from the internet."""
_NUMBER: Final = re.compile(r"-\.?\d")


def split(extra_args: Sequence[str]) -> list[str]:
    """The arguments as llama-server wants them: `--opt=value` and `--opt value` both become two.

    Raises:
        ValueError: one is not the manifest's to set; says what to use instead.
    """
    result: list[str] = []
    for argument in extra_args:
        if not argument.startswith("-") or _NUMBER.match(argument):
            result.append(argument)
            continue
        name, *value = re.split(r"[=\s]", argument, maxsplit=1)
        # llama-server takes `--ctx_size` for `--ctx-size`.
        name = name.replace("_", "-") if name.startswith("--") else name
        remedy = "use the key 'path'" if _DOWNLOADS.fullmatch(name) else _REMEDIES.get(name)
        if remedy is not None:
            raise ValueError(f"extra_args: {name} is not yours to set: {remedy}")
        result += [name, *(text.strip() for text in value)]
    return result
