"""A broker of a few slots in a process of its own, to be killed: `python -m tests.integration.inference.predecessor`.

Takes one JSON object as argument: state_dir, binary, file, models, context, grace_s (null: engines end with it), adopts
(whether it begins as a broker does that finds engines of another), asks (how: "stream" or "whole", for answers without
end). Prints, as JSON, what it has: by slot the pids of engine and shim, the lease and its fence. Then it waits.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from gpuboss.client import Client, LedgerSettings
from gpuboss.leases import Fence
from gpuboss.settings import Timings
from inference.adoption import adopt_orphans
from inference.backends import REGISTRY
from inference.model import Category, Model
from inference.orphans import Past
from inference.process import Shims
from inference.slot import Slot
from inference.slot_state import SlotState
from tests.integration.inference.slot_kit import stream
from tests.support import until

ROOT = Path(__file__).resolve().parents[3]
SHARE = 20 << 20


@dataclass(frozen=True)
class Had:
    """One slot of it."""

    pid: int
    shim: int
    lease: str
    fence: Fence


class Predecessor:
    """The process, from outside."""

    def __init__(self, state_dir: Path, binary: Path, file: Path, *models: str, **more: Any) -> None:
        order = {"state_dir": str(state_dir), "binary": str(binary), "file": str(file), "models": models}
        order |= {"context": 512, "grace_s": 30.0, "adopts": False, "asks": None} | more
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.inference.predecessor", json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def had(self) -> dict[str, Had]:
        """Its slots, once they are ready."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "it ended without a word"
        return {
            name: Had(told["pid"], told["shim"], told["lease"], Fence(*told["fence"]))
            for name, told in json.loads(line).items()
        }

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.communicate()


def model(model_id: str, file: Path, context: int = 512) -> Model:
    """The model as every broker here defines it."""
    return Model(
        id=model_id,
        category=Category.LLM,
        backend="llama-server",
        path=file,
        claim_bytes=SHARE,
        claim_basis="a test",
        file_bytes=file.stat().st_size,
        context=context,
    )


async def main() -> None:
    """Serve until killed."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what is printed is for the test
    order = json.loads(sys.argv[1])
    file = Path(order["file"])
    settings = LedgerSettings(Path(order["state_dir"]), timings=Timings(linger_s=0.0))
    ledger = await Client.connect(settings, name="predecessor")
    shims = Shims(ledger.state.ledger_path, spares=1)

    def make(model_id: str) -> Slot:
        return Slot(
            model(model_id, file, order["context"]),
            ledger=ledger,
            backend=REGISTRY["llama-server"],
            binary=Path(order["binary"]),
            report=lambda event: None,
            shims=shims,
            orphan_grace_s=order["grace_s"],
        )

    def slot_for(past: Past) -> Slot | None:
        return make(past.model_id) if past.model_id in order["models"] else None

    slots = {slot.id: slot for slot in await adopt_orphans(ledger, slot_for)} if order["adopts"] else {}
    for model_id in order["models"]:
        if model_id not in slots:
            slots[model_id] = make(model_id)
            slots[model_id].start(({"sim0": SHARE},), 10)
    await until(lambda: all(slot.state is SlotState.READY for slot in slots.values()), "all to be ready")
    asked = list(slots.values()) if order["asks"] else []
    asking = [asyncio.create_task(_ask(slot, streams=order["asks"] == "stream")) for slot in asked]
    await until(lambda: all(slot.engine and slot.engine.working for slot in asked), "all to be at work")
    print(json.dumps({slot.id: _told(slot) for slot in slots.values()}), flush=True)
    await asyncio.gather(*asking)
    await asyncio.Event().wait()


async def _ask(slot: Slot, *, streams: bool) -> None:
    """An answer that takes longer than anybody waits."""
    response = await stream(slot.engine, max_tokens=1_000_000, stream=streams)
    await response.read()


def _told(slot: Slot) -> dict[str, Any]:
    assert slot.lease is not None
    assert slot.lease.fence is not None
    fence = [slot.lease.fence.epoch, slot.lease.fence.seq]
    return {"pid": slot.pid, "shim": slot.shim_pid, "lease": slot.lease.id, "fence": fence}


if __name__ == "__main__":
    asyncio.run(main())
