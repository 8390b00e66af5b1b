"""Host RAM, on recorded systems and on this one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuboss.devices.cpu import CpuProbe
from gpuboss.devices.linux_memory import LinuxMemory
from gpuboss.errors import DeviceError
from gpuboss.units import GIB, KIB, MIB

Host = Callable[..., LinuxMemory]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A Linux host: total and available GiB, the lines of /proc/self/cgroup, files by path, processes by pid."""

    def make(
        total: int = 32,
        available: int = 20,
        cgroup: str = "0::/\n",
        files: dict[str, object] | None = None,
        **processes: tuple[int, int],
    ) -> LinuxMemory:
        everything: dict[str, object] = {
            "proc/meminfo": f"MemTotal: {total << 20} kB\nMemFree: 5 kB\nMemAvailable: {available << 20} kB\n",
            "proc/self/cgroup": cgroup,
        }
        for pid, (resident, mapped) in processes.items():
            everything[f"proc/{pid[1:]}/status"] = (
                f"Name:\tengine\nVmRSS:\t{resident << 20} kB\nRssFile:\t{mapped << 20} kB\n"
            )
        for name, content in (everything | (files or {})).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(content))
        return LinuxMemory(tmp_path)

    return make


def test_without_a_limit_the_machines_ram_counts(host: Host) -> None:
    memory = host()
    assert (memory.total_bytes(), memory.available_bytes()) == (32 * GIB, 20 * GIB)


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        pytest.param(
            "0::/docker/abc\n",
            {
                "memory.max": 8 * GIB,
                "memory.current": 4 * GIB,
                "memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\n",
            },
            id="version 2, container's own view",
        ),
        pytest.param(
            "12:pids:/\n4:memory:/docker/abc\n0::/\n",
            {
                "memory/memory.limit_in_bytes": 8 * GIB,
                "memory/memory.usage_in_bytes": 4 * GIB,
                "memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n",
            },
            id="version 1",
        ),
    ],
)
def test_a_containers_limit_counts_where_it_is_smaller_and_its_cached_files_do_not(
    host: Host, cgroup: str, files: dict[str, object]
) -> None:
    memory = host(cgroup=cgroup, files={f"sys/fs/cgroup/{name}": content for name, content in files.items()})
    assert (memory.total_bytes(), memory.available_bytes()) == (8 * GIB, 6 * GIB)


def test_a_limit_above_our_group_binds_us_too(host: Host) -> None:
    base = "sys/fs/cgroup/user.slice"
    memory = host(
        cgroup="0::/user.slice/app.scope\n",
        files={
            f"{base}/app.scope/memory.max": "max",
            f"{base}/app.scope/memory.current": GIB,
            f"{base}/memory.max": 4 * GIB,
            f"{base}/memory.current": 3 * GIB,
        },
    )
    assert (memory.total_bytes(), memory.available_bytes()) == (4 * GIB, 1 * GIB)


@pytest.mark.parametrize("limit", ["max", str(0x7FFFFFFFFFFFF000), str(64 * GIB)])
def test_a_limit_that_is_none_or_above_the_ram_changes_nothing(host: Host, limit: str) -> None:
    memory = host(files={"sys/fs/cgroup/memory.max": limit, "sys/fs/cgroup/memory.current": GIB})
    assert (memory.total_bytes(), memory.available_bytes()) == (32 * GIB, 20 * GIB)


def test_a_group_over_its_limit_has_nothing_left_and_not_less(host: Host) -> None:
    memory = host(files={"sys/fs/cgroup/memory.max": 2 * GIB, "sys/fs/cgroup/memory.current": 3 * GIB})
    assert memory.available_bytes() == 0


def test_a_host_that_does_not_tell_is_an_error_that_says_how_to_go_on(host: Host) -> None:
    memory = host(files={"proc/meminfo": "MemTotal: 5 kB\n"})
    with pytest.raises(DeviceError, match=r"does not tell MemAvailable.*GPUBOSS_DEVICES"):
        memory.total_bytes()


def test_processes_are_measured_by_what_is_resident_and_gone_ones_left_out(host: Host) -> None:
    memory = host(p7=(3, 1), files={"proc/8/status": "Name:\tzombie\nState:\tZ\n"})
    (reading,) = CpuProbe(memory=memory).read([7, 8, 9])
    assert reading.by_pid == {7: 3 * GIB}
    assert reading.complete


def test_mapped_weights_count_as_used_though_the_kernel_calls_them_available(host: Host) -> None:
    # 12 of 32 GiB are gone for good; the engine maps 6 more, which show as available.
    memory = host(available=20, p7=(8, 6))
    (reading,) = CpuProbe(memory=memory).read([7])
    assert reading.used_bytes == (12 + 6) * GIB
    assert (
        reading.used_bytes - sum(reading.by_pid.values()) == 10 * GIB
    )  # what others use: 12 without the engine's own 2


def test_mapped_weights_count_once_in_a_container_too(host: Host) -> None:
    # 3 of 8 GiB are gone for good; the engine's 6 GiB have 4 of mapped weights, which its group counts as files in use.
    base = "sys/fs/cgroup"
    files = {
        f"{base}/memory.max": 8 * GIB,
        f"{base}/memory.current": 7 * GIB,
        f"{base}/memory.stat": f"active_file {3 * GIB}\ninactive_file {GIB}\n",
    }
    (reading,) = CpuProbe(memory=host(files=files, p7=(6, 4))).read([7])
    assert reading.used_bytes == (3 + 4) * GIB


def test_a_device_smaller_than_the_host_loses_room_only_when_the_host_runs_short(host: Host) -> None:
    memory = host(total=32, available=20)
    (device,) = CpuProbe(memory=memory, total_bytes=4 * GIB).devices()
    assert device.total_bytes == 4 * GIB
    (reading,) = CpuProbe(memory=memory, total_bytes=4 * GIB).read([])
    assert reading.used_bytes == 0
    (reading,) = CpuProbe(memory=host(total=32, available=3), total_bytes=4 * GIB).read([])
    assert reading.used_bytes == 1 * GIB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_process_on_this_host_is_measured() -> None:
    (device,) = CpuProbe(reserve_bytes=MIB).devices()
    block = bytearray(os.urandom(64 * KIB)) * 512  # 32 MiB that are really there
    (reading,) = CpuProbe().read([os.getpid()])
    assert len(block) <= reading.by_pid[os.getpid()] <= device.total_bytes
    assert reading.used_bytes is not None
    assert reading.by_pid[os.getpid()] / 2 < reading.used_bytes < device.total_bytes
    assert device.reserve_bytes == MIB
