"""Leases over HTTP: the real endpoints and the real ledger; only models are played."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from coordinator import lease_desk
from coordinator.api.leases import LeaseAsk
from coordinator.lease_desk import LeaseDesk
from gpuboss.client import Client, LedgerSettings
from gpuboss.devices import parse_devices
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import HolderKind, LeaseRequest, LeaseState, new_request_id
from gpuboss.ledger_rows import LedgerRow
from gpuboss.node_ledger import NodeLedger
from gpuboss.settings import Timings
from inference import external_process
from tests.integration.coordinator.support import serving
from tests.support import until

MIB = 1 << 20
LEASES = "/api/v1/leases"


@dataclass
class Api:
    """The endpoints and the ledger behind them."""

    url: str
    http: aiohttp.ClientSession
    ledger: Client
    desk: LeaseDesk

    async def post(self, path: str = "", **body: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.post(f"{self.url}{LEASES}{path}", json=body) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str = "") -> tuple[int, dict[str, Any]]:
        async with self.http.get(f"{self.url}{LEASES}{path}") as answer:
            return answer.status, await answer.json()

    async def delete(self, lease_id: str) -> tuple[int, dict[str, Any]]:
        async with self.http.delete(f"{self.url}{LEASES}/{lease_id}") as answer:
            return answer.status, await answer.json()

    async def held(self, **body: Any) -> dict[str, Any]:
        status, lease = await self.post(**({"vram_mb": 40} | body))
        assert status == 200, lease
        return lease

    async def state(self, lease_id: str) -> str:
        return str((await self.get(f"/{lease_id}"))[1]["state"])

    def rows(self) -> list[LedgerRow]:
        with NodeLedger(self.ledger.state.ledger_path) as books:
            return books.rows()


@asynccontextmanager
async def a_client(root: Path) -> AsyncIterator[Client]:
    settings = LedgerSettings(
        state_dir=root / "state", devices=parse_devices("sim0=64MiB,sim1=64MiB"), timings=Timings(linger_s=0.5)
    )
    client = await Client.connect(settings, name="test")
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
async def api(tmp_dir: Path) -> AsyncIterator[Api]:
    async with a_client(tmp_dir) as client:
        keeper = client._link.welcome.pid
        desk = LeaseDesk(client)
        async with serving(tmp_dir, desk=desk) as broker:
            yield Api(broker.url, broker.http, client, desk)
            await desk.close()

        async def all_given_back() -> bool:
            leases = (await client.snapshot()).leases
            for lease in leases:
                await desk.give_back(lease.id)
            return not leases

        await until(all_given_back, "every lease to be given back")
    await until(lambda: not _runs(keeper), "the keeper to be gone")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def named(request: pytest.FixtureRequest) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A name that nothing else has, and a process whose command line ends with it, after what the test wants there."""
    name = f"render-{uuid.uuid4().hex}"
    with subprocess.Popen(
        [sys.executable, "-c", "input()", *getattr(request, "param", ()), name], stdin=subprocess.PIPE
    ) as process:
        yield name, process


def _runs(pid: int) -> bool:
    try:  # a keeper that this process started is its child
        return os.waitpid(pid, os.WNOHANG)[0] != pid
    except ChildProcessError:
        return psutil.pid_exists(pid)


# -- held by word -----------------------------------------------------------------------------------------------------


async def test_memory_is_leased_by_word_seen_and_given_back(api: Api) -> None:
    lease = await api.held(vram_mb=None, vram="40MiB", name="sft", priority="batch")
    assert (lease["state"], lease["holder"], lease["priority"]) == ("active", "job:sft", "batch")
    [(device, size)] = lease["devices"].items()
    assert (device in ("sim0", "sim1"), size) == (True, 40 * MIB)
    assert lease["env"] == {"GPUBOSS_LEASE": lease["id"]}
    assert lease["ttl_s"] == 60.0
    assert [row.process for row in api.rows()] == [None]
    listed = (await api.get())[1]["leases"]
    assert [one["id"] for one in listed] == [lease["id"]]
    status, ended = await api.delete(lease["id"])
    assert (status, ended["state"]) == (200, "freed")
    assert api.rows() == []
    assert (await api.delete(lease["id"]))[0] == 200, "given back twice is given back"


