"""Makes slots: what every slot of a pool has in common, in one place.

Used by `pool.py`. Calls nothing but `Slot`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from inference.backends import REGISTRY
from inference.engine_run import GRACE_S
from inference.errors import EngineMissing
from inference.events import Event
from inference.ledger import Ledger
from inference.model import Model
from inference.process import Shims
from inference.progress_watch import STALL_S
from inference.slot import Slot, Transition

__all__ = ["SlotMaker"]


@dataclass(frozen=True, slots=True)
class SlotMaker:
    """How the slots of one pool are."""

    ledger: Ledger
    shims: Shims
    find_engine: Callable[[str], Path | None]
    """The program of a backend; None where none is installed."""
    grace_s: float = GRACE_S
    """From a notice until what a slot does is cut short (`preempt_grace_s`)."""
    stall_s: float = STALL_S
    """Without progress, after which an engine is stalled."""
    orphan_grace_s: float | None = None
    """How long a ready engine waits for the next broker when this one dies; None: it ends with it."""

    def make(
        self, model: Model, slot_id: str, report: Callable[[Event], None], story: Iterable[Transition] = ()
    ) -> Slot:
        """A slot for the model as it is now.

        Raises:
            EngineMissing: no engine is installed for it.
        """
        binary = self._binary_for(model)
        return Slot(
            model,
            id=slot_id,
            ledger=self.ledger,
            backend=REGISTRY[model.backend],
            binary=binary,
            report=report,
            shims=self.shims,
            grace_s=self.grace_s,
            stall_s=self.stall_s,
            orphan_grace_s=self.orphan_grace_s,
            story=story,
        )

    def _binary_for(self, model: Model) -> Path:
        binary = self.find_engine(model.backend)
        if binary is None:
            raise EngineMissing(
                f"no {model.backend} is installed for model '{model.id}': "
                f"run `model-boss engines install {model.backend}`, or set MODEL_BOSS_LLAMA_SERVER to its path"
            )
        return binary
