"""What llama-server's last lines mean; those of accelerators are quoted from its sources, the others it has said."""

from __future__ import annotations

import pytest

from inference.backends.llama_faults import diagnose
from inference.fault import Fault
from inference.process import EndReason, Exited

EXITED = Exited(1, None, 1, EndReason.EXIT)
ABORTED = Exited(None, 6, 1, EndReason.EXIT)
LOADING_ENDS = [
    "0.00.015.104 E srv    load_model: failed to load model, 'robin.gguf'",
    "0.00.015.494 E srv  llama_server: exiting due to model loading error",
]


@pytest.mark.parametrize(
    "line",
    [
        "error: invalid argument: --no-such-thing",
        'error while handling argument "--ctx-size": stoi',
        'error while handling environment variable "LLAMA_ARG_N_PARALLEL": stoi',
        "error: the supplied chat template is not supported: {% bad",
        (
            "E llama_init_from_model: failed to initialize the context: quantized V cache was requested, but this "
            "requires Flash Attention"
        ),
        "0.00.009.165 E cmn  common_init_: failed to load lora adapter 'trunc.gguf'",
    ],
)
def test_arguments_it_does_not_understand(line: str) -> None:
    assert diagnose(EXITED, [line, "usage:"]) is Fault.BAD_ARGUMENTS


@pytest.mark.parametrize(
    "line",
    [
        (
            "E llama_model_load: error loading model: tensor 'token_embd.weight' data is not within the file bounds, "
            "model is corrupted or incomplete"
        ),
        "E llama_model_load: error loading model: unknown model architecture: 'xlama'",
        "E llama_model_load: error loading model: check_tensor_dims: tensor 'blk.3.ffn_up.weight' not found",
        "E gguf_init_from_reader: invalid magic characters: 'hell', expected 'GGUF'",
        "E gguf_init_from_file: failed to open GGUF file 'nope.gguf' (No such file or directory)",
    ],
)
def test_a_file_it_cannot_read(line: str) -> None:
    assert diagnose(EXITED, [line, *LOADING_ENDS]) is Fault.BAD_MODEL


def test_a_projector_it_cannot_read() -> None:
    assert diagnose(EXITED, ["E mtmd_init_from_file: error: Failed to load CLIP model from p.gguf"]) is Fault.BAD_MODEL


@pytest.mark.parametrize(
    "line",
    [
        "E ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 536870912",
        "E alloc_tensor_range: failed to allocate CPU buffer of size 536870912",
        "E ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 271855648",
        (
            "E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: "
            "out of memory"
        ),
        "E ggml_metal_buffer_init: error: failed to allocate buffer, size =  4096.00 MiB",
        "E llama_model_load: error loading model: unable to allocate ROCm0 buffer",
        "E llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
        "ggml_vulkan: Device memory allocation of size 1 failed. vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
        (
            "E ggml_metal_synchronize: error: command buffer 0 failed with status 5: Insufficient Memory "
            "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
        ),
        "E llama_model_load: error loading model: mmap failed: Cannot allocate memory",
    ],
)
def test_memory_it_did_not_get_while_it_loaded(line: str) -> None:
    assert diagnose(EXITED, [line, *LOADING_ENDS]) is Fault.OUT_OF_MEMORY


@pytest.mark.parametrize(
    "line", ["E CUDA error: out of memory", "E ROCm error: out of memory", "  what():  std::bad_alloc"]
)
def test_memory_it_did_not_get_while_it_served(line: str) -> None:
    assert diagnose(ABORTED, [line, "ggml-cuda.cu:109: CUDA error"]) is Fault.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("ended", "lines"),
    [
        (ABORTED, ["ggml.c:123: GGML_ASSERT(a->ne[0] == b->ne[0]) failed"]),
        (Exited(None, 11, 1, EndReason.EXIT), []),
        (Exited(0, None, 1, EndReason.EXIT), LOADING_ENDS),
        (EXITED, []),
        (EXITED, ["E srv         start: couldn't bind HTTP server socket, hostname: e.sock, port: 8080"]),
        (EXITED, ["E CUDA error: an illegal memory access was encountered"]),
        (EXITED, ["W WARNING: failed to allocate 512.00 MB of pinned memory"]),
        (ABORTED, ["error: this is what a GGML_ABORT may begin with"]),
    ],
)
def test_anything_else_is_a_crash(ended: Exited, lines: list[str]) -> None:
    assert diagnose(ended, lines) is Fault.CRASH


@pytest.mark.parametrize("why", ["Input/output error", "Stale file handle", "Connection timed out"])
def test_a_file_that_cannot_be_read_now_may_be_later(why: str) -> None:
    lines = [f"E gguf_init_from_file: failed to open GGUF file 'robin.gguf' ({why})", *LOADING_ENDS]
    assert diagnose(EXITED, lines) is Fault.CRASH
