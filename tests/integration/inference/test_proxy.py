"""The client of the data path against an engine that does exactly what each test says."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path

import pytest
import uvloop

from inference import engine_http
from inference.errors import EngineDied, Preempted
from inference.proxy import EngineClient
from tests.support import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

JSON = [(b"content-type", b"application/json")]
Script = Callable[["Peer"], Awaitable[None]]


class Peer:
    """One connection as the engine sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def request(self) -> bytes:
        """The next request, head and body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length: "):
                return head + await self.reader.readexactly(int(line.split()[1]))
        return head

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bytes = b"{}", *, headers: bytes = b"", status: bytes = b"200 OK") -> None:
        await self.send(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n%b\r\n%b" % (status, len(body), headers, body))

    async def begin_stream(self) -> None:
        await self.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))


class Engine:
    """Plays one script per connection, in order; the last one again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connections = 0
        self.hang_ups = 0
        self._server: asyncio.Server | None = None
        self._scripts: tuple[Script, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()

    async def play(self, *scripts: Script) -> None:
        self._scripts = scripts
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        script = self._scripts[min(self.connections, len(self._scripts) - 1)]
        self.connections += 1
        try:
            await script(Peer(reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.hang_ups += 1
        finally:
            writer.close()
            self._tasks.discard(task)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def engine(tmp_dir: Path) -> AsyncIterator[Engine]:
    made = Engine(tmp_dir / "e.sock")
    yield made
    await made.close()


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[EngineClient]:
    made = EngineClient(engine.path, "secret", name="robin")
    yield made
    await made.close()


async def echo_for_ever(peer: Peer) -> None:
    while True:
        await peer.answer(await peer.request())


async def read_for_ever(peer: Peer) -> None:
    await peer.reader.read()


async def ask(client: EngineClient, path: str = "/v1/completions") -> bytes:
    return await (await client.open("POST", path, b"{}", JSON)).read()


async def test_a_request_carries_the_key_the_body_and_two_headers_of_the_callers(
    engine: Engine, client: EngineClient
) -> None:
    await engine.play(echo_for_ever)
    response = await client.open(
        "POST",
        "/v1/chat/completions?a=b",
        b'{"stream":false}',
        [
            *((b"content-type", b"application/json"), (b"Accept", b"*/*"), (b"authorization", b"Bearer mine")),
            *((b"x-conversation-id", b"1"), (b"cookie", b"c"), (b"host", b"example.org"), (b"connection", b"close")),
        ],
    )
    assert response.status == 200
    assert (await response.read()).split(b"\r\n") == [
        *(b"POST /v1/chat/completions?a=b HTTP/1.1", b"Host: engine", b"Authorization: Bearer secret"),
        *(b"content-type: application/json", b"Accept: */*", b"Content-Length: 16", b"", b'{"stream":false}'),
    ]


async def test_headers_that_concern_the_engines_connection_stay_here(engine: Engine, client: EngineClient) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.answer(
            headers=b"Server: llama.cpp\r\nAccess-Control-Allow-Origin: *\r\nKeep-Alive: timeout=5\r\nX-Thing: a\r\n",
            status=b"201 Made",
        )
        await read_for_ever(peer)

    await engine.play(script)
    response = await client.open("GET", "/x")
    assert response.status == 201
    assert response.headers == [(b"content-length", b"2"), (b"x-thing", b"a")]
    assert await response.read() == b"{}"


async def test_connections_are_used_again_and_parallel_requests_have_their_own(
    engine: Engine, client: EngineClient
) -> None:
    await engine.play(echo_for_ever)
    for _ in range(5):
        await ask(client)
    assert engine.connections == 1
    await asyncio.gather(*(ask(client) for _ in range(3)))
    assert engine.connections == 3


async def test_a_stream_comes_in_pieces_and_its_connection_is_not_used_again(
    engine: Engine, client: EngineClient
) -> None:
    """llama-server closes it without having said so; a request sent meanwhile would be lost."""
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.begin_stream()
        await peer.chunk(b"data: 1\n\n")
        await go_on.wait()
        await peer.chunk(b"data: 2\n\n")
        await peer.chunk(b"data: 3\n\n")
        await peer.send(b"0\r\n\r\n")
        await read_for_ever(peer)

    await engine.play(script)
    response = await client.open("POST", "/stream", b"{}")
    assert await anext(response) == b"data: 1\n\n"
    go_on.set()
    assert b"".join([chunk async for chunk in response]) == b"data: 2\n\ndata: 3\n\n"
    response.close()
    await ask_stream(client)
    assert engine.connections == 2


async def ask_stream(client: EngineClient) -> None:
    response = await client.open("POST", "/stream", b"{}")
    async for _ in response:
        pass


def close_after_one_answer(listener: socket.socket, answers: int) -> None:
    """An engine as blocking code: decides to close a kept connection just when the next request is there, unread."""
    for _ in range(answers):
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            select.select([connection], [], [], 20)
    listener.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_kept_connection_that_the_engine_closed_unread_is_replaced(
    tmp_dir: Path, run: Callable[[Coroutine[None, None, None]], None]
) -> None:
    """The request was not read, so it is sent again, once, over a new connection."""

    async def scenario(listener: socket.socket) -> None:
        serving = asyncio.create_task(asyncio.to_thread(close_after_one_answer, listener, 3))
        client = EngineClient(tmp_dir / "e.sock", "secret", name="robin")
        for _ in range(3):
            assert await ask(client) == b"{}"
        with pytest.raises(EngineDied) as caught:  # sent again, and then nobody listens
            await ask(client)
        assert not caught.value.reached
        await client.close()
        await serving

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_dir / "e.sock"))
        listening.listen()
        run(scenario(listening))


async def test_a_request_that_the_engine_read_is_never_sent_twice(engine: Engine, client: EngineClient) -> None:
    read = []

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.answer()
        read.append(await peer.request())

    await engine.play(script)
    await ask(client)
    with pytest.raises(EngineDied, match="the engine of 'robin' ended before it answered") as caught:
        await ask(client)
    assert caught.value.reached
    assert len(read) == engine.connections == 1


async def test_a_connection_idle_for_long_is_not_trusted(
    engine: Engine, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.play(echo_for_ever)
    await ask(client)
    monkeypatch.setattr(engine_http, "MAX_IDLE_S", 0.0)
    await ask(client)
    assert engine.connections == 2
    await until(lambda: engine.hang_ups == 1, "the old connection to be closed")


async def test_connection_close_is_obeyed(engine: Engine, client: EngineClient) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.answer(headers=b"Connection: close\r\n")
        await read_for_ever(peer)

    await engine.play(script)
    await ask(client)
    await ask(client)
    assert engine.connections == 2


async def test_an_engine_that_ends_in_the_middle_is_an_error_after_what_it_said(
    engine: Engine, client: EngineClient
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.begin_stream()
        await peer.chunk(b"data: 1\n\n")

    await engine.play(script)
    response = await client.open("POST", "/stream", b"{}")
    assert await anext(response) == b"data: 1\n\n"
    for _ in range(2):
        with pytest.raises(EngineDied, match="ended in the middle of its answer"):
            await anext(response)


async def test_an_engine_that_is_not_there_is_an_error(client: EngineClient) -> None:
    with pytest.raises(EngineDied, match="does not listen"):
        await ask(client)


async def test_what_is_not_http_is_an_error(engine: Engine, client: EngineClient) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")

    await engine.play(script)
    with pytest.raises(EngineDied, match="not HTTP"):
        await ask(client)


async def test_closing_an_answer_early_closes_its_connection(engine: Engine, client: EngineClient) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.begin_stream()
        while True:
            await peer.chunk(b"data: more\n\n")
            await asyncio.sleep(0.001)

    await engine.play(script)
    response = await client.open("POST", "/stream", b"{}")
    await anext(response)
    response.close()
    await until(lambda: engine.hang_ups == 1, "the engine to see the hang-up")


async def test_cancelling_a_request_closes_its_connection(engine: Engine, client: EngineClient) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.request()

    await engine.play(script)
    waiting = asyncio.create_task(ask(client))
    await until(lambda: engine.connections == 1, "the request to be there")
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: engine.hang_ups == 1, "the engine to see the hang-up")


async def test_closing_the_client_ends_what_is_under_way(engine: Engine, client: EngineClient) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.begin_stream()
        await read_for_ever(peer)

    await engine.play(script)
    response = await client.open("POST", "/stream", b"{}")
    reading = asyncio.create_task(response.read())
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(EngineDied, match="was stopped"):
        await reading
    with pytest.raises(EngineDied, match="was stopped"):
        await ask(client)


async def test_a_reader_that_lags_makes_the_engine_wait(engine: Engine, client: EngineClient) -> None:
    sent = 0
    piece = b"x" * (64 << 10)

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.begin_stream()
        for _ in range(256):
            await peer.chunk(piece)
            sent += len(piece)
        await peer.send(b"0\r\n\r\n")

    await engine.play(script)
    response = await client.open("POST", "/stream", b"{}")
    before = -1
    while before != sent:
        before = sent
        await asyncio.sleep(0.1)
    assert sent < 16 << 20, "the engine was never held back"
    size = 0
    async for chunk in response:
        size += len(chunk)
    assert size == 256 * len(piece)


async def test_head_has_no_body(engine: Engine, client: EngineClient) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")
        await read_for_ever(peer)

    await engine.play(script)
    response = await client.open("HEAD", "/props")
    assert response.status == 200
    assert await response.read() == b""


@pytest.mark.parametrize("path", ["", "props", "/a b", "/a\r\nX: y", "/é", "http://elsewhere/", "/a\0"])
async def test_a_path_cannot_smuggle_anything(client: EngineClient, path: str) -> None:
    with pytest.raises(ValueError, match="percent-encoded path"):
        await client.open("GET", path)


async def test_a_header_cannot_smuggle_anything(client: EngineClient) -> None:
    with pytest.raises(ValueError, match="line break"):
        await client.open("GET", "/", headers=[(b"accept", b"a\r\nX: y")])


async def test_an_interruption_ends_what_is_under_way_with_its_own_error(engine: Engine, client: EngineClient) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.begin_stream()
        await read_for_ever(peer)

    async def silent(peer: Peer) -> None:
        await peer.request()
        await read_for_ever(peer)

    await engine.play(script, silent)
    response = await client.open("POST", "/stream", b"{}")
    reading = asyncio.create_task(response.read())
    opening = asyncio.create_task(client.open("POST", "/stream", b"{}"))
    await until(lambda: engine.connections == 2, "both requests to be with the engine")
    client.interrupt(Preempted("something more important", retry_after_s=5.0))
    for task in (reading, opening):
        with pytest.raises(Preempted, match="more important") as caught:
            await task
        assert caught.value.retry_after_s == 5.0
    # One that had not reached the engine may be served by another: for its caller nothing has happened yet.
    with pytest.raises(EngineDied, match="was stopped") as late:
        await ask(client)
    assert not late.value.reached
