"""What is measured. Each function takes running targets and returns samples per target in seconds (or bytes, or
requests per second); rounds are interleaved A B C A B C, so that a machine whose speed drifts treats all alike.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.client import LoadClient, chat_request
from benchmarks.targets import Target

Samples = dict[str, list[float]]
Report = Callable[[str], None]


def latency(targets: Sequence[Target], model: str, *, rounds: int, requests: int, report: Report) -> Samples:
    """p50 in seconds of a 4-token chat answer on one connection: one sample per target and round."""
    samples: Samples = {target.name: [] for target in targets}
    request = chat_request(model, max_tokens=4, stream=False)
    clients = {target.name: LoadClient(target.port) for target in targets}
    try:
        for client in clients.values():
            _repeat(client, request, 30)
        for turn in range(rounds):
            for name, client in clients.items():
                samples[name].append(statistics.median(_repeat(client, request, requests)))
            report(f"latency, round {turn + 1} of {rounds}: {_line(samples, 1e3, 'ms')}")
    finally:
        for client in clients.values():
            client.close()
    return samples


def _repeat(client: LoadClient, request: bytes, times: int) -> list[float]:
    return [client.post(request).last_s for _ in range(times)]


def throughput(
    targets: Sequence[Target], model: str, *, connections: int, rounds: int, seconds: float, report: Report
) -> Samples:
    """Requests per second over `connections` connections, each a process of its own."""
    samples: Samples = {target.name: [] for target in targets}
    for turn in range(rounds):
        for target in targets:
            samples[target.name].append(_rate(target.port, model, connections, seconds))
        report(f"throughput at {connections}, round {turn + 1} of {rounds}: {_line(samples, 1, 'req/s')}")
    return samples


def _rate(port: int, model: str, connections: int, seconds: float) -> float:
    with multiprocessing.get_context("fork").Pool(connections) as pool:
        jobs = [pool.apply_async(_hammer, (port, model, seconds)) for _ in range(connections)]
        return sum(job.get(timeout=seconds + 60) for job in jobs)


def _hammer(port: int, model: str, seconds: float) -> float:
    """Requests per second of one connection that asks again as soon as it is answered."""
    client = LoadClient(port)
    request = chat_request(model, max_tokens=4, stream=False)
    _repeat(client, request, 5)
    began = time.perf_counter()
    done = 0
    while (now := time.perf_counter()) - began < seconds:
        client.post(request)
        done += 1
    client.close()
    return done / (now - began)


def swap(targets: Sequence[Target], models: Sequence[str], *, rounds: int, report: Report) -> Samples:
    """Seconds from the last byte of one model's answer to the first byte of the other's, room being for one."""
    samples: Samples = {target.name: [] for target in targets}
    requests = [chat_request(model, max_tokens=1, stream=True) for model in models]
    clients = {target.name: LoadClient(target.port) for target in targets}
    try:
        for client in clients.values():
            for request in requests:
                client.post(request)
        for turn in range(rounds):
            for name, client in clients.items():
                samples[name].extend(client.post(request).first_s for request in requests)
            if turn % 5 == 4:
                report(f"swap, round {turn + 1} of {rounds}: {_line(samples, 1e3, 'ms')}")
    finally:
        for client in clients.values():
            client.close()
    return samples


def cold_start(
    bare: Callable[[], float], target: Target, model: str, unload: Callable[[], None], *, rounds: int, report: Report
) -> Samples:
    """Seconds to a first one-token answer: bare llama-server from its start, ours from a request for a cold model."""
    samples: Samples = {"direct": [], target.name: []}
    request = chat_request(model, max_tokens=1, stream=True)
    client = LoadClient(target.port)
    for turn in range(rounds):
        samples["direct"].append(bare())
        unload()
        samples[target.name].append(client.post(request).first_s)
        report(f"cold start, round {turn + 1} of {rounds}: {_line(samples, 1e3, 'ms')}")
    client.close()
    return samples


def resident_bytes(process: psutil.Process) -> int:
    """RSS of the process alone, children not counted."""
    return int(process.memory_info().rss)


def median(samples: Mapping[str, Sequence[float]], name: str) -> float:
    """The median of one target's samples."""
    return statistics.median(samples[name])


def _line(samples: Samples, scale: float, unit: str) -> str:
    return ", ".join(f"{name} {statistics.median(values) * scale:.2f} {unit}" for name, values in samples.items())


def default_binary() -> Path:
    """The llama-server that Model Boss itself would use.

    Raises:
        SystemExit: none is installed.
    """
    from inference.engines import find_llama_server

    binary = find_llama_server()
    if binary is None:
        raise SystemExit("no llama-server: run `make setup`, or set MODEL_BOSS_LLAMA_SERVER")
    return binary
