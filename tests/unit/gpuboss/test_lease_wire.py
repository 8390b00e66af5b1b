from __future__ import annotations

import json
from typing import Any

from gpuboss.devices import Device, DeviceKind
from gpuboss.identity import ProcessIdentity
from gpuboss.lease_wire import ask_for, explain_shortage, lease_from, options_told, snapshot_from, terms_for
from gpuboss.leases import Fence, ForeignUse, HolderKind, LeaseRequest, LeaseState, Notice

OWNER = ProcessIdentity("boot", 7, 1, 9)
GIB = 1 << 30


def test_a_request_names_its_devices_by_node_and_a_lease_by_their_own_names() -> None:
    request = LeaseRequest("a1", "slot:robin", HolderKind.SLOT, ({"sim0": 5, "cpu": 2}, {"cpu": 7}), 10)
    told = ask_for(request, "node", OWNER)
    assert json.loads(told["options"]) == [{"node/sim0": 5, "node/cpu": 2}, {"node/cpu": 7}]
    view = {name: told[name] for name in ("id", "holder", "kind", "priority", "owner")}
    lease = lease_from(view | {"state": "queued", "position": 3, "since_ms": 1})
    assert (lease.state, lease.position, lease.fence, lease.shares) == (LeaseState.QUEUED, 3, None, {})
    assert lease.owner == OWNER
    granted = view | {"state": "granted", "since_ms": 1, "epoch": 4, "seq": 5, "shares": json.dumps({"node/cpu": 7.0})}
    lease = lease_from(granted)
    assert (lease.fence, lease.shares) == (Fence(4, 5), {"cpu": 7})


def test_a_snapshot_shows_the_nodes_devices_in_their_order() -> None:
    names = ("sim0", "cpu")
    devices = [Device(name, DeviceKind(name[:3]), name, 0, 10, 1, measured=name == "cpu") for name in names]
    use = {"claimed": 3, "observed": 2, "foreign": 1, "residual": 0, "free": 5}
    snapshot = snapshot_from({"epoch": 9, "devices": {f"node/{name}": use for name in names}, "leases": {}}, devices)
    assert [(found.device.id, found.observed_bytes) for found in snapshot.devices] == [("sim0", None), ("cpu", 2)]
    assert (snapshot.epoch, snapshot.leases) == (9, ())


def test_a_shortage_is_explained_per_option_and_device() -> None:
    shortage = [
        {
            "n/gpu": {"wanted": 20 * GIB, "cap": 7 * GIB, "total": 8 * GIB},
            "n/cpu": {"wanted": GIB, "cap": 2 * GIB, "total": 2 * GIB},
        },
        {"n/other": {"wanted": GIB}},
    ]
    assert explain_shortage(shortage) == (
        "1GiB of cpu, which can give 2GiB (fits), 20GiB of gpu, which can give 7GiB (8GiB less the reserve of 1GiB); "
        "or 1GiB of other, which this node does not have"
    )


def test_what_a_holder_agreed_to_reaches_the_store_and_comes_back() -> None:
    request = LeaseRequest(
        *("a1", "job:sft", HolderKind.JOB, ({"sim0": 5},), 50),
        preemptible=True,
        grace_s=45.5,
        ttl_s=60,
        adopts={"sim0": 3},
    )
    told = ask_for(request, "node", OWNER)
    assert (told["preemptible"], told["grace_ms"], told["lease_ttl_ms"]) == (True, 45_500, 60_000)
    assert json.loads(told["adopts"]) == {"node/sim0": 3}
    view = {
        name: told[name] for name in ("id", "holder", "kind", "priority", "owner", "node", "preemptible", "grace_ms")
    }
    view |= {"lease_ttl_ms": 60_000, "state": "granted", "since_ms": 1, "order": 17, "epoch": 4, "seq": 5}
    view |= {"shares": json.dumps({"node/sim0": 5}), "revision": 2}
    lease = lease_from(view)
    assert (lease.preemptible, lease.grace_s, lease.ttl_s, lease.order) == (True, 45.5, 60, 17)
    assert (lease.node, lease.revision, lease.notice, lease.why, lease.reason) == ("node", 2, None, "", "")
    terms = json.loads(terms_for(lease))
    assert {name: terms[name] for name in terms if name not in ("owner", "order")} == {
        "kind": "job",
        "priority": 50,
        "preemptible": True,
        "grace_ms": 45_500,
        "lease_ttl_ms": 60_000,
    }
    assert terms["order"] == 17
    assert terms["owner"] == told["owner"], "the same text, by which a broker's own slots are known"


