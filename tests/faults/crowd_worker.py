"""One process of the crowd: fifty tasks that lease, hold and release through `gpuboss.store.Store`; or the keeper.

Started by `tests.faults.crowd` as `python -m tests.faults.crowd_worker ORDER` (JSON). Every operation goes into a
file, with the moments of its call and its return on the clock that all processes share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from typing import Any, TextIO

import uvloop

from gpuboss import errors
from gpuboss.scripts import Script
from gpuboss.settings import Timings
from gpuboss.store import Store

_LOOK_S = 0.05
_LARGE = 0.03
"""So many ask for up to a whole device, and have others wait."""
_RENEWALS = 5
"""While a lease is held."""
_LONGEST_STEP_S = 0.006
"""Between two of them."""
_LONGEST_PAUSE_S = 2.4
"""Between two leases of a task: so that the store is busy with many short leases, not with one long queue."""
Json = dict[str, Any]


class _Worker:
    """A process's tasks."""

    def __init__(self, order: Json, trace: TextIO) -> None:
        self._order = order
        self._trace = trace
        self._store = Store(order["url"], Timings())
        self._chance = random.Random(order["seed"])
        self._waiting: dict[str, asyncio.Future[Json]] = {}
        self._end_s = order["end_s"]

    async def main(self) -> None:
        """Until the end."""
        tasks = [asyncio.create_task(self._live(number)) for number in range(self._order["tasks"])]
        helpers = [asyncio.create_task(self._look())]
        if self._order["listens"]:
            helpers.append(asyncio.create_task(self._listen()))
        await asyncio.gather(*tasks)
        for helper in helpers:
            helper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await helper
        await self._store.close()

    async def keep(self) -> None:
        """The keeper: says what the node has, again and again, and lets time pass."""
        devices = {
            name: {"total": size, "reserve": 0, "foreign": 0, "residual": 0, "settles": False}
            for name, size in self._order["devices"].items()
        }
        seen = 0
        while time.monotonic() < self._end_s:
            with contextlib.suppress(errors.GpubossError):
                told = {"node": "n0", "seen_epoch": seen, "devices": devices, "rows": []}
                seen = (await self._store.call_once(Script.NODE_SYNC, told))["epoch"]
                for _ in range(4):
                    await asyncio.sleep(0.25)
                    await self._call("tick", Script.TICK, {})
        await self._store.close()

    async def _live(self, number: int) -> None:
        count = 0
        while time.monotonic() < self._end_s:
            count += 1
            await asyncio.sleep(self._chance.random() * _LONGEST_PAUSE_S)
            await self._lease(f"p{self._order['seed']}t{number}n{count}")

    async def _lease(self, lease_id: str) -> None:
        chance = self._chance
        devices = chance.sample(list(self._order["devices"]), chance.choice((1, 1, 1, 2)))
        most = 1.0 if chance.random() < _LARGE else 0.2
        option = {name: chance.randint(1, int(self._order["devices"][name] * most)) for name in devices}
        told = {
            "id": lease_id,
            "holder": f"job:{lease_id}",
            "kind": "job",
            "priority": chance.choice((1, 10, 50)),
            "node": "n0",
            "owner": "{}",
            "options": json.dumps([option]),
        }
        view = (await self._call("acquire", Script.ACQUIRE, told))["lease"]
        if view["state"] == "queued":
            if chance.random() < 0.02:
                await self._call("cancel", Script.CANCEL, {"id": lease_id})
                return
            waiting = self._waiting[lease_id] = asyncio.get_running_loop().create_future()
            view = await waiting
        if view["state"] != "granted":
            return
        fence = {"epoch": view["epoch"], "seq": view["seq"]}
        since_s = time.monotonic()
        self._write({"op": "holds", "id": lease_id, "at": since_s, "shares": json.loads(view["shares"]), **fence})
        await self._call("activate", Script.ACTIVATE, {"id": lease_id, **fence})
        for _ in range(_RENEWALS):
            await asyncio.sleep(chance.random() * _LONGEST_STEP_S)
            await self._call("renew", Script.RENEW_MANY, {"leases": [{"id": lease_id, **fence}]})
        self._write({"op": "ends", "id": lease_id, "at": time.monotonic()})
        reply = await self._call("release", Script.RELEASE, {"id": lease_id, **fence})
        self._write({"op": "released", "id": lease_id, "state": reply.get("state", reply["status"])})

    async def _look(self) -> None:
        """Looks for all that wait, as a client's waiting room does."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._waiting:
                await self._look_at(list(self._waiting))

    async def _look_at(self, lease_ids: list[str]) -> None:
        reply = await self._call("look", Script.LOOK, {"ids": lease_ids})
        for view in reply["leases"] or ():
            waiting = self._waiting.get(view["id"])
            if view["state"] != "queued" and waiting is not None:
                del self._waiting[view["id"]]
                waiting.set_result(view)

    async def _listen(self) -> None:
        """The stream says who was granted, as long as it lasts."""
        place: str | None = None
        while True:
            try:
                place, events = await self._store.read_events(place, 1.0)
            except errors.StoreUnavailable:
                place = None
                await asyncio.sleep(0.01)
                continue
            granted = [
                event.lease_id for event in events if event.what == "granted" and event.lease_id in self._waiting
            ]
            if granted:
                await self._look_at(granted)

    async def _call(self, op: str, script: Script, told: Json) -> Json:
        """One operation, until it is done."""
        while True:
            call_s = time.monotonic()
            try:
                reply = await self._store.call(script, told)
            except errors.StoreUnavailable:
                self._write({"op": "lost", "what": op, "call": call_s, "return": time.monotonic()})
                continue
            record = {"op": op, "call": call_s, "return": time.monotonic()}
            view = reply.get("lease") or {}
            if "epoch" in view:
                record |= {"id": told["id"], "state": view["state"], "fence": [view["epoch"], view["seq"]]}
            self._write(record)
            return reply

    def _write(self, record: Json) -> None:
        self._trace.write(json.dumps(record, separators=(",", ":")) + "\n")


async def _main(order: Json) -> None:
    with open(order["trace"], "w", encoding="utf-8") as trace:  # noqa: ASYNC230, PTH123 (a line is all it waits for)
        worker = _Worker(order, trace)
        await (worker.keep() if order["keeper"] else worker.main())


if __name__ == "__main__":
    uvloop.run(_main(json.loads(sys.argv[1])))
