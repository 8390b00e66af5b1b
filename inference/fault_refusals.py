"""The errors for tickets of a model whose engine failed: what was wrong, in numbers, and what to change.

Called by the scheduler with what `breaker.py` says; pure, like `refusals.py`.
"""

from __future__ import annotations

from inference.breaker import Open, Standing
from inference.errors import LoadFailed
from inference.fault import Fault
from inference.model import Model

__all__ = ["crashes_too_often", "stands"]

_CHANGES = {
    Fault.BAD_ARGUMENTS: "change `options` or `extra_args` in the model's manifest",
    Fault.BAD_MODEL: "replace the model's file, or change `path` in its manifest",
}


def crashes_too_often(model: Model, state: Open, now_s: float) -> LoadFailed:
    """The breaker is open."""
    left_s = max(0.0, state.until_s - now_s)
    return LoadFailed(
        f"the engine of '{model.id}' failed {state.crashes} times and is not started for another {left_s:.0f} s; then "
        f"one request tries it. `model-boss load {model.id}` tries it at once. The last failure: {state.words}",
        retry_after_s=left_s,
        fault=Fault.CRASH,
    )


def stands(model: Model, state: Standing, *, out_of_memory: str = "") -> LoadFailed:
    """No further try can mend it. `out_of_memory`: for that fault, what `raised.why_refused` says."""
    if state.fault is Fault.OUT_OF_MEMORY:
        return LoadFailed(f"{out_of_memory}. The last failure: {state.words}", fault=state.fault)
    return LoadFailed(
        f"the engine of '{model.id}' is not started again, for it {state.fault.words}: {_CHANGES[state.fault]}; "
        f"`model-boss load {model.id}` tries it once more. The last failure: {state.words}",
        fault=state.fault,
    )
