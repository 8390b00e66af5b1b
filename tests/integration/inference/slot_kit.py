"""A slot with the real ledger and the real llama-server on a demo model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson
import psutil

from gpuboss.client import Client
from gpuboss.leases import LeaseState
from gpuboss.node_ledger import LedgerRow, NodeLedger
from inference import events
from inference.backends import REGISTRY
from inference.events import Event
from inference.model import Category, Model
from inference.process import Shims
from inference.progress_watch import STALL_S
from inference.proxy import EngineClient, EngineResponse
from inference.slot import Slot
from inference.slot_state import SlotState
from tests.support import until

JSON = [(b"content-type", b"application/json")]
SHARE = 40 << 20
OPTIONS = ({"sim0": SHARE},)
"""Two of these do not fit into the 64 MiB of the ledger."""


@dataclass
class Rig:
    """Slots on one ledger, and everything they reported."""

    ledger: Client
    binary: Path
    file: Path
    events: list[Event] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shims = Shims(self.ledger.state.ledger_path, spares=1)

    def model(self, model_id: str, **changes: object) -> Model:
        made = Model(
            id=model_id,
            category=Category.LLM,
            backend="llama-server",
            path=self.file,
            claim_bytes=SHARE,
            claim_basis="a test",
            file_bytes=self.file.stat().st_size,
            context=512,
        )
        return replace(made, **changes)  # type: ignore[arg-type] # names of fields

    def slot(
        self,
        model_id: str,
        *,
        slot_id: str | None = None,
        program: Path | None = None,
        stall_s: float = STALL_S,
        **changes: object,
    ) -> Slot:
        made = Slot(
            self.model(model_id, **changes),
            id=slot_id,
            ledger=self.ledger,
            backend=REGISTRY["llama-server"],
            binary=program or self.binary,
            report=self.events.append,
            shims=self.shims,
            stall_s=stall_s,
        )
        self.slots.append(made)
        return made

    async def ready(self, model_id: str, *, stall_s: float = STALL_S, **changes: object) -> Slot:
        """A slot that answers."""
        slot = self.slot(model_id, stall_s=stall_s, **changes)  # type: ignore[arg-type] # names of fields
        await self.start(slot)
        return slot

    async def start(self, slot: Slot) -> None:
        slot.start(OPTIONS, 10)
        await until(lambda: slot.state in (SlotState.READY, SlotState.FAILED), f"{slot.id} to be loaded")
        assert slot.state is SlotState.READY, slot.story[-1]

    async def failed(self, slot: Slot) -> events.SlotFailed:
        """The failure of the slot, once it is reported; by then nothing of it may be left."""
        await until(lambda: self.told(events.SlotFailed, slot), f"the failure of {slot.id}")
        [failure] = self.told(events.SlotFailed, slot)
        assert isinstance(failure, events.SlotFailed)
        await self.check_nothing_left()
        return failure

    async def gone(self, slot: Slot) -> None:
        await until(lambda: self.told(events.SlotGone, slot), f"{slot.id} to be gone")

    def told(self, kind: type[Event], slot: Slot) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind) and event.slot_id == slot.id]

    def rows(self) -> list[LedgerRow]:
        with NodeLedger(self.ledger.state.ledger_path) as books:
            return books.rows()

    async def leases(self) -> list[LeaseState]:
        return [lease.state for lease in (await self.ledger.snapshot()).leases]

    async def check_nothing_left(self) -> None:
        assert self.rows() == []
        assert await self.leases() == []
        assert not self.engines()

    def engines(self) -> list[int]:
        """Living engines below this process."""
        found = []
        for child in psutil.Process().children(recursive=True):
            try:
                if child.exe() == str(self.binary.resolve()):
                    found.append(child.pid)
            except psutil.Error:
                continue
        return found

    async def close(self) -> None:
        for slot in self.slots:
            await slot.close()
        await self.shims.close()
        await self.check_nothing_left()


def wrapper(path: Path, script: str, *, interpreter: str = "/bin/sh") -> Path:
    """A program that does something and then becomes llama-server: `@@` stands for that."""
    path.write_text(f"#!{interpreter}\n{script}\n")
    path.chmod(0o755)
    return path


async def post(engine: EngineClient | None, path: str, body: object) -> tuple[int, dict[str, object]]:
    """Status and decoded body of one JSON request."""
    assert engine is not None
    response = await engine.open("POST", path, orjson.dumps(body), JSON)
    return response.status, orjson.loads(await response.read())


async def stream(engine: EngineClient | None, **changes: object) -> EngineResponse:
    """A chat that streams, and goes on for long unless told otherwise."""
    assert engine is not None
    body = {
        "messages": [{"role": "user", "content": "Who are you?"}],
        "stream": True,
        "ignore_eos": True,
        "max_tokens": 200_000,
        **changes,
    }
    return await engine.open("POST", "/v1/chat/completions", orjson.dumps(body), JSON)


def shim_of(slot: Slot) -> int:
    """The pid of the slot's shim."""
    assert slot.pid is not None
    parent = psutil.Process(slot.pid).parent()
    assert parent is not None
    return parent.pid
