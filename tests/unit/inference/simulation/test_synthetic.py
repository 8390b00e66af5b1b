"""Made-up traces: the same words make the same trace, each word does what it says, and a wrong one is named."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from gpuboss.units import GIB
from inference.simulation.synthetic import WORDS, BadSpec, Burst, Spec, generate, parse_spec, read_spec
from inference.yaml_files import BadInput
from tests.unit.inference.simulation.scene import a_device

FULL = (
    "models=6 size=4GiB..20GiB load=5s..40s parallel=1..4 replicas=2 stay=10m requests=2000 rate=2/s "
    "burst=10x30s/5m zipf=1.1 service=1s..8s classes=normal:8,high:1,batch:3 clients=9 leave=30s..2m seed=7"
)


def test_every_word_is_understood() -> None:
    assert parse_spec(FULL) == Spec(
        models=6,
        size=(4 * GIB, 20 * GIB),
        load=(5.0, 40.0),
        parallel=(1, 4),
        replicas=2,
        stay=600.0,
        requests=2000,
        rate=2.0,
        burst=Burst(10.0, 30.0, 300.0),
        zipf=1.1,
        service=(1.0, 8.0),
        classes={10: 8.0, 5: 1.0, 50: 3.0},
        clients=9,
        leave=(30.0, 120.0),
        seed=7,
    )
    assert {word.partition("=")[0] for word in FULL.split()} == WORDS.keys()


def test_a_file_has_the_same_words_as_keys(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("models: 6\nsize: 4GiB..20GiB\nrate: 30/m\nclasses: normal\nservice: 2\n")
    assert read_spec(path) == parse_spec("models=6 size=4GiB..20GiB rate=30/m classes=normal service=2s")
    path.write_text("model: 6\n")
    with pytest.raises(BadSpec, match="unknown word 'model'; nearest is 'models'"):
        read_spec(path)
    with pytest.raises(BadInput, match="does not exist"):
        read_spec(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models", "'models' is not understood: write NAME=VALUE"),
        ("modles=3", "unknown word 'modles'; nearest is 'models'"),
        ("models=3 models=4", "'models' is given twice"),
        ("models=0", "models=0: expected a whole number from 1"),
        ("size=20GiB..4GiB", "size=20GiB..4GiB: 4GiB is less than 20GiB"),
        ("size=4", "size=4: memory size"),
        ("load=5x", "load=5x: duration"),
        ("rate=0/s", "rate=0/s: must be more than 0"),
        ("rate=2/fortnight", "expected a number per s, m, min, h"),
        ("classes=vip:1", "classes=vip:1: priority 'vip'"),
        ("classes=normal:0", "of which one is more than 0"),
        ("burst=10", "expected FACTORxLENGTH/EVERY"),
        ("burst=10x5m/5m", "a burst has to be shorter"),
        ("zipf=steep", "zipf=steep: expected a number"),
        ("zipf=400", "zipf=400: expected a number from 0 to 20"),
        ("models=100001", "models=100001: expected a whole number from 1 to 100000"),
        ("requests=10000001", "requests=10000001: expected a whole number from 1 to 10000000"),
        ("models=٣", "models=٣: expected a whole number"),
        ("clients=٣", "clients=٣: expected a whole number"),
        ("zipf=٣", "zipf=٣: expected a number"),
        ("rate=1e10/s", "rate=1e10/s: expected a number from 0 to 1000000000"),
        ("size=0", "size=0: a model needs memory"),
        ("size=0..4GiB", "size=0..4GiB: a model needs memory"),
        ("requests=2 rate=1e-18/s", "rate=1e-18: 2 requests would take more than 1000000000 s"),
    ],
)
def test_a_wrong_word_is_named(text: str, said: str) -> None:
    with pytest.raises(BadSpec) as caught:
        parse_spec(text)
    assert said in str(caught.value)


def test_the_same_seed_makes_the_same_trace() -> None:
    devices = (a_device(),)
    assert generate(parse_spec(FULL), devices) == generate(parse_spec(FULL), devices)
    assert generate(parse_spec(FULL), devices) != generate(parse_spec(FULL.replace("seed=7", "seed=8")), devices)


def test_a_trace_is_what_its_words_say() -> None:
    trace = generate(parse_spec(FULL), (a_device(),))
    assert len(trace.requests) == 2000
    assert [model.id for model in trace.models] == ["m1", "m2", "m3", "m4", "m5", "m6"]
    assert all(4 * GIB <= model.claim_bytes <= 20 * GIB and 5 <= (model.load_s or 0) <= 40 for model in trace.models)
    assert {model.parallel for model in trace.models} <= {1, 2, 3, 4}
    assert {model.replicas for model in trace.models} == {2}
    assert all(1 <= (request.service_s or 0) <= 8 and 30 <= (request.left_s or 0) <= 120 for request in trace.requests)
    assert {request.client for request in trace.requests} == {str(number) for number in range(1, 10)}
    moments = [request.at_s for request in trace.requests]
    assert moments == sorted(moments)


def test_requests_come_at_the_rate_and_models_by_popularity() -> None:
    trace = generate(parse_spec("models=4 requests=20000 rate=120/m zipf=1 seed=3"), (a_device(),))
    gaps = [b.at_s - a.at_s for a, b in zip(trace.requests, trace.requests[1:], strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.5, rel=0.05)
    counts = [sum(request.model == model.id for request in trace.requests) for model in trace.models]
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.1)
    assert counts[0] / counts[3] == pytest.approx(4, rel=0.1)


def test_the_steepest_popularity_of_the_most_models_has_a_number() -> None:
    trace = generate(parse_spec("models=100000 zipf=20 requests=10"), (a_device(),))
    assert {request.model for request in trace.requests} == {"m1"}


def test_it_tells_how_many_requests_are_made() -> None:
    told: list[int] = []
    generate(parse_spec("requests=3000"), (a_device(),), told.append)
    assert told == [1024, 2048]


def test_a_burst_is_so_much_more() -> None:
    trace = generate(parse_spec("requests=20000 rate=1/s burst=10x60s/600s seed=3"), (a_device(),))
    inside = sum(request.at_s % 600 < 60 for request in trace.requests)
    outside = len(trace.requests) - inside
    assert (inside / 60) / (outside / 540) == pytest.approx(10, rel=0.1)
