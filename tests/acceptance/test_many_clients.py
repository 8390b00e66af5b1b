"""Eight clients, two models, room for one: every answer right, none lost, memory never oversold."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import redis

from gpuboss.keys import PoolKeys
from gpuboss.state_dir import StateDir
from tests.acceptance.broker import CLAIM_MIB, MODELS, Broker, broker

BUDGET_BYTES = (CLAIM_MIB + CLAIM_MIB // 2) << 20
REQUESTS = 200
CLIENTS = 8


class Sampler(threading.Thread):
    """Looks at the processes from outside every 20 ms: how many engines live, what they claim and what they use."""

    def __init__(self, subject: Broker) -> None:
        super().__init__(daemon=True)
        self._subject = subject
        self._parent = psutil.Process(subject.process.pid if subject.process else 0)
        self._done = threading.Event()
        self.samples = 0
        self.most_engines = 0
        self.most_resident_bytes = 0

    def run(self) -> None:
        while not self._done.wait(0.02):
            resident = []
            for child in self._parent.children(recursive=True):
                try:
                    if child.exe() == str(self._subject.engine.resolve()) and child.status() != psutil.STATUS_ZOMBIE:
                        resident.append(child.memory_info().rss)
                except psutil.Error:
                    continue
            self.samples += 1
            self.most_engines = max(self.most_engines, len([rss for rss in resident if rss > 0]))
            self.most_resident_bytes = max(self.most_resident_bytes, sum(resident))

    def finish(self) -> None:
        self._done.set()
        self.join()


def test_200_mixed_requests_with_room_for_one(tmp_dir: Path, llama_server: Path, demo_models: Path) -> None:
    with broker(tmp_dir, llama_server, demo=demo_models) as subject:
        sampler = Sampler(subject)
        sampler.start()
        wanted = [MODELS[n % 2] for n in range(REQUESTS)]
        random.Random(7).shuffle(wanted)
        began = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(lambda pair: _ask(subject, *pair), enumerate(wanted)))
        took = time.monotonic() - began
        sampler.finish()
        status, queue = subject.get("/api/v1/queue")
        grants = _grants(subject)

    assert [model for model, text in zip(wanted, answers, strict=True) if model.title() not in text] == []
    assert status == 200
    assert queue["queue"] == []
    assert sampler.samples > took / 0.02 / 10, "the sampler kept looking"
    assert sampler.most_engines == 1, "two engines at once would be over the budget"
    assert max(grants) <= BUDGET_BYTES, "claims at a grant"
    assert sampler.most_resident_bytes <= BUDGET_BYTES, "what an engine really uses"
    assert len(grants) >= 2, "models really swapped"
    assert min(grants) > 0
    print(f"{REQUESTS} requests in {took:.1f} s, {len(grants)} grants, {Counter(wanted)}")


def _ask(subject: Broker, number: int, model: str) -> str:
    client = openai.OpenAI(base_url=subject.url + "/v1", api_key="unused", max_retries=0, timeout=120)
    with client:
        keys = {
            "model": model,
            "messages": [{"role": "user", "content": "Who are you?"}],
            "max_tokens": 48,
            "temperature": 0,
        }
        if number % 2:
            return client.chat.completions.create(**keys).choices[0].message.content or ""
        chunks = client.chat.completions.create(**keys, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def _grants(subject: Broker) -> list[int]:
    """Bytes held at each grant: the store's own events replayed, read past the client library."""
    keys = PoolKeys()
    socket_path = StateDir.resolve(subject.state_dir).socket_path("store")
    held: dict[str, int] = {}
    totals = []
    with redis.Redis(unix_socket_path=str(socket_path), decode_responses=True) as store:
        for _, event in store.xrange(keys.events):
            lease = event["lease"]
            if event["what"] == "granted":
                shares = json.loads(store.hget(keys.lease_prefix + lease, "shares"))
                held[lease] = sum(shares.values())
                totals.append(sum(held.values()))
            elif event["what"] in ("freed", "cancelled"):
                held.pop(lease, None)
    return totals
