"""A stream of requests and what it meets: the devices, the models, the limits of the queue.

Made by `trace_file.py`, `synthetic.py` and `recorder.py`; read by `replay.py`. Times are seconds from the first request
on, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from inference.events import DeviceRoom, Purpose
from inference.model import STAY_WARM_S, Category, Model
from inference.queue import QueueLimits

__all__ = ["LONGEST_S", "Request", "Trace", "TraceModel", "load_guess_s"]

LONGEST_S = 1_000_000_000
"""More than thirty years: nothing in a trace lasts longer, nor does a trace."""
_LOAD_OVERHEAD_S = 2.0
_LOAD_BYTES_PER_S = 1 << 30


@dataclass(frozen=True, slots=True)
class TraceModel:
    """What the scheduler needs to know of a model, and how long it takes to load."""

    id: str
    claim_bytes: int
    """Device memory one slot of it claims."""
    load_s: float | None = None
    """Seconds from the granted lease to the first answer; None where that was never measured."""
    parallel: int = 1
    """Requests one slot serves at once."""
    stay_warm_s: float = STAY_WARM_S[Category.LLM]
    """Seconds it stays loaded after its last request."""
    min_residency_s: float | None = None
    """Seconds it stays loaded at least; None: what the limits say."""
    pin: bool = False
    preload: bool = False
    replicas: int = 1
    """Slots it may have at once."""
    host_bytes: int = 0
    """Host memory beside an accelerator."""

    @classmethod
    def of(cls, model: Model, load_s: float | None) -> TraceModel:
        """A model of a running broker."""
        return cls(
            id=model.id,
            claim_bytes=model.claim_bytes,
            load_s=load_s,
            parallel=model.parallel,
            stay_warm_s=model.stay_warm_s,
            min_residency_s=model.min_residency_s,
            pin=model.pin,
            preload=model.preload,
            replicas=model.replicas,
            host_bytes=model.host_bytes,
        )

    def as_model(self) -> Model:
        """What the scheduler takes for it."""
        return Model(
            id=self.id,
            category=Category.LLM,
            backend="simulated",
            path=Path(self.id),
            claim_bytes=self.claim_bytes,
            claim_basis="the trace",
            file_bytes=self.claim_bytes,
            context=0,
            host_bytes=self.host_bytes,
            parallel=self.parallel,
            replicas=self.replicas,
            stay_warm_s=self.stay_warm_s,
            min_residency_s=self.min_residency_s,
            pin=self.pin,
            preload=self.preload,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as it came."""

    at_s: float
    """When it came."""
    model: str
    priority: int
    """Its class, 0-1000; lower is more important."""
    client: str | None = None
    """Who asked: a number that means nothing outside of the trace, or a name where names were wanted."""
    session: str | None = None
    """Which conversation, likewise."""
    purpose: Purpose = Purpose.INFER
    service_s: float | None = None
    """Seconds it used the engine; None where that was never seen."""
    left_s: float | None = None
    """Seconds after which its caller gave up waiting; None: had more patience than it needed."""
    stay_warm_s: float | None = None
    """How long it wanted the model to stay loaded; None: no wish."""
    cooldown_s: float | None = None
    """How long its client's next request waits after it; None: as configured."""


@dataclass(frozen=True)
class Trace:
    """Everything a simulation needs."""

    devices: tuple[DeviceRoom, ...]
    models: tuple[TraceModel, ...]
    requests: Sequence[Request] = ()
    """In the order they came."""
    limits: QueueLimits = field(default_factory=QueueLimits)
    source: str = ""
    """Where it comes from, for people."""

    def on(self, devices: tuple[DeviceRoom, ...]) -> Trace:
        """The same stream on other devices."""
        return replace(self, devices=devices)

    @cached_property
    def load_s(self) -> Mapping[str, float]:
        """Seconds each model takes to load, guessed where that was never measured."""
        return {one.id: load_guess_s(one.claim_bytes) if one.load_s is None else one.load_s for one in self.models}

    @cached_property
    def service_s(self) -> Mapping[str, float]:
        """By model, the mean of what its requests took; of all, for a model whose requests tell nothing."""
        sums: dict[str, tuple[float, int]] = {}
        for request in self.requests:
            if request.service_s is not None:
                total, count = sums.get(request.model, (0.0, 0))
                sums[request.model] = (total + request.service_s, count + 1)
        everything = sum(total for total, _ in sums.values()) / max(1, sum(count for _, count in sums.values()))
        means = {model: total / count for model, (total, count) in sums.items()}
        return {one.id: means.get(one.id, everything) for one in self.models}


def load_guess_s(claim_bytes: int) -> float:
    """Seconds a load takes of which nothing is known but the model's size: a start, and 1 GiB a second from disk."""
    return _LOAD_OVERHEAD_S + claim_bytes / _LOAD_BYTES_PER_S
