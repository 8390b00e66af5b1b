"""The node's book under many processes at once, watched by one that only counts.

Ground truth is kept outside the ledger: every worker adds what it was given to a shared counter after it was admitted,
and takes it off before it removes its row. So at every moment the counter is at most what the ledger gave out, and a
counter above the capacity is an oversubscription, whatever the ledger's own tables say.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path

from gpuboss.devices import Device, DeviceKind
from gpuboss.errors import ActivationRefused
from gpuboss.identity import Liveness, ProcessIdentity
from gpuboss.node_ledger import LedgerRow, NodeLedger
from tests.support import wait_until

WORKERS = 8
CAPACITY = {"sim0": 1000, "sim1": 600}
DEVICES = [
    Device(name, DeviceKind.SIM, name, n, size + 50, 50, measured=False)
    for n, (name, size) in enumerate(CAPACITY.items())
]
SPAWN = multiprocessing.get_context("spawn")
Counters = dict[str, "Synchronized[int]"]


class Unchecked(NodeLedger):
    """The ledger with its re-check switched off: believes whatever it is told."""

    def _check_room(self, row: LedgerRow, adopts: Mapping[str, int]) -> None:
        pass


def work(
    kind: type[NodeLedger],
    path: Path,
    seed: int,
    rounds: int,
    start: Barrier,
    in_use: Counters,
    most: Counters,
    tally: Counters,
) -> None:
    """Admit and remove at random, telling the counters what was given."""
    rng = random.Random(seed)
    me = ProcessIdentity.current()
    start.wait(60)
    with kind(path) as ledger:  # all open the file for the first time at once
        held: list[LedgerRow] = []
        for number in range(rounds):
            if held and (rng.random() < 0.45 or number == rounds - 1):
                row = held.pop(rng.randrange(len(held)))
                account(in_use, most, row, -1)
                assert ledger.remove(row.lease_id, row.epoch, row.seq)
                continue
            names = rng.sample(sorted(CAPACITY), rng.randint(1, 2))
            shares = {name: rng.randint(1, 400) for name in names}
            row = LedgerRow(
                f"{seed}-{number}", 1, number, f"worker:{seed}", shares, me.pid, me.start_ticks, me.pid_namespace
            )
            try:
                ledger.admit(row)
            except ActivationRefused:
                count(tally["refused"])
                continue
            account(in_use, most, row, +1)
            count(tally["admitted"])
            held.append(row)
        for row in held:
            account(in_use, most, row, -1)
            assert ledger.remove(row.lease_id, row.epoch, row.seq)


def account(in_use: Counters, most: Counters, row: LedgerRow, sign: int) -> None:
    for name, size in row.shares.items():
        with in_use[name].get_lock():
            in_use[name].value += sign * size
            most[name].value = max(most[name].value, in_use[name].value)


def count(counter: Synchronized[int]) -> None:
    with counter.get_lock():
        counter.value += 1


def hammer(kind: type[NodeLedger], path: Path, *, rounds: int) -> tuple[dict[str, int], dict[str, int]]:
    """The most that was in use at once by device, and how many were admitted and refused."""
    with NodeLedger(path) as ledger:
        ledger.put_devices(DEVICES)
    in_use = {name: SPAWN.Value("q", 0) for name in CAPACITY}
    most = {name: SPAWN.Value("q", 0) for name in CAPACITY}
    tally = {name: SPAWN.Value("q", 0) for name in ("admitted", "refused")}
    start = SPAWN.Barrier(WORKERS)
    workers = [
        SPAWN.Process(target=work, args=(kind, path, seed, rounds, start, in_use, most, tally))
        for seed in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * WORKERS
    assert {name: counter.value for name, counter in in_use.items()} == dict.fromkeys(CAPACITY, 0)
    return {name: counter.value for name, counter in most.items()}, {
        name: counter.value for name, counter in tally.items()
    }


def test_eight_processes_at_once_are_never_given_more_than_there_is(tmp_path: Path) -> None:
    path = tmp_path / "node.sqlite"
    most, tally = hammer(NodeLedger, path, rounds=1000)
    for name, capacity in CAPACITY.items():
        assert most[name] <= capacity
        assert most[name] > capacity * 0.9, "the device was never close to full, so nothing was tried"
    assert tally["admitted"] > 1000
    assert tally["refused"] > 1000
    with NodeLedger(path) as ledger:
        assert ledger.rows() == []
        assert {device.id: device.free_bytes for device in ledger.devices()} == CAPACITY


def test_without_the_re_check_the_same_run_gives_out_too_much(tmp_path: Path) -> None:
    most, tally = hammer(Unchecked, tmp_path / "node.sqlite", rounds=60)
    assert tally["refused"] == 0
    assert any(most[name] > capacity for name, capacity in CAPACITY.items())


def test_many_processes_may_make_the_file_at_once(tmp_path: Path) -> None:
    for attempt in range(3):
        path = tmp_path / f"node-{attempt}.sqlite"
        program = (
            "import sys; from gpuboss.node_ledger import NodeLedger; sys.stdin.readline(); "
            "print(NodeLedger(sys.argv[1]).rows())"
        )
        openers = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(WORKERS)
        ]
        for opener in openers:
            assert opener.stdin is not None
            opener.stdin.write("go\n")
            opener.stdin.flush()
        assert [opener.communicate(timeout=60)[0] for opener in openers] == ["[]\n"] * WORKERS


DIE_HARD = """
import sys
from gpuboss.identity import ProcessIdentity
from gpuboss.node_ledger import LedgerRow, NodeLedger
ledger, me, n = NodeLedger(sys.argv[1]), ProcessIdentity.current(), 0
while True:
    n += 1
    shares = {"sim0": 7, "sim1": 5}
    ledger.admit(LedgerRow(f"{me.pid}-{n}", 1, n, "job", shares, me.pid, me.start_ticks, me.pid_namespace))
    print("admitted", flush=True)
    ledger.remove(f"{me.pid}-{n}", 1, n)
    print("removed", flush=True)
