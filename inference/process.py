"""The broker's end of a shim: spawn it, order it, hear what became of the engine.

Used by `engine_run.py`. `Shims` keeps an idle shim ready, because an interpreter takes longer to start than a small
model takes to load. The other end, and the protocol, are in `shim.py`; a shim that an earlier broker spawned comes from
`takeover.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import gpuboss
import inference
from inference.shim_door import PROTOCOL

__all__ = [
    "EndReason",
    "Exited",
    "LaunchOrder",
    "LeaseOrder",
    "Lost",
    "ReadyOrder",
    "Refused",
    "Report",
    "Shim",
    "ShimProcess",
    "Shims",
    "Started",
    "Wedged",
]

_MAIN = "import sys; sys.path += sys.argv[2:]; from inference.shim import main; main(sys.argv[1])"
"""Imported rather than run as a file, so that Python keeps its compiled form."""


CLOSE_PATIENCE_S = 10.0
"""For a shim that was let go of; by itself it is gone within `shim.ORPHAN_GRACE_S`."""


class EndReason(StrEnum):
    """Why an engine's processes are dead."""

    EXIT = "exit"
    """It ended by itself, or somebody else killed it."""
    STOPPED = "stopped"
    """It was ordered to end."""
    ORPHANED = "orphaned"
    """The broker let go of the shim, or somebody told the shim to go."""


@dataclass(frozen=True, slots=True)
class Started:
    """The engine runs, and stands in the node ledger."""

    pid: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was started; another launch may be ordered."""

    kind: str
    """The error's class: `ActivationRefused` (no memory), `StaleFence`, .., or `Unstartable` (the program)."""
    message: str
    settling_bytes: int
    """Of the memory that is missing: what ended holders used and no reading has shown to be back. Worth another try."""


@dataclass(frozen=True, slots=True)
class Exited:
    """Every process of the engine is dead, and its row is out of the node ledger."""

    code: int | None
    """The engine's exit code; None when a signal ended it."""
    signal: int | None
    max_rss_bytes: int
    reason: EndReason

    def __str__(self) -> str:
        """`ended with code 1`, `was killed by SIGKILL`."""
        if self.signal is None:
            return f"ended with code {self.code}"
        try:
            name = signal.Signals(self.signal).name
        except ValueError:
            name = f"signal {self.signal}"
        if name == "SIGKILL" and self.reason is EndReason.EXIT:
            return f"was killed by {name}, as the system does when memory runs out"
        return f"was killed by {name}"


@dataclass(frozen=True, slots=True)
class Wedged:
    """SIGKILL does not end these processes; more reports follow if they end after all."""

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """The shim is dead and did not say how the engine ended; the keeper takes the row out once all is dead."""

    code: int | None
    """The shim's exit code; negative: the signal that killed it; None for a shim that is not our child."""


Report = Started | Refused | Exited | Wedged | Lost


@dataclass(frozen=True, slots=True)
class LeaseOrder:
    """The lease as the node ledger needs it."""

    id: str
    epoch: int
    seq: int
    holder: str
    shares: Mapping[str, int]
    terms: str = ""
    """What else belongs to it, as text that is kept with it (`gpuboss.lease_wire.terms_for`)."""


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """What to start, and under which lease."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment; nothing is inherited."""
    cwd: str
    log: str
    """The file that gets the engine's output, at its end."""
    socket: str
    """What the engine listens on; removed when it is dead."""
    lease: LeaseOrder


@dataclass(frozen=True, slots=True)
class ReadyOrder:
    """The engine serves, and may outlive this broker: how the next one finds it."""

    file: str
    """Where the shim says who and where it is; gone when the engine's story is over."""
    socket: str
    """Where it waits for the next broker; gone with the file."""
    grace_s: float
    """How long it waits."""
    told: Mapping[str, object]
    """What the next broker has to know; the shim keeps it and does not read it."""


class ShimProcess(Protocol):
    """A shim, as far as the system shows it; `asyncio.subprocess.Process` for one that we spawned."""

    @property
    def pid(self) -> int:
        """Its number."""

    @property
    def returncode(self) -> int | None:
        """None until its end was noticed."""

    async def wait(self) -> int | None:
        """Its exit code, as in `Lost`, once it has ended."""

    def kill(self) -> None:
        """SIGKILL."""


