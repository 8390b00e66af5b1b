"""Where it goes: whole on one accelerator, over several, in host memory."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from inference.events import DeviceRoom
from inference.placement import MARGIN_BYTES, Groups, Rooms, groups_of, largest, place, reach, usable
from tests.unit.inference.scheduler_rules import GIB, a_device, one_node


def over(rooms: Mapping[str, int]) -> tuple[Mapping[str, int], Groups]:
    """The rooms, and that they are one node's."""
    return rooms, one_node(rooms)


def rooms_of(devices: Sequence[DeviceRoom]) -> Rooms:
    return Rooms(devices, groups_of(devices))


def test_of_the_devices_with_room_the_fullest_is_taken_and_the_others_are_alternatives():
    ways = place(4 * GIB, *over({"d0": 20 * GIB, "d1": 5 * GIB, "d2": 3 * GIB, "d3": 8 * GIB}))
    assert ways == ({"d1": 4 * GIB}, {"d3": 4 * GIB}, {"d0": 4 * GIB})


def test_of_equals_the_first_is_taken():
    assert place(GIB, *over({"d0": 2 * GIB, "d1": 2 * GIB}))[0] == {"d0": GIB}


def test_what_fits_on_no_single_device_is_spread_in_proportion_to_room_in_index_order():
    (shares,) = place(9 * GIB, *over({"d0": 4 * GIB + MARGIN_BYTES, "d1": 8 * GIB + MARGIN_BYTES}))
    assert list(shares) == ["d0", "d1"]
    assert shares == {"d0": 3 * GIB, "d1": 6 * GIB}


def test_a_spread_uses_the_fewest_devices_that_hold_it():
    (shares,) = place(14 * GIB, *over({"d0": 2 * GIB, "d1": 8 * GIB, "d2": 8 * GIB}))
    assert list(shares) == ["d1", "d2"]


def test_a_spread_leaves_the_margin_free_on_every_device():
    rooms = {"d0": 8 * GIB, "d1": 8 * GIB}
    assert place(16 * GIB - 2 * MARGIN_BYTES, *over(rooms)) == (
        {"d0": 8 * GIB - MARGIN_BYTES, "d1": 8 * GIB - MARGIN_BYTES},
    )
    assert place(16 * GIB - 2 * MARGIN_BYTES + 1, *over(rooms)) == ()


def test_every_spread_adds_up_and_fits():
    rng = random.Random(3)
    for _ in range(2000):
        rooms = {f"d{n}": rng.randrange(0, 20 * GIB) for n in range(rng.randint(1, 6))}
        need = rng.randrange(1, 60 * GIB)
        ways = place(need, *over(rooms))
        assert bool(ways) == (need <= reach(*over(rooms)))
        for shares in ways:
            assert sum(shares.values()) == need
            margin = MARGIN_BYTES if len(shares) > 1 else 0
            assert all(0 <= size <= rooms[device] - margin for device, size in shares.items())


def test_host_memory_counts_only_where_there_is_no_accelerator():
    gpu, host = a_device("gpu0", 8), a_device("cpu", 64, accelerator=False)
    assert usable([host, gpu]) == (gpu,)
    assert usable([host]) == (host,)


def test_host_memory_is_never_spread():
    hosts = [a_device("cpu0", 8, accelerator=False), a_device("cpu1", 8, accelerator=False)]
    assert largest(hosts) == 8 * GIB
    assert not rooms_of(hosts).place(9 * GIB)


def test_the_largest_model_is_what_all_accelerators_hold_together():
    assert largest([a_device("d0", 8), a_device("d1", 8)]) == 16 * GIB - 2 * MARGIN_BYTES
    assert largest([a_device("d0", 8)]) == 8 * GIB
    assert largest([]) == 0


def test_free_room_is_preferred_to_room_that_is_still_becoming_free():
    rooms = rooms_of([a_device("d0", 8), a_device("d1", 24)])
    rooms.take({"d0": 8 * GIB})
    rooms.expect({"d0": 8 * GIB})
    assert rooms.place(4 * GIB) == ({"d1": 4 * GIB},)


def test_room_on_its_way_back_can_be_promised_once():
    rooms = rooms_of([a_device("d0", 8)])
    rooms.take({"d0": 8 * GIB})
    assert not rooms.place(6 * GIB)
    rooms.expect({"d0": 8 * GIB})
    assert rooms.place(6 * GIB) == ({"d0": 6 * GIB},)
    rooms.take({"d0": 6 * GIB})
    assert not rooms.place(6 * GIB)
    assert rooms.total() == {"d0": 2 * GIB}


def test_a_device_is_overdrawn_when_more_is_claimed_than_it_will_have():
    rooms = rooms_of([a_device("d0", 8, others=4)])
    rooms.take({"d0": 6 * GIB})
    assert rooms.overdrawn({"d0": 6 * GIB})
    assert not rooms.overdrawn({"elsewhere": GIB})


def test_room_kept_for_somebody_does_not_make_a_claim_too_many():
    rooms = rooms_of([a_device("d0", 8)])
    rooms.take({"d0": 6 * GIB})
    rooms.keep({"d0": 6 * GIB})
    assert not rooms.overdrawn({"d0": 6 * GIB})


def test_kept_room_is_nobody_elses():
    rooms = rooms_of([a_device("d0", 8)])
    rooms.keep({"d0": 6 * GIB})
    assert not rooms.place(3 * GIB)
    assert rooms.total(kept=True) == {"d0": 8 * GIB}


def test_a_model_is_split_over_the_devices_of_one_node_only():
    here = [replace(a_device(f"a{n}", 8), node="a") for n in range(2)]
    there = [replace(a_device(f"b{n}", 12), node="b") for n in range(2)]
    rooms = rooms_of([*here, *there])
    assert rooms.place(30 * GIB) == ()
    assert [set(option) for option in rooms.place(20 * GIB)] == [{"b0", "b1"}]
    assert largest([*here, *there]) == 24 * GIB - 2 * MARGIN_BYTES


def test_of_two_nodes_the_one_where_fewer_devices_do_comes_first():
    here = [replace(a_device(f"a{n}", 8), node="a") for n in range(4)]
    there = [replace(a_device(f"b{n}", 12), node="b") for n in range(2)]
    assert [len(option) for option in rooms_of([*here, *there]).place(20 * GIB)] == [2, 3]
