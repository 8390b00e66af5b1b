"""`import gpuboss` is cheap, loads nothing before it is used, and never touches a driver."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import gpuboss

ROOT = Path(__file__).resolve().parents[3]
_TIMED = """
import sys, time
began = time.perf_counter()
import {module}
print(time.perf_counter() - began)
"""


def _run(program: str) -> str:
    words = [sys.executable, "-c", program]
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def _loaded(program: str) -> set[str]:
    return set(_run(program + "\nimport sys; print(*sys.modules)").split())


def test_it_takes_less_than_redis() -> None:
    """Interleaved, so that a busy moment hits both; with slack, for it is two orders of magnitude."""
    seconds: dict[str, list[float]] = {"gpuboss": [], "redis": []}
    for _ in range(3):
        for module, found in seconds.items():
            found.append(float(_run(_TIMED.format(module=module))))
    ours, theirs = (statistics.median(found) for found in seconds.values())
    assert ours < theirs / 3, seconds


def test_it_loads_nothing() -> None:
    bare, loaded = _loaded(""), _loaded("import gpuboss")
    assert loaded - bare == {"gpuboss"}


def test_values_and_errors_come_without_redis() -> None:
    loaded = _loaded(
        "import gpuboss; gpuboss.LeaseRequest, gpuboss.WaitExpired, gpuboss.LedgerSettings, gpuboss.Device"
    )
    assert "gpuboss.leases" in loaded
    assert not {name for name in loaded if name.partition(".")[0] in ("redis", "asyncio")}


def test_nothing_it_offers_loads_a_driver_or_torch() -> None:
    loaded = _loaded("import gpuboss\nfor name in gpuboss.__all__: getattr(gpuboss, name)\nimport gpuboss.testing")
    assert {"gpuboss.session", "gpuboss.holding", "redis"} <= loaded
    assert not {"torch", "pynvml", "cupy", "jax", "gpuboss.devices.nvml"} & loaded


def test_everything_that_is_named_is_there_and_nothing_else() -> None:
    assert list(gpuboss.__all__) == sorted(gpuboss.__all__, key=lambda name: (name != "devices", name))
    for name in gpuboss.__all__:
        assert getattr(gpuboss, name) is not None
        assert name in dir(gpuboss)
    with pytest.raises(AttributeError, match="no attribute 'holt'"):
        gpuboss.holt  # noqa: B018  # type: ignore[attr-defined]


def test_the_typed_names_are_the_loaded_names() -> None:
    source = (ROOT / "gpuboss" / "__init__.py").read_text()
    typed = {line.split(" as ")[1] for line in source.splitlines() if line.startswith("    from gpuboss.")}
    assert typed == set(gpuboss.__all__)


@pytest.mark.parametrize(
    "first",
    ["import gpuboss", "import gpuboss.devices", "import gpuboss.holding", "from gpuboss.devices import Device"],
)
def test_devices_is_a_package_and_can_be_called(first: str) -> None:
    out = _run(f"{first}\nimport gpuboss\nprint(callable(gpuboss.devices), gpuboss.devices.Device.__name__)")
    assert out.split() == ["True", "Device"]