"""


def test_processes_killed_in_the_middle_leave_whole_rows_and_a_sound_file(tmp_path: Path) -> None:
    path = tmp_path / "node.sqlite"
    rng = random.Random(7)
    left_behind = 0
    with NodeLedger(path) as ledger:
        ledger.put_devices(DEVICES)
        for _ in range(20):
            victim = subprocess.Popen([sys.executable, "-c", DIE_HARD, str(path)], stdout=subprocess.PIPE, text=True)
            assert victim.stdout is not None
            for _ in range(rng.randint(1, 20)):
                victim.stdout.readline()
            os.kill(victim.pid, signal.SIGKILL)
            victim.communicate()
            rows = ledger.rows()
            assert all(row.shares == {"sim0": 7, "sim1": 5} for row in rows)
            # A row of a dead process counts until somebody takes it out.
            free = {device.id: device.free_bytes for device in ledger.devices()}
            assert free == {"sim0": 1000 - 7 * len(rows), "sim1": 600 - 5 * len(rows)}
            for row in rows:
                assert row.process.is_alive() is Liveness.DEAD
                left_behind += 1
                assert ledger.remove(row.lease_id, row.epoch, row.seq)
    assert left_behind > 0, "no process died with a row, so nothing was tried"
    with sqlite3.connect(path) as direct:
        assert direct.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    direct.close()


def test_a_process_stopped_with_the_ledger_locked_lets_go_when_killed(tmp_path: Path) -> None:
    path = tmp_path / "node.sqlite"
    program = (
        "import sys, time; from gpuboss.node_ledger import NodeLedger; "
        "NodeLedger(sys.argv[1])._db.execute('BEGIN IMMEDIATE'); print('locked', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    holder.kill()
    holder.communicate()
    wait_until(lambda: holder.poll() is not None, "the holder to be gone")
    with NodeLedger(path) as ledger:
        ledger.put_devices(DEVICES)