async def test_a_lease_by_word_lives_as_long_as_it_is_renewed_and_not_two_seconds_longer(api: Api) -> None:
    lease = await api.held(ttl_s=2)
    began_s = time.monotonic()
    while time.monotonic() - began_s < 4.0:
        status, renewed = await api.post(f"/{lease['id']}/renew")
        assert (status, renewed["state"]) == (200, "active")
        await asyncio.sleep(0.5)
    ended_s = time.monotonic()

    async def freed() -> bool:
        return await api.state(lease["id"]) == "freed"

    await until(freed, "the lease to expire")
    assert 1.0 < time.monotonic() - ended_s <= 2.0 + 2.0
    await until(lambda: api.rows() == [], "the row to be gone")
    status, answer = await api.post(f"/{lease['id']}/renew")
    assert (status, answer["error"]["code"]) == (409, "lease_over")
    assert "expired" in answer["error"]["message"]


async def test_whole_devices_are_leased_all_or_none(api: Api) -> None:
    both = await api.held(vram_mb=None, exclusive=True, gpus=2)
    assert both["devices"] == {"sim0": 64 * MIB, "sim1": 64 * MIB}
    status, queued = await api.post(vram_mb=1, devices=["gpu0"])
    assert (status, queued["state"], queued["position"]) == (202, "queued", 1)
    assert queued["holders"] == [{"holder": "job:http", "bytes": 64 * MIB}]
    assert queued["free_bytes"] == {"sim0": 0}


# -- held by a process ------------------------------------------------------------------------------------------------


async def test_a_process_holds_its_lease_until_it_dies(api: Api, sleeper: subprocess.Popen[bytes]) -> None:
    lease = await api.held(pid=sleeper.pid)
    assert lease["ttl_s"] is None
    [row] = api.rows()
    assert row.pid == sleeper.pid
    assert (await api.post(f"/{lease['id']}/renew"))[0] == 200, "there is nothing to renew, and no harm in it"
    sleeper.kill()
    sleeper.wait()

    async def freed() -> bool:
        return await api.state(lease["id"]) == "freed"

    await until(freed, "the lease of a dead process to be freed", timeout_s=10)
    assert api.rows() == []


