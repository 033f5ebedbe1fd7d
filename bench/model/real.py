"""Real runs: `persist serve` processes over one PostgreSQL, and writers that each wait for their answer."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import pyarrow as pa

import persist
from bench.bars import Percentiles
from bench.service_server import ServerProcess
from tests.services.postgres import Postgres

ROWS = 20
TABLE = pa.table({"k": [f"{n:016d}" for n in range(ROWS)], "v": list(range(ROWS))})
SCHEMA = TABLE.schema
BODY = b"".join(b'{"k": "%016d", "v": %d}\n' % (n, n) for n in range(ROWS))
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
ANSWER_BYTES_MAX = 64 * 1024
WARM_S = 1.5
PUTS = {'outcome="ok"', 'store="blob"', 'verb="put"'}


@dataclass(frozen=True)
class Measured(Percentiles):
    """A run of `seconds`. CPU is in seconds; `neighbours_s` is that of everything else on the machine.

    `kernel_s` is the part of `servers_s` in which the system worked for them. `put_s` is what a blob took, on average.
    """

    seconds: float
    latencies: Sequence[float]
    client_s: float
    servers_s: Sequence[float]
    kernel_s: Sequence[float]
    put_s: float
    store_s: float
    neighbours_s: float

    @property
    def per_s(self) -> float:
        return len(self.latencies) / self.seconds


@contextmanager
def servers(root: Path, postgres: Postgres, count: int) -> Iterator[list[ServerProcess]]:
    """So many servers, over one database and one directory of blobs, both new."""
    url = postgres.create_database(f"model_{root.name}")
    with ExitStack() as started:
        found = [started.enter_context(ServerProcess(root, consensus=url)) for _ in range(count)]
        yield found


@dataclass
class _Writer:
    """A connection over which one insert after the other goes."""

    connection: socket.socket
    request: bytes
    sent_s: float = 0.0
    answer: bytes = b""
    latencies: list[float] = field(default_factory=list)

    def send(self) -> None:
        self.sent_s = time.monotonic()
        self.connection.sendall(self.request)

    def has_answer(self) -> bool:
        """Take in what has come; whether the answer is whole."""
        self.answer += self.connection.recv(ANSWER_BYTES_MAX)
        head, found, body = self.answer.partition(b"\r\n\r\n")
        if not found:
            return False
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        if len(body) < length:
            return False
        assert head.startswith(b"HTTP/1.1 200"), self.answer[:500]
        self.latencies.append(time.monotonic() - self.sent_s)
        self.answer = b""
        return True


def run(running: Sequence[ServerProcess], postgres: Postgres, writers: int, seconds: float, label: str) -> Measured:
    """Have so many writers insert, each in a shard of its own, the shards spread over the servers in turn."""
    with persist.connect(running[0].url) as client:
        for number in range(writers):
            client.create_shard(f"{label}-{number}", SCHEMA, ["k"], history="none")
    connected = [_writer(running[n % len(running)].port, f"{label}-{n}") for n in range(writers)]
    with selectors.DefaultSelector() as selector:
        for writer in connected:
            selector.register(writer.connection, selectors.EVENT_READ, writer)
            writer.send()
        _loop(selector, WARM_S)
        for writer in connected:
            writer.latencies.clear()
        before, began_s, client_s = _cpu(running, postgres), time.monotonic(), time.process_time()
        _loop(selector, seconds)
        after, took_s, client_s = _cpu(running, postgres), time.monotonic() - began_s, time.process_time() - client_s
    for writer in connected:
        writer.connection.close()
    users_s, kernel_s = ([b[i] - a[i] for a, b in zip(before[0], after[0], strict=True)] for i in (0, 1))
    of_servers = [user_s + system_s for user_s, system_s in zip(users_s, kernel_s, strict=True)]
    store_s = after[1] - before[1]
    neighbours_s = max(0.0, after[2] - before[2] - sum(of_servers) - store_s - client_s)
    latencies = [latency for writer in connected for latency in writer.latencies]
    return Measured(took_s, latencies, client_s, of_servers, kernel_s, _put_s(running), store_s, neighbours_s)


def _writer(port: int, shard: str) -> _Writer:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = (
        f"POST /v1/shards/{shard}/insert HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/x-ndjson\r\n"
        f"content-length: {len(BODY)}\r\n\r\n"
    )
    return _Writer(connection, head.encode() + BODY)


def _loop(selector: selectors.BaseSelector, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            if key.data.has_answer():
                key.data.send()


def _put_s(running: Sequence[ServerProcess]) -> float:
    """How long it took to put a blob, by the metrics of these servers."""
    seconds = count = 0.0
    for server in running:
        with urlopen(f"{server.url}/metrics") as answer:
            for line in answer.read().decode().splitlines():
                if set(line.partition("{")[2].partition("}")[0].split(",")) >= PUTS:
                    seconds += float(line.split()[-1]) if line.startswith("persist_store_seconds_sum") else 0.0
                    count += float(line.split()[-1]) if line.startswith("persist_store_seconds_count") else 0.0
    return seconds / count


# --- CPU, as the kernel counts it


def _cpu(running: Sequence[ServerProcess], postgres: Postgres) -> tuple[list[tuple[float, float]], float, float]:
    """CPU seconds so far: of each server (its own, the system's), of PostgreSQL with all of it, of the machine."""
    return [_of_process(server.pid) for server in running], _of_family(postgres.server.pid), _of_machine()


def _stat(pid: int | str) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _of_process(pid: int) -> tuple[float, float]:
    user, system = map(int, _stat(pid)[11:13])
    return user * TICK_S, system * TICK_S


def _of_family(pid: int) -> float:
    """A process, its children, and those of them that have ended."""
    found = sum(map(int, _stat(pid)[11:15])) * TICK_S
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and _stat(entry.name)[1] == str(pid):
                found += sum(_of_process(int(entry.name)))
        except OSError:  # it has ended meanwhile
            continue
    return found


def _of_machine() -> float:
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) * TICK_S
