"""kill -9 of keeper, store, wrapper and holder, on a box where jobs come and go: no leaked lease, no lawless process.

Ten kills of each kind by default; `GPUBOSS_KILLS=75` for all 300, a few minutes; `-s` shows what was hit and how long
things took.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.acceptance.gpuboss_scene import Jobs, Look, Watch, everything_gone, improper
from tests.support import wait_until

KILLS = int(os.environ.get("GPUBOSS_KILLS", "10"))
"""Of each kind; 75 for the whole matrix."""
LEASES_GONE_S = 10.0
LIFE_S = 5.0
"""Until somebody who came after the kill holds a lease; most of the time."""
LATEST_LIFE_S = 30.0
"""Always, also on a machine that has other things to do."""
AIMS = {"wrapper": ("waiting", "running", "any"), "holder": ("waiting", "holding", "any")}
"""What victims are to be about when they are killed, in turn; keeper and store are killed at any moment."""
AIM_S = 5.0
"""How long a kill waits for that before it takes what there is."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + KILLS * 20)]


@pytest.mark.parametrize("target", ["keeper", "store", "wrapper", "holder"])
def test_kill(tmp_dir: Path, target: str) -> None:
    chance = random.Random(f"{target} {KILLS}")
    hits: Counter[str] = Counter()
    times: dict[str, list[float]] = {"next grant": [], "ended": []}
    with everything_gone(tmp_dir), Watch(tmp_dir) as watch:
        with Jobs(tmp_dir, wrappers=3, holders=2, seed=chance.randrange(1000)) as jobs:
            wait_until(lambda: watch.most_at_once >= 2, "the box to be full")
            while (number := hits.total()) < KILLS:
                time.sleep(chance.uniform(0, 0.4))  # the moment is to be any
                aims = AIMS.get(target, ("any",))
                pid, seen = _aim(jobs, watch, target, aims[number % len(aims)], chance)
                killed_s = time.monotonic()
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:  # it ended just now, by itself: no kill
                    continue
                hits[_what_it_did(target, pid, seen)] += 1
                lease = next((lease for lease, (holder, _) in seen.rows.items() if holder == pid), None)
                if lease is not None:
                    wait_until(lambda lease=lease: not watch.carriers_of(lease), "its processes to end", timeout_s=10)
                    times["ended"].append(time.monotonic() - killed_s)
                known = {*seen.rows, *(seen.leases or ())}
                wait_until(
                    lambda killed_s=killed_s, known=known: watch.granted_after(killed_s, known),
                    "a grant after the kill",
                    timeout_s=LATEST_LIFE_S,
                )
                times["next grant"].append(time.monotonic() - killed_s)
                _lawful(watch)
        wait_until(lambda: not _used(watch.last), "every row and lease to be gone", timeout_s=LEASES_GONE_S)
        _lawful(watch)
        told = ", ".join(f"{what} {count}" for what, count in sorted(hits.items()))
        took = "; ".join(
            f"{what} {statistics.median(all_s):.2f} s, at worst {max(all_s):.2f} s"
            for what, all_s in times.items()
            if all_s
        )
        leaks = "; ".join(
            f"{what} for at most {watch.worst_s(what):.2f} s"
            for what in ("row without its holder", "lease without a process")
        )
        print(f"\n{KILLS} kills of the {target}; hit: {told}; {took}; {leaks}")
        print(f"{len(jobs.codes)} runs, {watch.looks} looks")
        assert statistics.median(times["next grant"]) < LIFE_S
        assert watch.most_at_once == 2, "the box was full"
        assert watch.looks > 50, "somebody looked"
        assert not improper(jobs.codes), f"{sorted(improper(jobs.codes))}: {jobs.said()[-2000:]}"
        for aim in set(AIMS.get(target, ())) - {"any"}:
            assert hits[aim] >= KILLS // 5, f"{aim} was hit {hits[aim]} times only"


def _aim(jobs: Jobs, watch: Watch, target: str, aim: str, chance: random.Random) -> tuple[int, Look]:
    """A victim that is about this, and what was seen just before."""
    found: list[int] = []
    deadline_s = time.monotonic() + AIM_S

    def look() -> bool:
        anything = aim == "any" or time.monotonic() > deadline_s
        living = jobs.living(target)
        found[:] = [pid for pid in living if anything or _what_it_did(target, pid, watch.last) == aim]
        return bool(found)

    wait_until(look, f"a living {target}")
    time.sleep(chance.uniform(0, 0.05))
    return chance.choice(found), watch.last


def _lawful(watch: Watch) -> None:
    assert not watch.oversubscribed
    assert not watch.worst_s("process without a row"), [one for one in watch.longer_than(0) if "process w" in one.what]
    assert not watch.longer_than(LEASES_GONE_S)


def _used(look: Look) -> bool:
    return bool(look.rows or look.carriers or look.leases is None or look.leases)


def _what_it_did(target: str, pid: int, seen: Look) -> str:
    """What the victim was about just before it was killed."""
    if target in ("keeper", "store"):
        waiting = sum(state == "queued" for state, _ in (seen.leases or {}).values())
        return f"{len(seen.rows)} held, {'some' if waiting else 'none'} waiting"
    for lease, (holder, _) in seen.rows.items():
        if holder == pid:
            if target == "holder":
                return "holding"
            return "running" if lease in seen.carriers.values() else "beginning or ending"
    if any(asker == pid for _, asker in (seen.leases or {}).values()):
        return "waiting"
    return "before or after its lease"