async def test_a_pid_that_is_no_process_is_refused_by_number(api: Api, sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    sleeper.wait()
    status, answer = await api.post(vram_mb=40, pid=sleeper.pid)
    assert (status, answer["error"]["param"]) == (400, "pid")
    assert f"pid {sleeper.pid} is no process" in answer["error"]["message"]
    assert (await api.get())[1]["leases"] == []


async def test_a_process_is_found_by_its_command_line(api: Api, named: tuple[str, subprocess.Popen[bytes]]) -> None:
    name, program = named
    lease = await api.held(match=name[:20])
    assert lease["ttl_s"] is None
    assert [row.pid for row in api.rows()] == [program.pid]
    program.kill()
    program.wait()
    status, answer = await api.post(vram_mb=40, match=name)
    assert (status, answer["error"]["param"]) == (400, "match")
    assert f"match {name} is no process" in answer["error"]["message"]


@pytest.mark.parametrize("named", [["curl", f"http://127.0.0.1:8210{LEASES}", "-d"]], indirect=True)
async def test_a_caller_whose_command_line_holds_the_request_is_not_taken_for_the_program(
    api: Api, named: tuple[str, subprocess.Popen[bytes]]
) -> None:
    assert (await api.post(vram_mb=40, match=named[0]))[0] == 400


async def test_a_command_line_is_no_regular_expression(api: Api) -> None:
    """One that takes for ever would hold up everybody."""
    assert (await api.post(vram_mb=40, match="/.*/"))[0] == 400


async def test_a_process_is_found_by_its_container(
    api: Api, sleeper: subprocess.Popen[bytes], tmp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = uuid.uuid4().hex * 2
    group = tmp_dir / "proc" / str(sleeper.pid) / "cgroup"
    group.parent.mkdir(parents=True)
    group.write_text(f"0::/system.slice/docker-{container}.scope\n")
    monkeypatch.setattr(external_process, "_PROC", tmp_dir / "proc")
    await api.held(container=container[:12])
    assert [row.pid for row in api.rows()] == [sleeper.pid]
    status, answer = await api.post(vram_mb=1, container="0" * 64)
    assert (status, answer["error"]["param"]) == (400, "container")


async def test_a_process_that_dies_while_it_waits_leaves_the_queue(api: Api, sleeper: subprocess.Popen[bytes]) -> None:
    await api.held(exclusive=True, vram_mb=None, gpus=2)
    waiting = asyncio.ensure_future(api.post(vram_mb=1, pid=sleeper.pid, wait_s=60))
    await until(lambda: _waiters(api, 1), "the waiter")
    sleeper.kill()
    sleeper.wait()
    status, answer = await waiting
    assert (status, answer["error"]["code"]) == (409, "lease_over")
    assert await _waiters(api, 0)


# -- waiting ----------------------------------------------------------------------------------------------------------


async def _waiters(api: Api, count: int) -> bool:
    leases = (await api.ledger.snapshot()).leases
    return sum(lease.state is LeaseState.QUEUED for lease in leases) == count


async def test_a_long_poll_ends_with_the_grant(api: Api) -> None:
    first = await api.held(exclusive=True, vram_mb=None, gpus=2)
    waiting = asyncio.ensure_future(api.post(vram_mb=40, wait_s=60))
    await until(lambda: _waiters(api, 1), "the waiter")
    await api.delete(first["id"])
    status, lease = await waiting
    assert (status, lease["state"]) == (200, "active")


async def test_a_wait_that_ends_before_the_grant_says_where_one_stands_and_can_be_continued(api: Api) -> None:
    first = await api.held(exclusive=True, vram_mb=None, gpus=2, name="render")
    async with api.http.post(
        f"{api.url}{LEASES}", json={"vram_mb": 40, "wait_s": 0.1, "request_id": "mine", "name": "sft"}
    ) as answer:
        queued = await answer.json()
        assert (answer.status, answer.headers["retry-after"]) == (202, "1")
    assert (queued["id"], queued["request_id"], queued["position"]) == ("http-mine", "mine", 1)
    assert {one["holder"] for one in queued["holders"]} == {"job:render"}
    await api.post(vram_mb=40, request_id="later")
    status, again = await api.post(vram_mb=40, request_id="mine")
    assert (status, again["position"]) == (202, 1)
    await api.delete(first["id"])
    status, lease = await api.post(vram_mb=40, request_id="mine", wait_s=20)
    assert (status, lease["id"]) == (200, "http-mine")
    assert (await api.post(vram_mb=40, request_id="mine"))[1]["id"] == "http-mine", "the same lease, not a second"


async def test_a_request_id_holds_what_it_was_first_asked_for(api: Api) -> None:
    """Whoever believes in more than that would use memory that is somebody else's."""
    await api.held(vram_mb=40, request_id="mine", name="job:render\u00e9")
    assert (await api.post(vram_mb=30, request_id="mine"))[1]["holder"] == "job:render\u00e9", "it is enough"
    for more in ({"vram_mb": 41}, {"vram_mb": 40, "gpus": 2}, {"vram_mb": 40, "pid": os.getpid()}):
        status, told = await api.post(**more, request_id="mine")
        assert (status, told["error"]["code"]) == (409, "lease_differs")
        assert "another request_id" in told["error"]["message"]
    asked = [api.post(vram_mb=size, request_id="raced") for size in (20, 25, 30)]
    answers = await asyncio.gather(*asked)
    (held,) = {lease["devices"]["sim0"] for status, lease in answers if status == 200}
    assert [status for status, _ in answers] == [200 if size << 20 <= held else 409 for size in (20, 25, 30)]


async def test_a_process_is_not_told_that_anothers_lease_is_its_own(api: Api, sleeper: subprocess.Popen[bytes]) -> None:
    await api.held(vram_mb=40, request_id="mine", pid=sleeper.pid)
    status, told = await api.post(vram_mb=40, request_id="mine", pid=os.getpid())
    assert (status, told["error"]["code"]) == (409, "lease_differs")
    assert f"held by process {sleeper.pid}" in told["error"]["message"]
    assert (await api.post(vram_mb=40, request_id="mine", pid=sleeper.pid))[0] == 200


async def test_what_is_granted_while_nobody_polls_is_held_and_found(api: Api) -> None:
    first = await api.held(exclusive=True, vram_mb=None, gpus=2)
    await api.post(vram_mb=40, request_id="mine")
    await api.delete(first["id"])
    await until(lambda: [row.lease_id for row in api.rows()] == ["http-mine"], "the grant to be entered")
    status, lease = await api.post(vram_mb=40, request_id="mine")
    while status == 202:  # the store hears of it a moment later
        assert lease["state"] == "granted"
        await asyncio.sleep(0.01)
        status, lease = await api.post(vram_mb=40, request_id="mine")
    assert (status, lease["state"]) == (200, "active")


@pytest.mark.parametrize("request_id", [None, "mine"])
async def test_who_hangs_up_leaves_the_queue_unless_there_is_a_name_to_come_back_with(
    api: Api, request_id: str | None
) -> None:
    await api.held(exclusive=True, vram_mb=None, gpus=2)
    body = {"vram_mb": 40} | ({"request_id": request_id} if request_id else {})
    waiting = asyncio.ensure_future(api.post(wait_s=60, **body))
    await until(lambda: _waiters(api, 1), "the waiter")
    waiting.cancel()
    hung_up_s = time.monotonic()
    if request_id is None:
        await until(lambda: _waiters(api, 0), "the waiter to leave")
        assert time.monotonic() - hung_up_s < 1.5
    else:
        await until(lambda: api.desk._errands["http-mine"].callers == 0, "the hang-up to be noticed")
        assert await _waiters(api, 1)
        assert (await api.post(**body))[0] == 202


async def test_a_waiter_nobody_comes_back_for_leaves_when_its_time_is_over(api: Api) -> None:
    await api.held(exclusive=True, vram_mb=None, gpus=2)
    assert (await api.post(vram_mb=40, request_id="mine", ttl_s=2))[0] == 202
    left_s = time.monotonic()
    await until(lambda: _waiters(api, 0), "the waiter to leave")
    assert 1.5 < time.monotonic() - left_s < 2.0 + 8.0  # at once, on a machine that is not busy
    status, answer = await api.post(vram_mb=40, request_id="mine")
    assert (status, answer["error"]["code"]) == (409, "lease_over")


async def test_a_waiter_may_ask_for_less_and_keeps_its_place(api: Api) -> None:
    await api.held(vram_mb=40, devices=["sim0"])
    assert (await api.post(vram_mb=60, devices=["sim0"], request_id="big"))[0] == 202
    assert (await api.post(vram_mb=30, devices=["sim0"], request_id="later"))[0] == 202
    status, lease = await api.post(vram_mb=20, devices=["sim0"], request_id="big", wait_s=20)
    assert (status, lease["devices"]) == (200, {"sim0": 20 * MIB})
    assert (await api.get("/http-later"))[1]["position"] == 1


async def test_leaving_the_queue_by_name(api: Api) -> None:
    await api.held(exclusive=True, vram_mb=None, gpus=2)
    await api.post(vram_mb=40, request_id="mine")
    status, ended = await api.delete("http-mine")
    assert (status, ended["state"]) == (200, "cancelled")
    assert await _waiters(api, 0)


# -- yielding ---------------------------------------------------------------------------------------------------------


async def test_a_preemptible_lease_is_told_to_yield_and_ends_when_the_grace_is_over(api: Api) -> None:
    lease = await api.held(exclusive=True, vram_mb=None, gpus=2, priority="low", preemptible=True, grace_s=2)
    waiting = asyncio.ensure_future(api.post(vram_mb=40, name="urgent", priority="urgent", wait_s=60))

    async def noticed() -> bool:
        notice = (await api.post(f"/{lease['id']}/renew"))[1]["notice"]
        return notice is not None and notice["for"] == "job:urgent" and notice["left_s"] <= 2.0

    await until(noticed, "the notice")
    status, _ = await waiting
    assert status == 200
    assert (await api.get(f"/{lease['id']}"))[1]["reason"] == "preempted"


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "one of vram"),
        ({"vram": "1GiB", "vram_mb": 5}, "one of vram"),
        ({"vram": "much"}, "vram"),
        ({"vram_mb": 0}, "vram_mb"),
        ({"vram_mb": 1, "gpus": 0}, "gpus"),
        ({"vram_mb": 1, "priority": "soon"}, "priority"),
        ({"vram_mb": 1, "priority": 1001}, "priority"),
        ({"vram_mb": 1, "ttl_s": 0.5}, "ttl_s"),
        ({"vram_mb": 1, "wait_s": 1e9}, "wait_s"),
        ({"vram_mb": 1, "request_id": "no spaces"}, "request_id"),
        ({"vram_mb": 1, "request_id": "x" * 65}, "request_id"),
        ({"vram_mb": 1, "name": "a\nb"}, "name"),
        ({"vram_mb": 1, "devices": []}, "devices"),
        ({"vram_mb": 1, "colour": "red"}, "colour"),
        ({"vram_mb": 1, "pid": -1}, "pid"),
        ({"vram_mb": 1, "pid": 1, "ttl_s": 60}, "leave ttl_s out"),
        ({"vram_mb": 1, "pid": 1, "preemptible": True}, "gpuboss run --preemptible"),
        ({"vram_mb": 1, "match": "x", "ttl_s": 60}, "leave ttl_s out"),
        ({"vram_mb": 1, "match": "  "}, "match"),
        ({"vram_mb": 1, "container": "comfyui"}, "container"),
        ({"vram_mb": 1, "pid": 1, "match": "x"}, "one of pid, match"),
    ],
)
async def test_what_is_not_understood_is_refused_by_name(api: Api, body: dict[str, Any], words: str) -> None:
    status, answer = await api.post(**body)
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert words in answer["error"]["message"]
    assert (await api.get())[1]["leases"] == []


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"vrm": "1GiB"}, "vrm", "unknown key 'vrm'; nearest is 'vram'"),
        ({"vram_mb": 0}, "vram_mb", "vram_mb: must be more than 0, got 0"),
        ({"vram_mb": 1, "gpus": 65}, "gpus", "gpus: must be between 1 and 64, got 65"),
        ({"vram_mb": "1"}, "vram_mb", "vram_mb: expected a whole number, got '1'"),
        ({"vram_mb": 1, "wait_s": "soon"}, "wait_s", "wait_s: duration 'soon' is not understood"),
        ({"vram_mb": 1, "devices": "gpu0"}, "devices", "devices: expected a list, got 'gpu0'"),
        ({"vram_mb": 1, "devices": ["gpu0", 1]}, "devices", "devices.1: expected text, got 1"),
        ({"vram_mb": 1, "pid": 1, "match": "x"}, None, "say which process by one of pid, match"),
    ],
)
async def test_what_is_not_understood_is_told_as_of_the_files(
    api: Api, body: dict[str, Any], param: str | None, message: str
) -> None:
    _, answer = await api.post(**body)
    assert answer["error"]["message"].startswith(message)
    assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"", 400, "invalid_request"),
        (b"{", 400, "invalid_json"),
        (b"[" * 200_000, 400, "invalid_json"),
        (b"\xff\xfe", 400, "invalid_json"),
        (b"[]", 400, "invalid_request"),
        (b'{"vram_mb": NaN}', 400, "invalid_request"),
        (b'{"vram_mb": ' + b"9" * 5000 + b"}", 400, "invalid_json"),
        (b'{"name": "' + b"x" * (5 << 20) + b'"}', 413, "request_too_large"),
    ],
    ids=["nothing", "half", "deep", "bytes", "list", "nan", "number", "large"],
)
async def test_a_body_that_is_none_is_refused_in_the_usual_shape(api: Api, data: bytes, status: int, code: str) -> None:
    headers = {"Content-Type": "application/json"}
    async with api.http.post(f"{api.url}{LEASES}", data=io.BytesIO(data), headers=headers) as answer:
        told = (await answer.json())["error"]
        assert (answer.status, told["code"]) == (status, code)


