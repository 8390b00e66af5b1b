from __future__ import annotations

import json

from gpuboss.devices import Device, DeviceKind
from gpuboss.identity import ProcessIdentity
from gpuboss.lease_wire import ask_for, explain_shortage, lease_from, snapshot_from
from gpuboss.leases import Fence, HolderKind, LeaseRequest, LeaseState

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
