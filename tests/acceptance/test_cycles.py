"""Models load and are evicted fifty times: processes, ports, sockets, leases and memory are back where they were."""

from __future__ import annotations

import contextlib
import sqlite3
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from gpuboss.state_dir import StateDir
from gpuboss.store_link import MOST_LINKS
from tests.acceptance.broker import MODELS, Broker, broker
from tests.acceptance.storm import Holdings
from tests.support import wait_until

CYCLES = 50
WARM_UP = 4
GROWTH_BYTES = 8 << 20
POOLED = MOST_LINKS
"""Connections to the store, and threads, that a busier moment may add to their pools: far fewer than one per cycle."""


@pytest.fixture
def subject(tmp_dir: Path, llama_server: Path, demo_models: Path) -> Iterator[Broker]:
    """Room for one model, which may leave at once."""
    with broker(tmp_dir, llama_server, demo=demo_models, settings={"min_residency_s": 0}) as running:
        yield running


@dataclass(frozen=True, slots=True)
class Picture:
    """What a broker and its processes have, while no model is loaded."""

    processes: Counter[str]
    """By what they are."""
    ports: frozenset[int]
    """They listen on."""
    sockets: frozenset[str]
    """Socket files."""
    leases: int
    rows: int
    """Holders in the node's ledger."""

    @classmethod
    def of(cls, subject: Broker) -> Picture:
        """As it is now."""
        assert subject.process is not None
        family = [psutil.Process(subject.process.pid), *subject.processes()]
        state = StateDir.resolve(subject.state_dir)
        with contextlib.closing(sqlite3.connect(f"file:{state.ledger_path}?mode=ro", uri=True, timeout=5.0)) as books:
            [rows] = books.execute("SELECT count(*) FROM holder").fetchone()
        return cls(
            Counter(map(_role, family)),
            frozenset(port for process in family for port in _ports(process)),
            frozenset(path.name for path in subject.directory.rglob("*") if _is_socket(path)),
            len(subject.get("/api/v1/leases")[1]["leases"]),
            rows,
        )


def _role(process: psutil.Process) -> str:
    """`model-boss serve`, `gpuboss.keeper` and so on, without what differs from one process to the next."""
    with contextlib.suppress(psutil.NoSuchProcess):
        words = [Path(word).name for word in process.cmdline()]
        named = [word for word in words if word and not word.startswith("-") and not word[0].isdigit()]
        return " ".join(named[:3])
    return "gone"


def _ports(process: psutil.Process) -> list[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [one.laddr[1] for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    return []


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _cycles(subject: Broker, count: int) -> None:
    for number in range(count):
        model = MODELS[number % 2]
        assert model.title() in subject.ask(model)
        assert [name for name, slot in subject.slots().items() if slot["state"] == "ready"] == [model]


def _unloaded(subject: Broker) -> Picture:
    for model in MODELS:
        assert subject.post(f"/api/v1/models/{model}/unload", {})[0] == 200
    wait_until(lambda: not subject.engines(), "every engine to be gone")
    return Picture.of(subject)


@pytest.mark.slow
def test_fifty_loads_and_evictions_leave_nothing_behind(subject: Broker) -> None:
    assert subject.process is not None
    _cycles(subject, WARM_UP)
    before, held_before = _unloaded(subject), Holdings.of(subject.process.pid)
    assert (before.leases, before.rows, before.ports) == (0, 0, {subject.port})

    _cycles(subject, CYCLES)
    moves = [move["state"] for model in MODELS for move in subject.get(f"/api/v1/slots/{model}")[1]["story"]]
    assert moves.count("loading") > CYCLES / 2, "they really came"
    assert moves.count("stopping") > CYCLES / 2, "and really went"

    _unloaded(subject)
    with contextlib.suppress(AssertionError):  # the comparison that follows says more
        wait_until(lambda: Picture.of(subject) == before, "everything to be as it was")
    assert Picture.of(subject) == before
    held = Holdings.of(subject.process.pid)
    assert held.files <= held_before.files + POOLED
    assert held.threads <= held_before.threads + POOLED
    assert held.rss_bytes <= held_before.rss_bytes + GROWTH_BYTES
    print(f"{CYCLES} cycles; {held}, grown by {(held.rss_bytes - held_before.rss_bytes) >> 10} KiB; {before}")