async def test_without_the_key_nothing_is_leased_or_shown(tmp_dir: Path) -> None:
    async with serving(tmp_dir, api_key="secret") as broker:
        path = f"{broker.url}{LEASES}"
        for request in (
            broker.http.post(path, json={"vram_mb": 1}),
            broker.http.get(path),
            broker.http.get(f"{path}/http-1"),
            broker.http.delete(f"{path}/http-1"),
            broker.http.post(f"{path}/http-1/renew"),
        ):
            async with request as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("body", [{"vram": "1GiB"}, {"vram_mb": 1, "devices": ["gpu7"]}, {"vram_mb": 1, "gpus": 3}])
async def test_what_can_never_be_is_refused_in_numbers(api: Api, body: dict[str, Any]) -> None:
    status, answer = await api.post(**body)
    assert (status, answer["error"]["code"]) == (400, "will_never_fit")
    assert "sim0" in answer["error"]["message"]
    assert "`devices` or `reserve` in model-boss.yaml" in answer["error"]["message"]


async def test_a_store_that_hangs_is_told_and_what_is_held_stays(api: Api) -> None:
    lease = await api.held(pid=os.getpid(), request_id="held")
    [store] = [child for child in psutil.Process(api.ledger._link.welcome.pid).children() if "server" in child.name()]
    store.suspend()
    try:
        for status, answer in await asyncio.gather(
            api.post(vram_mb=1), api.get(), api.get(f"/{lease['id']}"), api.delete("http-other")
        ):
            assert (status, answer["error"]["code"]) == (503, "store_unavailable")
    finally:
        store.resume()

    async def answers() -> bool:
        return (await api.get(f"/{lease['id']}"))[1].get("state") == "active"

    await until(answers, "the lease to be seen again")
    assert [one["id"] for one in (await api.get())[1]["leases"]] == [lease["id"]], "what was refused does not wait"


