"""Made-up traces, from a few words such as "models=6 size=4GiB..20GiB requests=2000 rate=2/s".

Called by `coordinator/cli/simulate.py` and `benchmarks/simulation.py`. The same words, seed included, make the same
trace on every machine. Requests come at random at the given rate (a Poisson process); the n-th most popular model has
1/n^zipf of the first one's share. `WORDS` tells what each word means; a YAML file has the same words as keys.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

from gpuboss.priority import CLASSES, NORMAL, parse_priority
from gpuboss.units import MIB, parse_duration, parse_memory
from inference.events import DeviceRoom
from inference.simulation.trace import LONGEST_S, Request, Trace, TraceModel
from inference.validation import unknown
from inference.yaml_files import read_document

__all__ = ["WORDS", "BadSpec", "Burst", "Spec", "generate", "parse_spec", "read_spec"]

WORDS: Mapping[str, str] = {
    "models": "how many models there are",
    "size": "memory of a model, or a range: 4GiB..20GiB",
    "load": "time a model takes to load, or a range: 5s..40s",
    "parallel": "requests a model serves at once, or a range: 1..4",
    "replicas": "slots a model may have at once",
    "stay": "how long a model stays loaded after its last request",
    "requests": "how many requests come",
    "rate": "how many come per second, minute or hour: 2/s, 30/m",
    "burst": "times of more, as FACTORxLENGTH/EVERY: 10x30s/5m is ten times the rate for 30 s of every 5 minutes",
    "zipf": "how much more popular some models are than others; 0: all alike",
    "service": "time a request uses the engine, or a range: 1s..8s",
    "classes": "classes and their weights: normal:8,high:1,batch:3",
    "clients": "how many clients there are; 0: nobody says who they are",
    "leave": "how long callers wait before they give up, or a range; left out: they do not",
    "seed": "another number, another trace",
}
"""By word, what it means."""

_MOST_MODELS = 100_000
_MOST = 10_000_000
"""Of everything else that is counted."""
_STEEPEST = 20
"""The least popular of so many models still has a share that is a number."""
_TOLD_EVERY = 1024
"""Requests between two words about how far it is."""
_PER = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class BadSpec(ValueError):
    """Words that make no trace; the message names the word."""


Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Burst:
    """Times of more requests."""

    factor: float
    length_s: float
    every_s: float

    def rate_at(self, at_s: float, rate: float) -> float:
        """Requests per second then; a period begins with its burst."""
        return rate * self.factor if at_s % self.every_s < self.length_s else rate


@dataclass(frozen=True, slots=True)
class Spec:
    """What `WORDS` say, in numbers; ranges as (lowest, highest), evenly spread."""

    models: int = 6
    size: Range = (4 << 30, 20 << 30)
    """Bytes."""
    load: Range = (5.0, 40.0)
    parallel: Range = (1, 1)
    replicas: int = 1
    stay: float = 300.0
    requests: int = 2000
    rate: float = 1.0
    """Per second."""
    burst: Burst | None = None
    zipf: float = 1.0
    service: Range = (1.0, 8.0)
    classes: Mapping[int, float] = field(default_factory=lambda: {NORMAL: 1.0})
    """Weight by class."""
    clients: int = 0
    leave: Range | None = None
    seed: int = 1


def parse_spec(text: str) -> Spec:
    """The spec in words like `models=6 size=4GiB..20GiB`; spaces or newlines between them.

    Raises:
        BadSpec
    """
    given: dict[str, object] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise BadSpec(f"{word!r} is not understood: write NAME=VALUE, such as models=6")
        if name in given:
            raise BadSpec(f"{name!r} is given twice")
        given[name] = value
    return _spec(given)


def read_spec(path: Path) -> Spec:
    """The spec in a YAML file.

    Raises:
        BadInput, BadSpec
    """
    return _spec(read_document(path).data)


def generate(spec: Spec, devices: tuple[DeviceRoom, ...], progress: Callable[[int], None] | None = None) -> Trace:
    """The trace that the spec describes, on these devices; `progress` is told how many requests are made."""
    rng = random.Random(spec.seed)  # noqa: S311 - no secret: the same seed has to give the same trace
    models = [_model(f"m{number}", spec, rng) for number in range(1, spec.models + 1)]
    popularity = list(accumulate(1.0 / rank**spec.zipf for rank in range(1, spec.models + 1)))
    names = [model.id for model in models]
    requests: list[Request] = []
    for at_s in _moments(spec, rng):
        requests.append(_request(at_s, names, popularity, spec, rng))
        if progress is not None and not len(requests) % _TOLD_EVERY:
            progress(len(requests))
    return Trace(devices=devices, models=tuple(models), requests=tuple(requests), source=f"synthetic, seed {spec.seed}")


def _model(name: str, spec: Spec, rng: random.Random) -> TraceModel:
    lowest, highest = spec.parallel
    return TraceModel(
        id=name,
        claim_bytes=int(rng.uniform(*spec.size)) // MIB * MIB,
        load_s=rng.uniform(*spec.load),
        parallel=rng.randint(int(lowest), int(highest)),
        stay_warm_s=spec.stay,
        replicas=spec.replicas,
    )


def _moments(spec: Spec, rng: random.Random) -> Iterator[float]:
    """Arrivals of a Poisson process whose rate may change: candidates at the highest rate, thinned to the present."""
    most = spec.rate * (max(1.0, spec.burst.factor) if spec.burst else 1.0)
    at_s, count = 0.0, 0
    while count < spec.requests:
        at_s += rng.expovariate(most)
        if spec.burst is None or rng.random() * most < spec.burst.rate_at(at_s, spec.rate):
            count += 1
            yield at_s


def _request(at_s: float, names: Sequence[str], popularity: Sequence[float], spec: Spec, rng: random.Random) -> Request:
    return Request(
        at_s=at_s,
        model=rng.choices(names, cum_weights=popularity)[0],
        priority=rng.choices(list(spec.classes), list(spec.classes.values()))[0],
        client=str(rng.randint(1, spec.clients)) if spec.clients else None,
        service_s=rng.uniform(*spec.service),
        left_s=rng.uniform(*spec.leave) if spec.leave is not None else None,
    )


# -- words to numbers ----------------------------------------------------------------------------------------------


def _spec(given: Mapping[str, object]) -> Spec:
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in WORDS:
            raise BadSpec(unknown("word", name, WORDS))
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise BadSpec(f"{name}: expected {WORDS[name]}; got {value!r}")
        try:
            values[name] = _READ[name](str(value))
        except ValueError as error:
            raise BadSpec(f"{name}={value}: {error} ({name}: {WORDS[name]})") from error
    spec = Spec(**values)
    if spec.requests / spec.rate > LONGEST_S:
        raise BadSpec(f"rate={spec.rate:g}: {spec.requests} requests would take more than {LONGEST_S} s")
    return spec


def _counted(most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not _is_whole(text) or not 1 <= int(text) <= most:
            raise ValueError(f"expected a whole number from 1 to {most}")
        return int(text)

    return read


_count = _counted(_MOST)


def _whole(text: str) -> int:
    if not _is_whole(text):
        raise ValueError("expected a whole number")
    return int(text)


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _number(text: str, most: int = 1_000_000_000) -> float:
    try:
        number = float(text) if text.isascii() else -1.0
    except ValueError:
        raise ValueError("expected a number") from None
    if not 0 <= number <= most:
        raise ValueError(f"expected a number from 0 to {most}")
    return number


def _zipf(text: str) -> float:
    return _number(text, _STEEPEST)


def _size(text: str) -> int:
    size = parse_memory(text)
    if not size:
        raise ValueError("a model needs memory")
    return size


def _seconds(text: str) -> float:
    return parse_duration(text).total_seconds()


def _range(one: Callable[[str], float]) -> Callable[[str], Range]:
    def read(text: str) -> Range:
        low, dots, high = text.partition("..")
        lowest = one(low)
        highest = one(high) if dots else lowest
        if highest < lowest:
            raise ValueError(f"{high} is less than {low}")
        return lowest, highest

    return read


def _rate(text: str) -> float:
    number, slash, unit = text.partition("/")
    if slash and unit not in _PER:
        raise ValueError(f"expected a number per {', '.join(_PER)}, such as 2/s")
    rate = _number(number) / _PER.get(unit, 1.0)
    if rate <= 0:
        raise ValueError("must be more than 0")
    return rate


def _burst(text: str) -> Burst:
    factor, times, rest = text.partition("x")
    length, slash, every = rest.partition("/")
    if not (times and slash):
        raise ValueError("expected FACTORxLENGTH/EVERY, such as 10x30s/5m")
    burst = Burst(_number(factor), _seconds(length), _seconds(every))
    if not 0 < burst.length_s < burst.every_s:
        raise ValueError("a burst has to be shorter than the time from one to the next")
    return burst


def _classes(text: str) -> dict[int, float]:
    weights: dict[int, float] = {}
    for part in text.split(","):
        name, colon, weight = part.partition(":")
        weights[parse_priority(name)] = _number(weight) if colon else 1.0
    if not sum(weights.values()) > 0:
        raise ValueError(f"expected classes such as {', '.join(CLASSES)} with weights, of which one is more than 0")
    return weights


_READ: Mapping[str, Callable[[str], object]] = {
    "models": _counted(_MOST_MODELS),
    "size": _range(_size),
    "load": _range(_seconds),
    "parallel": _range(_count),
    "replicas": _count,
    "stay": _seconds,
    "requests": _count,
    "rate": _rate,
    "burst": _burst,
    "zipf": _zipf,
    "service": _range(_seconds),
    "classes": _classes,
    "clients": _whole,
    "leave": _range(_seconds),
    "seed": _whole,
}
assert _READ.keys() == WORDS.keys() == {one.name for one in fields(Spec)}
