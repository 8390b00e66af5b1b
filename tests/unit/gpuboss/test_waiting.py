"""What a client makes of the store's words about a request, in whatever order they come."""

from __future__ import annotations

import json
from typing import Any

from gpuboss.identity import ProcessIdentity
from gpuboss.leases import HolderKind, LeaseRequest, LeaseState
from gpuboss.waiting import Asking
from gpuboss.wire import process_to_wire

REQUEST = LeaseRequest("r1", "job:a", HolderKind.JOB, ({"sim0": 100},), 10)


def a_view(state: LeaseState, **more: object) -> dict[str, Any]:
    view = {
        "id": "r1",
        "holder": "job:a",
        "kind": "job",
        "state": str(state),
        "priority": 10,
        "order": 7,
        "since_ms": 1,
        "shares": json.dumps({"sim0": 100} if state is LeaseState.GRANTED else {}),
        "owner": json.dumps(process_to_wire(ProcessIdentity("boot", 1, 1, 1))),
    }
    fence = {"epoch": 3, "seq": 4} if state is LeaseState.GRANTED else {}
    return view | fence | more


def test_an_answer_from_before_the_grant_that_comes_late_does_not_take_the_grant_back():
    asking = Asking(REQUEST, {})
    asking.learn(a_view(LeaseState.QUEUED))
    asking.learn(a_view(LeaseState.GRANTED))
    granted = asking.lease
    asking.learn(a_view(LeaseState.QUEUED))
    assert asking.lease == granted
    assert asking.lease is not None
    assert asking.lease.fence is not None
    assert not asking.waits


def test_a_grant_after_the_store_forgot_one_is_the_new_one():
    asking = Asking(REQUEST, {})
    asking.learn(a_view(LeaseState.GRANTED))
    asking.learn(a_view(LeaseState.QUEUED))
    asking.learn(a_view(LeaseState.GRANTED, seq=9))
    assert asking.lease is not None
    assert asking.lease.fence is not None
    assert asking.lease.fence.seq == 9
