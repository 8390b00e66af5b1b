"""What the control API shows of slots and of who waits, and `explain`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from yarl import URL

from gpuboss.ledger_rows import Ground, SharePeak
from inference import breaker
from inference.admission import Progress
from inference.errors import TooManyQuestions
from inference.explain import Blocker, DeviceShare, Explanation, Verdict, Victim
from inference.fault import Fault
from inference.slot_state import SlotState
from tests.integration.coordinator.support import FakeSlot, Serving, a_model, serving
from tests.support import until

MIB = 1 << 20
DAY_S = 86_400.0


async def _get(broker: Serving, path: str) -> Any:
    return await (await broker.http.get(URL(f"{broker.url}{path}", encoded=True))).json()


async def _slot(broker: Serving) -> Any:
    [slot] = (await _get(broker, "/api/v1/slots"))["slots"]
    return slot


# -- slots ---------------------------------------------------------------------------------------------------------


async def test_a_slot_shows_what_it_claims_and_what_it_was_seen_to_use(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.slot_by_id["robin"].lease = SimpleNamespace(id="l1", shares={"gpu0": 40 * MIB})
        slot = await _slot(broker)
        assert (slot["devices"], slot["observed_bytes"]) == ({"gpu0": 40 * MIB}, None), "nothing measured it yet"
        broker.pool.seen = {"l1": (SharePeak("gpu0", 37 * MIB, 1.0),), "l2": (SharePeak("gpu0", 1, 1.0),)}
        assert (await _slot(broker))["observed_bytes"] == {"gpu0": 37 * MIB}


async def test_one_slot_shows_what_the_grant_of_its_memory_rested_on(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        assert (await _get(broker, "/api/v1/slots/robin"))["grounds"] is None, "it has no memory"
        broker.pool.slot_by_id["robin"].lease = SimpleNamespace(id="l1", shares={"gpu0": 40 * MIB})
        broker.pool.rested_on = {"l1": (Ground("gpu0", 60 * MIB, 0.04, "slot:wren", 0.06),)}
        assert (await _get(broker, "/api/v1/slots/robin"))["grounds"] == [
            {"device": "gpu0", "free_bytes": 60 * MIB, "read_age_s": 0.04, "after": "slot:wren", "after_age_s": 0.06}
        ]


async def test_a_slot_shows_who_uses_it_who_waits_and_how_long_it_stays(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.holding = True
        asking = asyncio.ensure_future(broker.chat())
        await until(lambda: broker.pool.tickets, "the ticket")
        slot = await _slot(broker)
        assert (slot["waiting"], slot["last_load_s"], slot["priority"], slot["pin"]) == (1, 0.05, "normal", False)
        assert 0 < slot["stays_s"] <= 300
        broker.pool.settle()
        await asking


async def test_a_pinned_slot_does_not_leave_by_itself(tmp_dir: Path) -> None:
    async with serving(tmp_dir, models=(a_model("robin", pin=True),)) as broker:
        slot = await _slot(broker)
        assert (slot["pin"], slot["stays_s"]) == (True, None)


async def test_a_slot_shows_for_whom_it_leaves_and_who_asks_it_to(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.beneficiary, broker.pool.noticed_by = "wren", "job:sft"
        slot = await _slot(broker)
        assert (slot["leaves_for"], slot["yields_to"]) == (None, "job:sft"), "it is not leaving yet"
        broker.pool.slot_by_id["robin"].state = SlotState.DRAINING
        assert (await _slot(broker))["leaves_for"] == "wren"


@pytest.mark.parametrize(
    ("state", "after", "waits", "trouble"),
    [
        (SlotState.FAILED, breaker.MayStart(), False, "it crashed"),
        (SlotState.FAILED, breaker.NotBefore(time.monotonic() + DAY_S), True, "it crashed"),
        (SlotState.FAILED, breaker.Open(time.monotonic() + DAY_S, 3, "it crashed thrice"), True, "it crashed thrice"),
        (SlotState.IDLE, breaker.Standing(Fault.BAD_MODEL, "not a GGUF"), False, "not a GGUF"),
        (SlotState.WEDGED, breaker.MayStart(), False, "it crashed"),
        (SlotState.READY, breaker.NotBefore(time.monotonic() + DAY_S), False, None),
    ],
)
async def test_a_slot_shows_what_is_wrong_with_it_and_until_when(
    tmp_dir: Path, state: SlotState, after: breaker.State, waits: bool, trouble: str | None
) -> None:
    async with serving(tmp_dir) as broker:
        slot = broker.pool.slot_by_id["robin"]
        slot.state, slot.story = state, (SimpleNamespace(state=state, reason="it crashed", at_s=0.0),)
        broker.pool.after_failures = after
        shown = await _slot(broker)
        assert shown["trouble"] == trouble
        assert (shown["retry_s"] is not None and 0 < shown["retry_s"] <= DAY_S) is waits


async def test_slots_of_one_model_have_ids_of_their_own(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        robin = broker.pool.slot_by_id["robin"]
        broker.pool.slot_by_id["robin#2"] = FakeSlot(robin.model, SlotState.LOADING, "robin#2", pid=4812)
        assert (await _get(broker, "/api/v1/slots/robin"))["pid"] == 4711
        assert (await _get(broker, "/api/v1/slots/robin%232"))["pid"] == 4812
        assert (await _get(broker, "/api/v1/slots/gpt-4%232"))["slot"] == "robin#2", "an alias"
        missing = await _get(broker, "/api/v1/slots/robin%233")
        assert (missing["error"]["code"], "robin#3" in missing["error"]["message"]) == ("not_found", True)
        models = (await _get(broker, "/v1/models"))["data"]
        assert {model["id"]: model["state"] for model in models}["robin"] == "ready", "one of them serves"
        robin.state = SlotState.FAILED
        models = (await _get(broker, "/v1/models"))["data"]
        assert {model["id"]: model["state"] for model in models}["robin"] == "loading"


# -- the queue -------------------------------------------------------------------------------------------------------


async def test_the_queue_tells_what_each_request_counts_as_and_when_its_turn_may_be(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.holding = True
        broker.pool.progress = Progress(1, 1, SlotState.IDLE, None, eta_s=12.25)
        asking = asyncio.ensure_future(broker.chat(x_client_id="kitchen", x_priority="batch"))
        await until(lambda: broker.pool.tickets, "the ticket")
        [entry] = (await _get(broker, "/api/v1/queue"))["queue"]
        assert (entry["priority"], entry["counts_as"], entry["eta_s"]) == ("batch", "batch", 12.25)
        assert (entry["kept_place"], entry["waited_s"]) == (False, 0.5)
        broker.pool.settle()
        await asking


# -- explain ---------------------------------------------------------------------------------------------------------

TOLD = Explanation(
    model_id="",
    priority=10,
    verdict=Verdict.EVICTS,
    need_bytes=40 * MIB,
    options=({"sim0": 40 * MIB},),
    victims=(Victim("robin", "robin", 40 * MIB, 10, 0, 3.25, 0.5),),
    blocked_by=(Blocker("robin", 40 * MIB, "it is leaving"),),
    position=1,
    waiting=1,
    devices=(DeviceShare("sim0", 60 * MIB, 0, 0, 40 * MIB, 20 * MIB),),
    eta_s=0.75,
)


async def test_explain_tells_who_would_go_and_what_it_waits_for_in_numbers(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.explanation = TOLD
        told = await _get(broker, "/api/v1/explain?model=wren&priority=high")
        assert (told["model"], told["priority"], told["verdict"]) == ("wren", "high", "evicts")
        assert (told["need_bytes"], told["position"], told["waiting"], told["eta_s"]) == (40 * MIB, 1, 1, 0.75)
        assert told["options"] == [{"sim0": 40 * MIB}]
        [victim] = told["victims"]
        assert (victim["slot"], victim["freed_bytes"], victim["priority"]) == ("robin", 40 * MIB, "normal")
        assert (victim["idle_s"], victim["reload_s"], victim["in_flight"]) == (3.25, 0.5, 0)
        assert told["blocked_by"] == [{"name": "robin", "held_bytes": 40 * MIB, "why": "it is leaving"}]
        assert told["devices"][0]["free_bytes"] == 20 * MIB
        assert not broker.pool.tickets, "to ask changes nothing"


async def test_nobody_looks_ahead_for_a_caller_who_hung_up(tmp_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_dir) as broker:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def explain(*_: object) -> Explanation:
            begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()
            return TOLD

        monkeypatch.setattr(broker.pool, "explain", explain)
        asking = asyncio.ensure_future(_get(broker, "/api/v1/explain?model=wren"))
        await begun.wait()
        asking.cancel()
        await until(ended.is_set, "the look ahead to end", timeout_s=1)


async def test_too_many_questions_are_told_when_to_come_back(tmp_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_dir) as broker:

        async def explain(*_: object) -> Explanation:
            raise TooManyQuestions("16 such questions wait already")

        monkeypatch.setattr(broker.pool, "explain", explain)
        response = await broker.http.get(f"{broker.url}/api/v1/explain?model=wren")
        assert (response.status, response.headers["retry-after"]) == (429, "5")
        assert (await response.json())["error"]["code"] == "too_many_questions"


async def test_explain_takes_aliases_and_the_default_model(tmp_dir: Path) -> None:
    async with serving(tmp_dir, default="wren") as broker:
        broker.pool.explanation = TOLD
        assert (await _get(broker, "/api/v1/explain?model=gpt-4"))["model"] == "robin"
        assert (await _get(broker, "/api/v1/explain"))["model"] == "wren"


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("model=none", "model_not_found", "model"),
        ("model=robin&priority=soon", "invalid_request", "priority"),
        (f"model=robin&priority={'9' * 500}", "invalid_request", "priority"),
        (f"model={'r' * 300}", "invalid_request", "model"),
    ],
)
async def test_what_cannot_be_explained_is_refused(tmp_dir: Path, query: str, code: str, param: str) -> None:
    async with serving(tmp_dir) as broker:
        error = (await _get(broker, f"/api/v1/explain?{query}"))["error"]
        assert (error["code"], error["param"]) == (code, param)
        assert len(error["message"]) < 500
