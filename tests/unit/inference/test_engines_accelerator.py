"""Accelerators: what is chosen on machines with this or that hardware and compiler."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from inference.engines import errors
from inference.engines.accelerator import Accelerator, Tools, choose, detect, this_machine

NVIDIA = "GPU 0: NVIDIA H200 (UUID: GPU-1234)\nGPU 1: NVIDIA H200 (UUID: GPU-5678)\n"
AMD = "Agent 1\n  Name:                    AMD EPYC\nAgent 2\n  Name:                    gfx1100\n"


@dataclass
class Machine:
    """A pretended machine."""

    root: Path
    programs: dict[str, str] = field(default_factory=dict)
    """Name and output."""
    system: str = "Linux"

    def tools(self) -> Tools:
        return Tools(
            self.system,
            lambda name: f"/opt/{name}" if name in self.programs else None,
            lambda command: self.programs.get(command[0], ""),
            self.root,
        )

    def file(self, path: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).touch()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for variable in ("VULKAN_SDK", "CUDACXX", "CUDAARCHS", "HIPCXX"):
        monkeypatch.delenv(variable, raising=False)
    return Machine(tmp_path)


def test_a_bare_machine_computes_on_its_processor(machine: Machine) -> None:
    choice = detect(machine.tools())
    assert (choice.accelerator, choice.flags, choice.hint) == (Accelerator.CPU, (), None)


def test_nvidia_with_compiler_is_cuda_and_cmake_is_told_where_nvcc_is(machine: Machine) -> None:
    machine.programs = {"nvidia-smi": NVIDIA, "nvcc": ""}
    choice = detect(machine.tools())
    assert choice.accelerator is Accelerator.CUDA
    assert choice.flags == ("-DGGML_CUDA=ON",)
    assert choice.environment == {"CUDACXX": "/opt/nvcc"}
    assert "2 NVIDIA GPU(s) (NVIDIA H200)" in choice.why


def test_nvidia_without_compiler_is_the_processor_and_a_hint(machine: Machine) -> None:
    machine.programs = {"nvidia-smi": NVIDIA}
    choice = detect(machine.tools())
    assert choice.accelerator is Accelerator.CPU
    assert "nvcc" in str(choice.hint)
    assert "NVIDIA H200" in str(choice.hint)


def test_a_compiler_without_a_gpu_is_the_processor_without_a_word(machine: Machine) -> None:
    machine.programs = {"nvcc": "", "hipcc": "", "glslc": "", "nvidia-smi": ""}
    machine.file("usr/include/vulkan/vulkan.h")
    choice = detect(machine.tools())
    assert (choice.accelerator, choice.hint) == (Accelerator.CPU, None)


def test_amd_is_hip_for_the_chips_that_are_there(machine: Machine) -> None:
    machine.programs = {"rocminfo": AMD, "hipcc": "", "hipconfig": "/opt/rocm/llvm/bin\n"}
    choice = detect(machine.tools())
    assert choice.accelerator is Accelerator.HIP
    assert choice.flags == ("-DGGML_HIP=ON", "-DGPU_TARGETS=gfx1100")
    assert choice.environment is not None
    assert choice.environment["HIPCXX"] == "/opt/rocm/llvm/bin/clang"


def test_nvidia_without_nvcc_takes_vulkan_where_that_can_be_built(machine: Machine) -> None:
    machine.programs = {"nvidia-smi": NVIDIA, "glslc": ""}
    machine.file("dev/dri/renderD128")
    machine.file("usr/include/vulkan/vulkan.h")
    choice = detect(machine.tools())
    assert choice.accelerator is Accelerator.VULKAN
    assert choice.flags == ("-DGGML_VULKAN=ON",)
    assert "nvcc is missing" in str(choice.hint), "CUDA would be faster"


def test_a_render_node_without_compiler_is_not_worth_a_hint(machine: Machine) -> None:
    machine.file("dev/dri/renderD128")
    choice = detect(machine.tools())
    assert (choice.accelerator, choice.hint) == (Accelerator.CPU, None)


def test_macos_is_metal_unless_told_otherwise(machine: Machine) -> None:
    machine.system = "Darwin"
    assert detect(machine.tools()).accelerator is Accelerator.METAL
    assert choose(Accelerator.CPU, machine.tools()).flags == ("-DGGML_METAL=OFF",)


@pytest.mark.parametrize(
    ("accelerator", "words"),
    [
        (Accelerator.CUDA, "nvcc is missing"),
        (Accelerator.HIP, "hipcc is missing"),
        (Accelerator.VULKAN, "glslc is missing"),
        (Accelerator.METAL, "macOS only"),
    ],
)
def test_asking_for_what_cannot_be_built_says_what_to_install(
    machine: Machine, accelerator: Accelerator, words: str
) -> None:
    with pytest.raises(errors.AcceleratorMissing, match=words):
        choose(accelerator, machine.tools())


def test_asking_for_cuda_without_a_gpu_builds_it_for_elsewhere(machine: Machine) -> None:
    machine.programs = {"nvcc": ""}
    choice = choose(Accelerator.CUDA, machine.tools())
    assert choice.flags == ("-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=all-major")


def test_the_chips_a_user_names_are_built_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.programs = {"nvcc": "", "nvidia-smi": NVIDIA}
    monkeypatch.setenv("CUDAARCHS", "86;90")
    assert choose(Accelerator.CUDA, machine.tools()).flags[1] == "-DCMAKE_CUDA_ARCHITECTURES=86;90"


def test_the_real_machine_can_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = tmp_path / "nvidia-smi"
    answer.write_text("#!/bin/sh\necho 'GPU 0: Pretended (UUID: GPU-1)'\n")
    answer.chmod(0o755)
    (tmp_path / "nvcc").write_text("#!/bin/sh\n")
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    tools = this_machine()
    if tools.system == "Darwin":
        pytest.skip("macOS is always Metal")
    assert detect(tools).why == "1 NVIDIA GPU(s) (Pretended)"
