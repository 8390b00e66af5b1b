"""A driver that hangs holds up nobody."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Iterator, Sequence

import pytest

from gpuboss.devices import Device, DeviceKind, Reading
from gpuboss.errors import DeviceError
from gpuboss.probing import PatientProbe, in_time
from tests.support import until, wait_until

CARD = Device("GPU-a", DeviceKind.CUDA, "a card", 0, 100, 0, measured=True)


class Driver:
    """A probe that hangs, or fails, when told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.threads: set[int] = set()
        self.well = threading.Event()
        self.well.set()
        self.error: Exception | None = None

    def devices(self) -> Sequence[Device]:
        return [CARD]

    def read(self, pids: Collection[int]) -> Sequence[Reading]:
        self.calls += 1
        self.threads.add(threading.get_ident())
        number = self.calls
        self.well.wait()
        if self.error:
            raise self.error
        return [Reading(CARD.id, number, dict.fromkeys(pids, 1), time.monotonic())]


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.well.set()


async def test_a_driver_that_is_well_is_read_in_one_thread_of_its_own(driver: Driver) -> None:
    probe = PatientProbe(driver)
    assert probe.devices == (CARD,)
    for number in range(1, 4):
        (reading,) = await probe.read([7])
        assert (reading.used_bytes, reading.by_pid) == (number, {7: 1})
    assert len(driver.threads) == 1
    assert threading.get_ident() not in driver.threads


async def test_a_driver_that_hangs_is_given_up_soon_and_asked_no_more_until_it_is_back(driver: Driver) -> None:
    probe = PatientProbe(driver, patience_s=0.2)
    driver.well.clear()
    with pytest.raises(DeviceError, match=r"the driver of GPU-a has not answered for 0\.\d s"):
        await probe.read([])
    thread = probe._thread
    began_s = time.monotonic()
    for _ in range(20):
        with pytest.raises(DeviceError, match="GPU-a has not answered"):
            await probe.read([])
    assert time.monotonic() - began_s < 2, "nobody waits for it a second time"
    assert driver.calls == 1
    assert probe._thread is thread
    probe._patience_s = 20
    driver.well.set()
    await until(lambda: probe._call is not None and probe._call.answered.done(), "the late answer")
    (reading,) = await probe.read([])
    assert reading.used_bytes == 2, "the late answer is not taken for a reading of now"
    assert len(driver.threads) == 1


async def test_the_thread_goes_with_its_probe(driver: Driver) -> None:
    probe = PatientProbe(driver)
    await probe.read([])
    thread = probe._thread
    assert thread is not None
    assert thread.is_alive()
    probe.close()
    await until(lambda: not thread.is_alive(), "the thread to end")


async def test_what_the_driver_says_is_wrong_is_told_at_once(driver: Driver) -> None:
    probe = PatientProbe(driver)
    driver.error = DeviceError("the card fell off the bus")
    with pytest.raises(DeviceError, match="fell off the bus"):
        await probe.read([])
    driver.error = None
    assert len(await probe.read([])) == 1


async def test_who_stops_waiting_leaves_the_call_to_itself(driver: Driver) -> None:
    probe = PatientProbe(driver, patience_s=5)
    driver.well.clear()
    waiting = asyncio.create_task(probe.read([]))
    await until(lambda: driver.calls == 1, "the call")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    with pytest.raises(DeviceError, match="has not answered"):
        await probe.read([])
    driver.well.set()


async def test_finding_devices_has_an_end_too(driver: Driver) -> None:
    assert await in_time(driver.devices, 5, "finding") == [CARD]
    driver.well.clear()
    with pytest.raises(DeviceError, match=r"finding the devices: no answer within 0\.05 s; see what `nvidia-smi`"):
        await in_time(lambda: driver.read([]), 0.05, "finding the devices")
    driver.well.set()
    driver.error = DeviceError("no")
    with pytest.raises(DeviceError, match="no"):
        await in_time(lambda: driver.read([]), 5, "finding")


def test_a_call_that_comes_back_after_the_loop_has_ended_harms_nobody(driver: Driver) -> None:
    driver.well.clear()
    probes: list[PatientProbe] = []

    async def give_up() -> None:
        probes.append(PatientProbe(driver, patience_s=0.01))
        with pytest.raises(DeviceError):
            await probes[0].read([])

    asyncio.run(give_up())
    probes[0].close()
    driver.well.set()
    thread = probes[0]._thread
    assert thread is not None
    wait_until(lambda: not thread.is_alive(), "the thread to end")
