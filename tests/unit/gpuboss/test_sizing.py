"""From a wish to the options of a lease."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from gpuboss import errors
from gpuboss.devices import Device, DeviceKind
from gpuboss.leases import DeviceUse
from gpuboss.sizing import MOST_OPTIONS, choose_devices, is_open_choice, options_for

GIB = 1 << 30


def gpu(index: int, total: int = 24, reserve: int = 0, kind: DeviceKind = DeviceKind.CUDA) -> Device:
    return Device(f"GPU-{index}", kind, "a card", index, total * GIB, reserve * GIB, measured=True)


def use(device: Device, free: int, foreign: int = 0) -> DeviceUse:
    total = device.total_bytes - device.reserve_bytes
    return DeviceUse(device, total - (free + foreign) * GIB, None, foreign * GIB, 0, free * GIB)


CPU = Device("cpu", DeviceKind.CPU, "host memory", 9, 64 * GIB, 0, measured=True)


def test_the_tightest_fit_comes_first_then_what_lacks_least() -> None:
    cards = [gpu(0), gpu(1), gpu(2), gpu(3)]
    uses = [use(cards[0], 24), use(cards[1], 12), use(cards[2], 2), use(cards[3], 8)]
    options = options_for(cards, uses, vram_bytes=10 * GIB)
    assert [next(iter(option)) for option in options] == ["GPU-1", "GPU-0", "GPU-3", "GPU-2"]
    assert all(option[name] == 10 * GIB for option in options for name in option)


def test_without_a_look_every_device_counts_as_empty_and_ties_go_by_index() -> None:
    cards = [gpu(1), gpu(0), gpu(2, total=48)]
    assert [next(iter(option)) for option in options_for(cards, vram_bytes=GIB)] == ["GPU-0", "GPU-1", "GPU-2"]


def test_several_devices_are_taken_together_the_best_combination_first() -> None:
    cards = [gpu(0), gpu(1), gpu(2)]
    uses = [use(cards[0], 3), use(cards[1], 24), use(cards[2], 12)]
    options = options_for(cards, uses, vram_bytes=10 * GIB, gpus=2)
    assert [sorted(option) for option in options] == [["GPU-1", "GPU-2"], ["GPU-0", "GPU-2"], ["GPU-0", "GPU-1"]]
    assert set(map(len, options)) == {2}


def test_a_device_too_small_for_it_is_no_alternative() -> None:
    cards = [gpu(0, total=8), gpu(1, total=24)]
    assert options_for(cards, vram_bytes=10 * GIB) == ({"GPU-1": 10 * GIB},)
    with pytest.raises(errors.LeaseRefused) as refused:
        options_for(cards, vram_bytes=10 * GIB, gpus=2)
    assert "10GiB of each of 2 devices" in refused.value.message
    assert "GPU-0 can give 8GiB" in refused.value.message
    with pytest.raises(errors.LeaseRefused, match="GPU-1 can give 20GiB"):
        options_for([gpu(1, reserve=4)], vram_bytes=21 * GIB)


def test_more_devices_than_there_are_is_told_as_that() -> None:
    told = "1GiB of each of 2 devices wanted, which this node can never give, for only 1 {}: GPU-0 can give 24GiB"
    with pytest.raises(errors.LeaseRefused) as refused:
        options_for([gpu(0), CPU], vram_bytes=GIB, gpus=2)
    assert refused.value.message == told.format("is there")
    with pytest.raises(errors.LeaseRefused) as refused:
        options_for([gpu(0), gpu(1)], vram_bytes=GIB, gpus=2, only=["gpu0"])
    assert refused.value.message == told.format("is named")
    with pytest.raises(errors.LeaseRefused, match="never give, for only 2 are there: GPU-0 can give"):
        options_for([gpu(0), gpu(1)], exclusive=True, gpus=3)


def test_an_exclusive_lease_takes_all_but_reserve_and_a_desktop() -> None:
    card = gpu(0, total=24, reserve=1)
    assert options_for([card], exclusive=True) == ({"GPU-0": 23 * GIB},)
    assert options_for([card], [use(card, 22, foreign=1)], exclusive=True) == ({"GPU-0": 22 * GIB},)
    # More than a sixteenth is no desktop: it is waited for.
    assert options_for([card], [use(card, 3, foreign=20)], exclusive=True) == ({"GPU-0": 23 * GIB - 24 * GIB // 16},)


def test_cpu_serves_only_where_it_is_named_or_alone() -> None:
    assert [device.id for device in choose_devices([gpu(0), CPU])] == ["GPU-0"]
    assert [device.id for device in choose_devices([CPU])] == ["cpu"]
    assert options_for([gpu(0), CPU], vram_bytes=GIB, only=["cpu"]) == ({"cpu": GIB},)


def test_devices_are_named_by_id_or_by_index() -> None:
    cards = [gpu(0), gpu(1), gpu(2), CPU]
    assert [device.id for device in choose_devices(cards, ["gpu2", "GPU-0", "gpu0"])] == ["GPU-0", "GPU-2"]
    with pytest.raises(errors.LeaseRefused, match=r"no device 'gpu7', 'gpu9'; it has GPU-0, GPU-1, GPU-2, cpu"):
        choose_devices(cards, ["gpu7", "gpu9"])
    declared = replace(gpu(0), id="gpu1")
    assert [device.index for device in choose_devices([declared, gpu(1)], ["gpu1"])] == [0], (
        "an id comes before an index"
    )


def test_never_more_options_than_the_store_should_go_through() -> None:
    cards = [gpu(number) for number in range(16)]
    uses = [use(card, free=card.index + 1) for card in cards]
    options = options_for(cards, uses, vram_bytes=4 * GIB, gpus=8)
    assert len(options) == MOST_OPTIONS
    assert len({tuple(option) for option in options}) == MOST_OPTIONS
    assert sorted(options[0], key=lambda name: int(name[4:])) == [f"GPU-{n}" for n in range(3, 11)]


def test_it_matters_what_is_free_only_where_there_is_a_choice() -> None:
    sim = replace(gpu(0), kind=DeviceKind.SIM, measured=False)
    two = [sim, replace(sim, id="GPU-1", index=1)]
    assert not is_open_choice(two, exclusive=False, gpus=2, only=None)
    assert is_open_choice(two, exclusive=False, gpus=1, only=None)
    assert not is_open_choice(two, exclusive=False, gpus=1, only=["gpu1"])
    assert not is_open_choice([sim], exclusive=True, gpus=1, only=None)
    assert is_open_choice([gpu(0)], exclusive=True, gpus=1, only=None), "what is foreign is not known"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({}, "one of both"),
        ({"vram_bytes": GIB, "exclusive": True}, "one of both"),
        ({"vram_bytes": 0}, "nothing to lease"),
        ({"vram_bytes": GIB, "gpus": 0}, "0 devices is none"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused(wrong: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        options_for([gpu(0)], **wrong)  # type: ignore[arg-type]


def test_an_option_that_fits_is_always_first_if_there_is_one() -> None:
    cards = [gpu(0), gpu(1), gpu(2), gpu(3)]
    for frees in itertools.product((1, 6, 12), repeat=4):
        uses = [use(card, free) for card, free in zip(cards, frees, strict=True)]
        best = options_for(cards, uses, vram_bytes=6 * GIB, gpus=2)[0]
        fitting = sum(free >= 6 for free in frees)
        assert sum(frees[int(name[4:])] >= 6 for name in best) == min(2, fitting)
