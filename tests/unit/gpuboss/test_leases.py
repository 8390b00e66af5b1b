from __future__ import annotations

import re

import pytest

from gpuboss.keys import PoolKeys
from gpuboss.leases import HOLDS_MEMORY, OVER, Fence, HolderKind, LeaseRequest, LeaseState, new_request_id
from gpuboss.scripts import Script, source


def request(**changes: object) -> LeaseRequest:
    fields: dict[str, object] = {"request_id": "a1", "holder": "slot:robin", "kind": HolderKind.SLOT}
    return LeaseRequest(**fields | {"options": ({"sim0": 1},), "priority": 10} | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"request_id": ""},
        {"request_id": "a:b"},
        {"priority": -2},
        {"priority": 1001},
        {"options": ()},
        {"options": ({"sim0": 1}, {})},
        {"options": ({"sim0": 0},)},
        {"grace_s": -1},
        {"grace_s": float("inf")},
        {"ttl_s": 0},
        {"ttl_s": float("nan")},
        {"adopts": {"sim0": -1}},
    ],
)
def test_a_request_that_no_store_could_grant_is_refused_at_once(wrong: dict[str, object]) -> None:
    request()
    with pytest.raises(ValueError, match=r"\S"):
        request(**wrong)


def test_every_state_waits_holds_or_is_over() -> None:
    assert {LeaseState.QUEUED} | HOLDS_MEMORY | OVER == set(LeaseState)
    assert not HOLDS_MEMORY & OVER


def test_later_fences_are_higher() -> None:
    assert Fence(1, 9) < Fence(2, 1) < Fence(2, 2)


def test_request_ids_differ_and_are_allowed() -> None:
    first, second = new_request_id(), new_request_id()
    assert first != second
    request(request_id=first)


def test_all_keys_of_a_pool_share_one_hash_tag() -> None:
    keys = PoolKeys("lab-1")
    for key in (*keys.keys(), keys.lease_prefix + "x", keys.meta, keys.events):
        assert re.match(r"\{gb:lab-1\}:[a-z]+", key)
    assert len(set(keys.keys())) == len(keys.keys())


@pytest.mark.parametrize("name", ["", "a}b", "a b", "a:b"])
def test_a_pool_name_that_breaks_the_tag_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="pool name"):
        PoolKeys(name)


def test_every_script_has_its_file_and_no_file_is_left_over() -> None:
    files = {path.stem for path in __import__("pathlib").Path("gpuboss/scripts").glob("*.lua")}
    assert {name for name in files if not name.startswith("_")} == {script.value for script in Script}
    assert len({source(script).sha for script in Script}) == len(Script)