async def test_unknown_leases_and_those_of_others_are_told_apart(api: Api) -> None:
    for status, answer in (
        await api.get("/http-none"),
        await api.post("/http-none/renew"),
        await api.delete("http-none"),
    ):
        assert (status, answer["error"]["code"]) == (404, "lease_not_found")
    request = LeaseRequest(new_request_id(), "slot:robin", HolderKind.SLOT, ({"sim0": MIB},), 10)
    slot = await api.ledger.acquire(request)
    assert (await api.get(f"/{slot.id}"))[1]["holder"] == "slot:robin"
    for status, answer in (await api.post(f"/{slot.id}/renew"), await api.delete(slot.id)):
        assert (status, answer["error"]["code"]) == (409, "lease_not_over_http")
    await api.ledger.cancel(slot)


async def test_what_the_books_refuse_is_not_given_whatever_the_store_granted(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_desk, "SETTLE_S", 0.5)
    me = ProcessIdentity.current()
    row = LedgerRow("other", 1, 1, "job:other", {"sim0": 50 * MIB}, me.pid, me.start_ticks, me.pid_namespace)
    with NodeLedger(api.ledger.state.ledger_path) as books:
        books.admit(row)  # the store does not know of it yet
    status, answer = await api.post(vram_mb=40, devices=["sim0"], wait_s=2)
    assert status in (202, 503), answer  # 202 where the keeper told the store in this moment
    if status == 202:
        await api.delete(answer["id"])
    with NodeLedger(api.ledger.state.ledger_path) as books:
        books.remove("other", 1, 1)

    async def given() -> bool:
        return (await api.post(vram_mb=40, devices=["sim0"], wait_s=1, request_id="again"))[0] == 200

    await until(given, "the memory to be given once the books have it")