def test_a_view_without_the_newer_fields_is_a_lease_with_the_usual_terms() -> None:
    view = {"id": "a", "holder": "h", "kind": "slot", "state": "queued", "priority": 10, "since_ms": 1}
    lease = lease_from(view | {"owner": ask_for(_a_request(), "node", OWNER)["owner"]})
    assert (lease.preemptible, lease.grace_s, lease.ttl_s, lease.order, lease.node) == (False, 30, None, 0, "")


def test_a_notice_and_the_reason_of_a_refusal_are_shown() -> None:
    view = {"id": "a", "holder": "h", "kind": "slot", "priority": 10, "since_ms": 1}
    view |= {"owner": ask_for(_a_request(), "node", OWNER)["owner"]}
    notice = {
        "by": "w",
        "holder": "job:w",
        "priority": 1,
        "since_ms": 9,
        "left_ms": -500,
        "acked": True,
        "outranks": False,
    }
    assert lease_from(view | {"state": "active", "notice": notice}).notice == Notice(
        "w", "job:w", 1, 9, -0.5, True, False
    )
    why = json.dumps([{"n/sim0": {"wanted": GIB}}])
    refused = lease_from(view | {"state": "refused", "why": why})
    assert refused.why == "1GiB of sim0, which this node does not have"


def test_a_snapshot_shows_foreign_processes_and_what_was_not_given_back() -> None:
    device = Device("gpu", DeviceKind.SIM, "gpu", 0, 10, 1, measured=True)
    use: dict[str, Any] = {"claimed": 3, "observed": 2, "foreign": 4, "residual": 2, "free": 1, "quarantined": 2}
    use |= {"foreign_pids": [{"pid": 7, "name": "comfyui", "bytes": 4}, {"pid": 8, "name": "x", "bytes": None}]}
    (shown,) = snapshot_from({"epoch": 9, "devices": {"node/gpu": use}, "leases": {}}, [device]).devices
    assert shown.quarantined_bytes == 2
    assert shown.foreign_pids == (ForeignUse(7, "comfyui", 4), ForeignUse(8, "x", None))
    use |= {"foreign_pids": {}, "quarantined": None}
    (shown,) = snapshot_from({"epoch": 9, "devices": {"node/gpu": use}, "leases": {}}, [device]).devices
    assert (shown.quarantined_bytes, shown.foreign_pids) == (0, ())


def test_a_holder_that_cannot_grow_is_told_what_is_free() -> None:
    shortage = [{"n/gpu": {"wanted": 20 * GIB, "held": 8 * GIB, "free": 4 * GIB}, "n/cpu": {"wanted": GIB, "free": 0}}]
    assert explain_shortage(shortage) == (
        "1GiB of cpu, where it holds nothing and 0B are free, 20GiB of gpu, where it holds 8GiB and 4GiB are free"
    )


def test_options_are_named_by_node() -> None:
    assert json.loads(options_told([{"gpu": 1}, {"cpu": 2}], "node")) == [{"node/gpu": 1}, {"node/cpu": 2}]


def _a_request() -> LeaseRequest:
    return LeaseRequest("a1", "slot:robin", HolderKind.SLOT, ({"sim0": 5},), 10)
