"""A real server with two tenants: one attacks it, and the other must not notice.

`House` is the server, `Evil` what an attack has, `Good` the tenant that works all the time. See README.md.
"""

from __future__ import annotations

import http.client
import importlib
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.forked import Forked
from tests.support.server import Server
from tests.support.token_file import write_tokens
from tests.support.waiting import WAIT_S, wait_until

MEMORY_BYTES_MAX = 512 * 1024 * 1024  # what a server may have under any attack
LOW = {
    "connections_max": 200, "headers_s": 1.0, "slow_reader_s": 1.0, "blob_bytes_max": 8 << 20,
    "rows_bytes_max": 4 << 20, "spool_bytes_max": 32 << 20, "bodies_bytes_max": 8 << 20,
    "decoded_bytes_max": 8 << 20,
}  # fmt: skip
"""Limits by which attacks are cheap."""
LOW_CONSTANTS = {
    "rpc.http_protocol.ADDRESS_PERCENT": 60,
    "rpc.http_protocol.TOKEN_PERCENT": 55,
    "rpc.http_protocol.SWEEP_S": 0.05,
    "rpc.http_protocol.BODY_GRACE_S": 1.0,
    "rpc.http_protocol.HEADS_BYTES_MAX": 2 << 20,
    "rpc.middleware.REFUSAL_PAUSE_S": 0.2,
    "rpc.concurrency_limits.DECODING_PERCENT": 150,
}
"""Bounds of the code, as low as these limits are."""
FIELDS = {"fields": [{"name": "id", "type": "int64", "key": True}, {"name": "text", "type": "string"}]}
EVIL_SHARD, GOOD_SHARD = "evil/orders", "good/orders"
EVIL_ADDRESS = "127.0.0.2"  # any of 127.0.0.0/8 is this machine
ROUNDS = 2  # that others must have done while an attack is under way
Attack = Callable[["House", "Evil"], None]


def set_constants(constants: dict[str, float]) -> None:
    """In the process of a server: set constants of modules, by `module.NAME`."""
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        loaded = importlib.import_module(module)
        assert hasattr(loaded, constant), name
        setattr(loaded, constant, value)