# -- a broker that comes and goes -------------------------------------------------------------------------------------


async def test_what_is_held_outlives_the_broker_and_is_given_back_to_the_next(tmp_dir: Path) -> None:
    async with a_client(tmp_dir) as first, serving(tmp_dir, desk=LeaseDesk(first)) as broker:
        lease = await Api(broker.url, broker.http, first, LeaseDesk(first)).held(request_id="mine", ttl_s=30)
    async with a_client(tmp_dir) as second, serving(tmp_dir, desk=LeaseDesk(second)) as broker:
        api = Api(broker.url, broker.http, second, LeaseDesk(second))
        status, found = await api.post(vram_mb=40, request_id="mine")
        assert (status, found["id"], found["state"]) == (200, lease["id"], "active")
        assert (await api.post(f"/{lease['id']}/renew"))[0] == 200
        assert (await api.delete(lease["id"]))[1]["state"] == "freed"
        assert api.rows() == []


async def test_a_lease_by_word_ends_in_time_while_no_broker_runs(tmp_dir: Path) -> None:
    async with a_client(tmp_dir) as first, serving(tmp_dir, desk=LeaseDesk(first)) as broker:
        lease = await Api(broker.url, broker.http, first, LeaseDesk(first)).held(ttl_s=3)
        held_s = time.monotonic()
    async with a_client(tmp_dir) as second:

        async def freed() -> bool:
            found = await second.find(lease["id"])
            return found is not None and found.state is LeaseState.FREED

        await until(freed, "the lease to expire")
        assert time.monotonic() - held_s <= 3.0 + 2.0


