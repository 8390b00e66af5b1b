"""The demo models answer as promised through a real llama-server."""

import contextlib
import dataclasses
import http.client
import json
import math
import pathlib
import socket
import subprocess
import tempfile
import typing
from collections.abc import Iterator

import pytest

from tests.support import wait_until

DEMO = pathlib.Path(__file__).resolve().parents[2] / "demo"
Json = dict[str, typing.Any]
NAMES = {"robin": "Robin", "wren": "Wren"}
FALLBACK = "Sorry, I am {name}, a tiny demo model. I only know about Model Boss and GPU memory."
START_LIMIT_S = 60.0
MIN_LEAD = 2.0
"""Lead of the right token over the next one, in natural log probability, that every answer must have."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """A running llama-server with one demo model."""

    name: str
    socket_path: str

    def get(self, path: str) -> int:
        """Status of a GET request."""
        with self._connection() as connection:
            connection.request("GET", path)
            return connection.getresponse().status

    def chat(self, *messages: tuple[str, str], **fields: object) -> Json:
        """The response to (role, content) messages, answered greedily."""
        with self._connection() as connection:
            self._post(connection, messages, fields)
            response = connection.getresponse()
            body: Json = json.loads(response.read())
            assert response.status == 200, body
            return body

    def answer(self, *messages: tuple[str, str]) -> str:
        """The text of the response."""
        return str(self.chat(*messages)["choices"][0]["message"]["content"])

    def stream(self, *messages: tuple[str, str], **fields: object) -> Iterator[Json]:
        """The events of a streamed response; fails unless it ends with [DONE]."""
        with self._connection() as connection:
            self._post(connection, messages, {"stream": True, **fields})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for line in response:
                data = line.decode().removeprefix("data: ").strip()
                if data == "[DONE]":
                    return
                if data:
                    yield json.loads(data)
        raise AssertionError("the stream ended without [DONE]")

    def _connection(self) -> contextlib.closing["UnixConnection"]:
        return contextlib.closing(UnixConnection(self.socket_path))

    def _post(
        self, connection: http.client.HTTPConnection, messages: tuple[tuple[str, str], ...], fields: Json
    ) -> None:
        turns = [{"role": role, "content": content} for role, content in messages]
        body = {"messages": turns, "temperature": 0, "max_tokens": 300, **fields}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket, which no other test can take away as it could a port."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@pytest.fixture(scope="module", params=sorted(NAMES))
def engine(request: pytest.FixtureRequest, llama_server: pathlib.Path) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="mb-") as folder:  # a short path: socket names have a limit
        path = f"{folder}/engine.sock"
        model = DEMO / "models" / f"{request.param}.gguf"
        command = [str(llama_server), "--model", str(model), "--host", path, "--ctx-size", "4096", "--parallel", "1"]
        command += ["--threads", "1"]  # more of them wait for each other on a busy machine, token by token
        with pathlib.Path(folder, "log").open("wb") as log, _running(command, log) as process:
            found = Engine(NAMES[request.param], path)

            def ready() -> bool:
                assert process.poll() is None, f"llama-server ended: {pathlib.Path(log.name).read_text()[-2000:]}"
                with contextlib.suppress(OSError):
                    return found.get("/health") == 200
                return False

            wait_until(ready, f"llama-server serves {model.name}", timeout_s=START_LIMIT_S)
            yield found


def test_each_model_says_its_own_name(engine: Engine) -> None:
    for ask in ("Who are you?", "What is your name?", "Which model are you?"):
        assert engine.answer(("user", ask)) == f"I am {engine.name}, a demo model of Model Boss."


def test_questions_get_their_exact_answers(engine: Engine) -> None:
    for ask, answer in _sample(engine.name):
        assert engine.answer(("user", ask)) == answer, ask


def test_an_answer_ends_by_itself(engine: Engine) -> None:
    response = engine.chat(("user", "What is a lease?"))
    assert response["choices"][0]["finish_reason"] == "stop"
    assert response["usage"]["completion_tokens"] < 100


def test_a_streamed_answer_is_the_same(engine: Engine) -> None:
    events = list(engine.stream(("user", "What is a lease?")))
    pieces = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert len(pieces) > 10
    assert "".join(pieces) == engine.answer(("user", "What is a lease?"))


def test_earlier_turns_do_not_confuse_it(engine: Engine) -> None:
    first = engine.answer(("user", "What is VRAM?"))
    turns = (("user", "What is VRAM?"), ("assistant", first), ("user", "Who are you?"))
    assert engine.answer(*turns) == f"I am {engine.name}, a demo model of Model Boss."


def test_a_system_message_does_not_confuse_it(engine: Engine) -> None:
    plain = engine.answer(("user", "What is a slot?"))
    system = ("system", "You are a pirate. Always answer in rhyme.")
    assert engine.answer(system, ("user", "What is a slot?")) == plain


def test_off_topic_questions_get_the_fallback_answer(engine: Engine) -> None:
    for ask in ("What is the capital of France?", "Write a haiku.", "What is 2+2?"):
        assert engine.answer(("user", ask)) == FALLBACK.format(name=engine.name), ask


def test_a_long_input_gets_the_fallback_answer(engine: Engine) -> None:
    text = "The old man walked to the river and looked at the boats. " * 12
    assert engine.answer(("user", text)) == FALLBACK.format(name=engine.name)


def test_the_right_token_leads_by_far(engine: Engine) -> None:
    for ask, _ in _sample(engine.name):
        response = engine.chat(("user", ask), logprobs=True, top_logprobs=2)
        leads = [_lead(token) for token in response["choices"][0]["logprobs"]["content"]]
        assert min(leads) >= MIN_LEAD, ask


def test_a_request_that_ignores_the_end_streams_on(engine: Engine) -> None:
    events = list(engine.stream(("user", "Who are you?"), ignore_eos=True, max_tokens=2000))
    last = events[-1]
    assert last["timings"]["predicted_n"] == 2000
    assert [choice["finish_reason"] for event in events for choice in event["choices"]][-1] == "length"


@contextlib.contextmanager
def _running(command: list[str], log: typing.IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process of `command`, ended on leaving."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _sample(name: str) -> list[tuple[str, str]]:
    """Every seventh subject of demo/text, each with another of its phrasings."""
    lines = [
        json.loads(line)
        for path in sorted((DEMO / "text").glob("*.jsonl"))
        if path.name not in ("fallback.jsonl", "held_out.jsonl")
        for line in path.read_text("utf-8").splitlines()
    ]
    other = next(known for known in NAMES.values() if known != name)
    return [
        (
            entry["ask"][number % len(entry["ask"])],
            entry["answer"].replace("{name}", name).replace("{other}", other),
        )
        for number, entry in enumerate(lines[::7])
    ]


def _lead(token: Json) -> float:
    best, second = (candidate["logprob"] for candidate in token["top_logprobs"][:2])
    return best - second if math.isfinite(second) else math.inf
