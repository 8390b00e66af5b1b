"""Eight processes of fifty tasks each on real connections through a network that cuts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.crowd import run_crowd
from tests.faults.crowd_checker import check_crowd

_SECONDS = 10.0


@pytest.mark.slow
def test_a_crowd_on_a_faulty_network_is_given_nothing_twice(tmp_dir: Path) -> None:
    outcome = run_crowd(tmp_dir, seconds=_SECONDS)
    assert not outcome.faults, outcome.faults[:5]
    assert outcome.operations > 100 * _SECONDS, outcome
    for fault in ("cut before", "cut after", "late"):
        assert f" 0 {fault}" not in outcome.network, outcome.network


def _holds(lease_id: str, since: float, until: float, seq: int, size: int) -> list[dict[str, object]]:
    return [
        {"op": "holds", "id": lease_id, "at": since, "epoch": 1, "seq": seq, "shares": {"gpu0": size}},
        {"op": "ends", "id": lease_id, "at": until},
    ]


@pytest.mark.parametrize(
    ("records", "fault"),
    [
        (_holds("a", 1.0, 3.0, 1, 60) + _holds("b", 2.0, 4.0, 2, 60), "oversubscribed"),
        (_holds("a", 1.0, 2.0, 1, 60) + _holds("b", 2.0, 3.0, 1, 60), "was given to a and to b"),
        (_holds("a", 1.0, 2.0, 1, 60) + _holds("a", 2.0, 3.0, 2, 60), "granted twice"),
        ([{"op": "released", "id": "a", "state": "stale"}], "is stale"),
        (
            [
                {"op": "acquire", "call": 1.0, "return": 2.0, "id": "a", "state": "granted", "fence": [1, 2]},
                {"op": "acquire", "call": 3.0, "return": 4.0, "id": "b", "state": "granted", "fence": [1, 1]},
            ],
            r"b got \(1, 1\) after a",
        ),
    ],
)
def test_its_checker_sees(records: list[dict[str, object]], fault: str) -> None:
    import re

    _, faults = check_crowd(records, {"gpu0": 100})
    assert any(re.search(fault, found) for found in faults), faults
    _, fine = check_crowd(_holds("a", 1.0, 2.0, 1, 60) + _holds("b", 2.0, 4.0, 2, 60), {"gpu0": 100})
    assert not fine
