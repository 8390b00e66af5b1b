"""What `gpuboss release` tells people to type."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from gpuboss.cli import release
from gpuboss.cli.exits import Exit
from gpuboss.leases import Lease, Snapshot
from tests.unit.gpuboss.test_cli_words import lease

LEASES = (
    lease("job:render", {"sim0": 1}, id="http-render-21"),
    lease("job:render", {"sim0": 1}, id="http-render-22-left"),
    lease("job:other", {"sim0": 1}, id="http-render-22-right"),
)


class PlayedClient:
    """Has these leases, and asks their holders for them."""

    devices = ()

    async def __aenter__(self) -> PlayedClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def snapshot(self) -> Snapshot:
        return Snapshot(1, (), LEASES)

    async def preempt(self, lease_id: str, **more: object) -> Lease:
        return next(lease for lease in LEASES if lease.id == lease_id)


def told(name: str) -> Namespace:
    return Namespace(lease=name, force=False, grace=None, json=False)


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(told: Namespace) -> Any:
        return PlayedClient()

    monkeypatch.setattr(release, "connect", connect)
    monkeypatch.setattr(release, "_row_of", lambda client, lease: None)


def test_what_it_suggests_names_one_lease(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.release(told("http-render-21")) == Exit.DONE
    assert "`gpuboss release http-render-21 --force` ends it" in capsys.readouterr().out


def test_of_several_it_tells_as_much_as_names_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.release(told("render")) == Exit.NOT_DONE
    said = capsys.readouterr().err
    assert "any of http-render-21 (job:render), http-render-22-l (job:render): say more" in said
    assert release.release(told("http-render-22-l")) == Exit.DONE
