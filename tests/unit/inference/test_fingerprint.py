"""What tells one definition of a model from another, and what does not."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuboss.devices import Device, DeviceKind
from inference.backends import REGISTRY
from inference.errors import ModelBroken
from inference.fingerprint import fingerprint
from inference.model import Category, Model

DEVICES = tuple(
    Device(f"GPU-{n}", DeviceKind.CUDA, f"gpu{n}", n, 1 << 30, 0, measured=False) for n in range(2)
)  # fmt: skip


class Place:
    """A program and a model file."""

    def __init__(self, root: Path) -> None:
        self.binary, self.file = root / "llama-server", root / "robin.gguf"
        self.binary.write_text("program")
        self.file.write_text("weights")
        self.model = Model(
            id="robin",
            category=Category.LLM,
            backend="llama-server",
            path=self.file,
            claim_bytes=100,
            claim_basis="a test",
            file_bytes=7,
            context=512,
        )

    def taken(self, *, gpus: int = 1, **changes: Any) -> str:
        shares = {device.id: 50 for device in DEVICES[:gpus]}
        return fingerprint(replace(self.model, **changes), REGISTRY["llama-server"], self.binary, shares, DEVICES)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"context": 1024},
        {"parallel": 2},
        {"gpu_layers": 3},
        {"options": {"flash_attn": "on"}},
        {"extra_args": ("--verbose",)},
        {"env": {"A": "b"}},
        {"chat_template": "another"},
        {"file_bytes": 8},
        {"gpus": 2},
    ],
)
def test_another_definition_is_another(place: Place, changes: dict[str, Any]) -> None:
    assert place.taken() == place.taken()
    assert place.taken(**changes) != place.taken()


@pytest.mark.parametrize("changes", [{"claim_bytes": 200}, {"pin": True}, {"stay_warm_s": 1.0}, {"aliases": ("a",)}])
def test_what_does_not_reach_the_engine_does_not_count(place: Place, changes: dict[str, Any]) -> None:
    assert place.taken(**changes) == place.taken()


@pytest.mark.parametrize("which", ["binary", "file"])
def test_a_file_that_was_changed_or_touched_is_another(place: Place, which: str) -> None:
    before = place.taken()
    path: Path = getattr(place, which)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    touched = place.taken()
    path.write_text("something else")
    assert len({before, touched, place.taken()}) == 3


def test_files_that_arguments_name_count_too(place: Place, tmp_path: Path) -> None:
    adapter = tmp_path / "lora.gguf"
    adapter.write_text("one")
    arguments = {"extra_args": ("--lora", str(adapter))}
    before = place.taken(**arguments)
    adapter.write_text("another")
    assert place.taken(**arguments) != before


def test_what_the_backend_cannot_do_has_none(place: Place) -> None:
    with pytest.raises(ModelBroken):
        place.taken(options={"no such": "option"})
