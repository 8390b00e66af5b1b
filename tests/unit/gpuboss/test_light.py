"""The values of modules that every engine start waits for, and that those modules stay light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuboss.identity import ProcessIdentity

ROOT = Path(__file__).resolve().parents[3]
HEAVY = {
    "argparse",
    "asyncio",
    "dataclasses",
    "inspect",
    "logging",
    "pathlib",
    "redis",
    "socket",
    "subprocess",
    "tempfile",
    "typing",
    "uuid",
}
"""Each costs milliseconds that a caller would wait for at every load."""


@pytest.mark.parametrize("module", ["gpuboss.node_ledger", "gpuboss.holders", "gpuboss.identity", "gpuboss.errors"])
def test_what_the_shim_imports_brings_nothing_heavy_along(module: str) -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {module}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert module in loaded
    assert not loaded & HEAVY
    assert not [name for name in loaded if name.startswith("gpuboss.devices")]


def test_the_package_itself_imports_nothing() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); old = set(sys.modules); "
        "import gpuboss; print(*set(sys.modules) - old)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"gpuboss", "__future__"}


def test_a_value_is_equal_by_type_and_fields_and_cannot_be_changed() -> None:
    one = ProcessIdentity("boot", 7, 1, 100)
    assert one == ProcessIdentity("boot", 7, 1, 100)
    assert hash(one) == hash(ProcessIdentity("boot", 7, 1, 100))
    assert one != one.replace(start_ticks=101)
    assert one.replace(pid=8).pid == 8
    assert one != ("boot", 7, 1, 100)
    assert repr(one) == "ProcessIdentity(boot_id='boot', pid=7, pid_namespace=1, start_ticks=100)"
    with pytest.raises(AttributeError, match="immutable"):
        one.pid = 9
    with pytest.raises(AttributeError, match="immutable"):
        del one.pid