async def test_the_endpoints_are_documented_with_examples_that_work(api: Api) -> None:
    async with api.http.get(f"{api.url}/openapi.json") as answer:
        paths = json.loads(await answer.text())["paths"]
    assert set(paths[LEASES]) == {"get", "post"}
    assert set(paths[f"{LEASES}/{{lease_id}}"]) == {"get", "delete"}
    assert set(paths[f"{LEASES}/{{lease_id}}/renew"]) == {"post"}
    content = paths[LEASES]["post"]["requestBody"]["content"]["application/json"]
    assert len(content["examples"]) == 4
    for example in content["examples"].values():
        LeaseAsk.model_validate(example["value"])
    assert paths[LEASES]["post"]["responses"]["202"]["content"]["application/json"]["example"]["position"] == 2


async def test_what_may_go_wrong_is_documented_by_status_and_code(api: Api) -> None:
    async with api.http.get(f"{api.url}/openapi.json") as answer:
        paths = json.loads(await answer.text())["paths"]
    documented = {
        f"{method} {path.removeprefix(LEASES)}": {
            status: set(re.findall(r"`(\w+)`:", shown["description"]))
            for status, shown in operation["responses"].items()
            if status.startswith(("4", "5"))
        }
        for path, operations in paths.items()
        if path.startswith(LEASES)
        for method, operation in operations.items()
    }
    store = {"503": {"store_unavailable"}}
    asked_wrongly = {"invalid_request", "invalid_json", "will_never_fit"}
    assert documented == {
        "post ": {
            "400": asked_wrongly,
            "409": {"lease_over", "lease_differs"},
            "503": {"no_room", "store_unavailable"},
        },
        "get ": store,
        "get /{lease_id}": {"404": {"lease_not_found"}} | store,
        "delete /{lease_id}": {"404": {"lease_not_found"}, "409": {"lease_not_over_http"}} | store,
        "post /{lease_id}/renew": {"404": {"lease_not_found"}, "409": {"lease_not_over_http", "lease_over"}} | store,
    }