class House:
    """A server process with a file of tokens: `admin`; `evil`, `evil-reader`, `evil-manager`, `good` for prefixes.

    `arguments`: more that it is started with. Where it wants no tokens, nobody is told apart.
    """

    def __init__(
        self,
        directory: Path,
        limits: dict[str, float] | None = None,
        arguments: Sequence[str] = (),
        *,
        wants_tokens: bool = True,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        tokens = directory / "tokens.json"
        granted = {"evil": "write", "evil-reader": "read", "evil-manager": "manage"}
        of_evil = {name: (scope, "evil/") for name, scope in granted.items()}
        self.tokens = write_tokens(tokens, {"admin": ("admin",), **of_evil, "good": ("write", "good/")})
        tokens.chmod(0o600)
        given = {
            f"PERSIST_LIMIT_{name.upper()}": str(value) for name, value in (LOW if limits is None else limits).items()
        }
        constants = LOW_CONSTANTS if limits is None else {}
        asking = ["--tokens", str(tokens)] if wants_tokens else []
        begin = partial(Forked, before=partial(set_constants, constants))
        self.server = Server(directory / "data", *asking, *arguments, environment=given, begin=begin)
        self.port = self.server.port
        self._good: Good | None = None
        for shard in (EVIL_SHARD, GOOD_SHARD):
            status, told = self.ask("admin", "PUT", f"/v1/shards/{shard}", json.dumps(FIELDS).encode())
            assert status == 200, told

    @property
    def is_alive(self) -> bool:
        return self.server.process.poll() is None

    def ask(
        self, token: str, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """One request on a connection of its own: the status, and the JSON or bytes of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            return asked(connection, self.tokens[token], method, path, body, headers)
        finally:
            connection.close()

    def pools(self) -> dict[str, int]:
        """What is in use of each pool."""
        start = 'persist_pool_used{pool="'
        lines = self.ask("admin", "GET", "/metrics")[1].decode().splitlines()
        found = [line[len(start) :].split('"} ') for line in lines if line.startswith(start)]
        return {name: int(float(value)) for name, value in found}

    def peak_bytes(self) -> int:
        """The most memory that the server has had since `forget_peak`."""
        with open(f"/proc/{self.server.process.pid}/status", encoding="ascii") as file:
            found = next(line for line in file if line.startswith("VmHWM"))
        return int(found.split()[1]) * 1024

    def forget_peak(self) -> None:
        with open(f"/proc/{self.server.process.pid}/clear_refs", "w", encoding="ascii") as file:
            file.write("5")

    def others_work(self) -> None:
        """Wait until the good tenant has done some more of all that it does; fails where it meets an error."""
        assert self._good is not None
        self._good.goes_on(ROUNDS)

    def withstands(self, attack: Attack, *, refusals: bool = False) -> None:
        """Attack while the good tenant works. What the attack has opened stays open until the other has gone on.

        `refusals`: the other may be told to come again (429, 503), which it does.
        """
        wait_until(lambda: self.pools()["connections"] <= 1, "those of the attack before are gone")
        self.forget_peak()
        with Evil(self) as evil, Good(self) as good:
            self._good = good
            self.others_work()
            attack(self, evil)
            self.others_work()
        assert self.is_alive, "the server has died"
        good.check()
        assert refusals or not good.refused, f"the other tenant was refused: {good.refused}"
        assert self.peak_bytes() < MEMORY_BYTES_MAX, f"the server took {self.peak_bytes() >> 20} MiB"


class Evil:
    """What an attacker has: connections from addresses of its own, and tokens that are good for `evil/`."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._sockets: list[socket.socket] = []
        self.shard = EVIL_SHARD

    def connect(self, address: str = EVIL_ADDRESS, *, receives: int | None = None) -> socket.socket:
        """A connection that stays open until the attack is over; `receives`: the bytes that the system takes for it."""
        opened = socket.socket()
        self._sockets.append(opened)
        opened.settimeout(WAIT_S)
        if receives is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        opened.bind((address, 0))
        opened.connect(("127.0.0.1", self._house.port))
        return opened

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """One request with the token for writing."""
        return self._house.ask("evil", method, path, body, headers)

    def head(self, method: str, path: str, *lines: str, token: str | None = "evil") -> bytes:
        """The head of a request."""
        known = () if token is None else (f"authorization: Bearer {self._house.tokens[token]}",)
        return "\r\n".join((f"{method} {path} HTTP/1.1", "host: 127.0.0.1", *known, *lines, "", "")).encode()

    def fill(self, nbytes: int) -> None:
        """Write so many bytes of rows that do not compress."""
        each = 1 << 20
        for number in range(0, nbytes, each):
            rows = [{"id": number + n, "text": os.urandom(500).hex()} for n in range(each // 1000)]
            body = "\n".join(map(json.dumps, rows)).encode()
            status, told = self.ask("POST", f"/v1/shards/{self.shard}/insert?format=ndjson", body)
            assert status == 200, told

    def __enter__(self) -> Evil:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in self._sockets:
            opened.close()


class Good:
    """Inserts, reads snapshots and listens, each on a thread; every answer is checked."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._stopping = threading.Event()
        self._sent: list[int] = []
        self._acknowledged: list[int] = []
        self._heard: list[int] = []
        self._last: int | None = None
        self._moved = threading.Condition()
        self._done = {"insert": 0, "snapshot": 0, "listen": 0}
        self.refused: list[str] = []
        self._failed: list[str] = []
        self._before = self._snapshot()
        self._first = max(self._before, default=0) + 1
        self._after = self._upper() - 1 if self._before else None
        works = (self._insert, self._read, self._listen)
        self._threads = [threading.Thread(target=self._guarded, args=(work,), daemon=True) for work in works]

    def goes_on(self, rounds: int) -> None:
        with self._moved:
            begun = dict(self._done)

            def is_there() -> bool:
                return bool(self._failed) or all(self._done[work] >= begun[work] + rounds for work in begun)

            assert self._moved.wait_for(is_there, WAIT_S), f"the other tenant stands still: {begun} then {self._done}"
        assert not self._failed, self._failed

    def check(self) -> None:
        """After the end: nothing went wrong, nothing is lost and nothing there twice."""
        assert not self._failed, self._failed
        assert sorted(self._snapshot()) == sorted(self._before + self._acknowledged)
        assert self._heard == self._acknowledged

    def __enter__(self) -> Good:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in self._threads), "the other tenant waits for ever"

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            with self._moved:
                self._failed.append(f"{work.__name__}: {type(error).__name__}: {error}")
                self._moved.notify_all()

    def _count(self, what: str) -> None:
        with self._moved:
            self._done[what] += 1
            self._moved.notify_all()

    def _insert(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._house.port, timeout=WAIT_S)
        number = self._first
        while self._last is None:
            if self._stopping.is_set():
                self._last = number  # for which the listener waits
            self._sent.append(number)
            body = json.dumps({"id": number, "text": "good"}).encode()
            path = f"/v1/shards/{GOOD_SHARD}/insert?format=ndjson&token=order-{number}"  # it can be repeated
            status, told = self._again(connection, "POST", path, body)
            assert status == 200, told
            self._acknowledged.append(number)
            number += 1
            self._count("insert")
            self._stopping.wait(0.002)
        connection.close()

    def _read(self) -> None:
        while not self._stopping.is_set():
            known = len(self._acknowledged)
            found = self._snapshot()
            assert len(set(found)) == len(found), "a row is there twice"
            assert set(found) >= {*self._before, *self._acknowledged[:known]}, "an acknowledged row is not there"
            assert set(found) <= {*self._before, *self._sent}
            self._count("snapshot")
            self._stopping.wait(0.01)

    def _snapshot(self) -> list[int]:
        connection = http.client.HTTPConnection("127.0.0.1", self._house.port, timeout=WAIT_S)
        status, told = self._again(connection, "GET", f"/v1/shards/{GOOD_SHARD}/snapshot?format=ndjson", None)
        connection.close()
        assert status == 200, told
        return [json.loads(line)["id"] for line in told.splitlines()]

    def _listen(self) -> None:
        """Every row from now on, until the last one that was acknowledged has come."""
        connection = http.client.HTTPConnection("127.0.0.1", self._house.port, timeout=WAIT_S)
        token = {"authorization": f"Bearer {self._house.tokens['good']}", "accept": "text/event-stream"}
        after = "" if self._after is None else f"?after={self._after}"
        connection.request("GET", f"/v1/shards/{GOOD_SHARD}/listen{after}", headers=token)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        while self._last is None or self._last not in self._heard[-1:]:
            line = answer.readline()
            assert line, "the stream ended"
            if self._failed:
                return
            if line.startswith(b"data: ") and b'"rows"' in line:
                self._heard += [row["id"] for row in json.loads(line[6:])["rows"]]
                self._count("listen")
        connection.close()

    def _upper(self) -> int:
        status, told = self._house.ask("good", "GET", f"/v1/shards/{GOOD_SHARD}")
        assert status == 200, told
        return int(told["upper"][0])

    def _again(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> tuple[int, Any]:
        """Ask, and once more after a refusal that says so, for as long as a test may wait."""
        ends = time.monotonic() + WAIT_S
        while True:
            try:
                status, told = asked(connection, self._house.tokens["good"], method, path, body)
                if status not in (408, 429, 503):
                    return status, told
                said = f"{method} {status} {told}"
            except (ConnectionError, http.client.HTTPException) as error:
                said = f"{method} {error!r}"
            connection.close()
            self.refused.append(said)
            assert time.monotonic() < ends, self.refused[-3:]
            self._stopping.wait(0.05)


def asked(
    connection: http.client.HTTPConnection,
    token: str,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, Any]:
    """The status and the JSON of an answer, or its bytes."""
    known = {"authorization": f"Bearer {token}", "content-type": "application/octet-stream"}
    connection.request(method, path, body, {**known, **(headers or {})})
    answer = connection.getresponse()
    data = answer.read()
    is_json = (answer.getheader("content-type") or "").endswith("json") and "ndjson" not in path
    return answer.status, json.loads(data) if is_json and data else data


def reset(opened: socket.socket) -> None:
    """Close a connection as a client that was killed does."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    opened.close()


def pushed(opened: socket.socket, data: bytes, times: int = 1) -> None:
    """Send it again and again, for as long as the other end takes it, or nothing has been answered."""
    for _ in range(times):
        try:
            opened.sendall(data)
        except OSError:
            return
        if select.select([opened], [], [], 0)[0]:
            return


def answered(opened: socket.socket) -> tuple[int, dict[str, Any]]:
    """The status and the problem that the server tells before it closes the connection. 0: it closed it in silence."""
    data = b""
    try:
        while piece := opened.recv(65536):
            data += piece
    except ConnectionError:
        pass
    if not data:
        return 0, {}
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])


def statuses(opened: list[socket.socket]) -> list[int]:
    """The status of the answer of each, as its first line says; 0 where the connection was closed in silence."""
    found = []
    for one in opened:
        try:
            line = one.recv(4096)
        except ConnectionError:
            line = b""
        found.append(int(line.split()[1]) if line else 0)
    return found


def is_ended(opened: socket.socket) -> bool:
    """Whether the server has closed the connection, once all that it has sent is read; waits for the end."""
    try:
        while opened.recv(1 << 20):
            pass
    except ConnectionError:
        return True
    return True


@contextmanager
def house(
    directory: Path,
    limits: dict[str, float] | None = None,
    arguments: Sequence[str] = (),
    *,
    wants_tokens: bool = True,
) -> Iterator[House]:
    """A server that is stopped at the end."""
    one = House(directory, limits, arguments, wants_tokens=wants_tokens)
    with one.server:
        yield one
        if one.is_alive:
            assert one.server.stop() == 0
            said = one.server.said()
            at = said.find("Traceback")
            assert at < 0, said[max(0, at - 2000) : at + 3000]