class Shim:
    """One shim process. Used by one task at a time."""

    def __init__(
        self,
        process: ShimProcess,
        orders: asyncio.StreamWriter,
        reports: asyncio.StreamReader,
        *,
        adopted: bool = False,
        protocol: int = PROTOCOL,
    ) -> None:
        """For `spawn` and `takeover.take_over`."""
        self.pid = process.pid
        self.idle = not adopted
        """It waits for a launch: nothing runs under it."""
        self._adopted = adopted
        """Another broker spawned it, perhaps of another version: it serves for the engine it has, and for no other."""
        self._process = process
        self._orders = orders
        self._reports = reports
        self._protocol = protocol
        self._outlives = False
        """Its engine is to outlive us if we die."""

    @classmethod
    async def spawn(cls, ledger: Path) -> Shim:
        """Start a shim for this node ledger that waits for its order; what it writes to stderr comes out at ours."""
        packages = {str(Path(package.__file__ or "").parents[1]): None for package in (inference, gpuboss)}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _MAIN, str(ledger), *packages),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        return cls(process, process.stdin, process.stdout)

    @property
    def alive(self) -> bool:
        """False once its end was noticed."""
        return self._process.returncode is None

    def launch(self, order: LaunchOrder) -> None:
        """Order the engine to be started; the next report says whether it was."""
        self.idle = False
        self._send({"op": "launch", **asdict(order)})

    def ready(self, order: ReadyOrder) -> None:
        """Have the engine outlive this broker if it dies; of an engine that was adopted: the adoption is complete."""
        self._outlives = True
        if self._protocol > 1:  # before, adopting was calling ready
            self._send({"op": "ready", **asdict(order)})

    def stop(self, grace_s: float) -> None:
        """Order the engine's end: SIGTERM, SIGKILL after `grace_s` (at once when 0). `Exited` follows."""
        self._outlives = False
        self._send({"op": "stop", "grace_s": grace_s})

    async def report(self) -> Report:
        """Wait for the next report. After `Exited` or `Lost` there is none, unless another launch is ordered."""
        try:
            line = await self._reports.readline()
        except ConnectionResetError:
            line = b""
        if not line:
            return Lost(await self._process.wait())
        report = _parse(json.loads(line))
        over = isinstance(report, Exited) and report.reason is not EndReason.ORPHANED
        self.idle = not self._adopted and (over or isinstance(report, Refused))
        return report

    def let_go(self) -> None:
        """Give no more orders: as if this process had died."""
        self._orders.close()

    async def close(self) -> None:
        """Let go of the shim, which ends whatever still runs, and wait until it is gone.

        One that does not go within `CLOSE_PATIENCE_S` is killed; the keeper then ends what it leaves.
        """
        if self._outlives:
            self.stop(0.0)
        self.let_go()
        try:
            async with asyncio.timeout(CLOSE_PATIENCE_S):
                await self._gone()
        except TimeoutError:
            self._process.kill()
            await self._gone()

    async def _gone(self) -> None:
        with contextlib.suppress(ConnectionError):
            await self._orders.wait_closed()
        with contextlib.suppress(ConnectionError):
            await self._reports.read()
        await self._process.wait()

    def _send(self, order: Mapping[str, object]) -> None:
        if not self._orders.is_closing():  # a dead shim is heard of by its reports
            self._orders.write(json.dumps(order).encode() + b"\n")


class Shims:
    """Gives out shims, keeps `spares` idle ones ready, and sees off what is too many. Belongs to the pool."""

    def __init__(self, ledger: Path, *, spares: int = 0) -> None:
        self._ledger = ledger
        self._wanted = spares
        self._ready: list[Shim] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._filling = False
        self._closed = False

    async def startup(self) -> None:
        """Start the spare ones."""
        self.refill()

    async def take(self) -> Shim:
        """A shim that waits for its order: a spare one if there is one."""
        while self._ready:
            shim = self._ready.pop()
            if shim.alive:
                return shim
            self.retire(shim)
        return await Shim.spawn(self._ledger)

    def refill(self) -> None:
        """Start the spare ones that are missing; for a moment when nobody waits for the processor."""
        if not self._filling and not self._closed and len(self._ready) < self._wanted:
            self._filling = True
            self._watch(self._fill(), "spare-shims")

    def retire(self, shim: Shim) -> None:
        """Take a shim back: as a spare one if it can serve again and is wanted, else it is closed."""
        if shim.idle and shim.alive and not self._closed and len(self._ready) < self._wanted:
            self._ready.append(shim)
        else:
            self._watch(shim.close(), f"shim {shim.pid} goes")

    async def close(self) -> None:
        """End the spare ones, and wait until every shim that was retired is gone."""
        self._closed = True
        while self._ready:
            self.retire(self._ready.pop())
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _fill(self) -> None:
        try:
            while not self._closed and len(self._ready) < self._wanted:
                self._ready.append(await Shim.spawn(self._ledger))
        finally:
            self._filling = False
        if self._closed:
            await self.close()

    def _watch(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _parse(line: Mapping[str, object]) -> Report:
    facts = dict(line)
    match event := facts.pop("event"):
        case "started":
            return Started(**facts)  # type: ignore[arg-type] # the shim is ours: shim.py names the fields
        case "refused":
            return Refused(**facts)  # type: ignore[arg-type]
        case "exited":
            return Exited(**facts | {"reason": EndReason(str(facts["reason"]))})  # type: ignore[arg-type]
        case "wedged":
            return Wedged(tuple(facts["pids"]))  # type: ignore[arg-type]
        case _:
            raise ValueError(f"a shim reported {event!r}")
