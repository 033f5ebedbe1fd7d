"""Posts of ten NDJSON rows by clients that cost next to nothing, beside a floor and another checkout, in turns.

    python -m bench.speed.thin_posts [--before CHECKOUT] [--rounds 5] [--seconds 10]

Each side has a server of its own, whose token may write to one shard. `post_floor` is what Python can do at all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.bars import Percentiles, bar, median
from bench.service_server import cpu_s_of

ROOT = Path(__file__).resolve().parent.parent.parent
FIELDS = {"fields": [{"name": "k", "type": "int64", "key": True, "nullable": False}, {"name": "v", "type": "string"}]}
ROWS = 10
CONNECTIONS = 16
WARM_S = 1.0
BAD_SHARE = 10  # of so many posts one is bad, where some are
OWNER, WRITER = "pt_owner_00000000000000000000000000000000", "pt_writer_00000000000000000000000000000000"


def tokens() -> str:
    """A file of tokens: one that makes shards, and one that may write to one of them."""

    def entry(name: str, token: str, *scopes: str) -> dict[str, object]:
        return {"id": name, "sha256": hashlib.sha256(token.encode()).hexdigest(), "scopes": scopes, "prefixes": ["one"]}

    return json.dumps({"tokens": [entry("owner", OWNER, "read", "write", "manage"), entry("writer", WRITER, "write")]})


@dataclass
class Load(Percentiles):
    """What one run came to."""

    seconds: float
    latencies: Sequence[float]
    refused: int
    cpu_s: float

    @property
    def rate(self) -> float:
        """Posts a second that were taken."""
        return (len(self.latencies) - self.refused) / self.seconds


@dataclass(frozen=True)
class Side:
    """A server that takes posts."""

    name: str
    port: int
    pid: int

    def run(self, connections: int, seconds: float, *, with_bad: bool = False) -> Load:
        self._sent(connections, WARM_S, [_request(self.name, good=True)])
        requests = [_request(self.name, good=True)] * (BAD_SHARE - 1) + [_request(self.name, good=not with_bad)]
        before = cpu_s_of(self.pid)
        latencies, refused = self._sent(connections, seconds, requests)
        return Load(seconds, latencies, refused, cpu_s_of(self.pid) - before)

    def _sent(self, connections: int, seconds: float, requests: list[bytes]) -> tuple[list[float], int]:
        latencies, refused, sent = [], 0, 0
        with selectors.DefaultSelector() as waiting:
            for _ in range(connections):
                connection = socket.create_connection(("127.0.0.1", self.port))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(requests[sent % len(requests)])
                waiting.register(connection, selectors.EVENT_READ, [time.perf_counter()])
                sent += 1
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                for key, _ in waiting.select(1):
                    connection = key.fileobj  # type: ignore[assignment]
                    answer = _answer(connection)
                    if b" 200 " not in answer[:16]:
                        if b" 400 " not in answer[:16]:
                            raise SystemExit(f"the server answered {answer[:500]!r}")
                        refused += 1
                    now = time.perf_counter()
                    latencies.append(now - key.data[0])
                    key.data[0] = now
                    connection.sendall(requests[sent % len(requests)])
                    sent += 1
            for key in list(waiting.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
        return latencies, refused


def _answer(connection: socket.socket) -> bytes:
    """The whole of an answer, of which something has come."""
    data = connection.recv(65_536)
    while True:
        head, end, body = data.partition(b"\r\n\r\n")
        if end and len(body) >= int(head.lower().partition(b"content-length:")[2].split()[0]):
            return data
        data += connection.recv(65_536)


def _request(side: str, *, good: bool) -> bytes:
    lines = [{"k": number, "v": f"value{number}"} for number in range(ROWS)]
    body = "\n".join(json.dumps(line if good else {**line, "k": None}) for line in lines).encode()
    path = "/insert" if side == "floor" else "/v1/shards/one/insert"
    return (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/x-ndjson\r\n"
        f"authorization: Bearer {WRITER}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


@contextmanager
def opened(name: str, checkout: Path, folder: Path) -> Iterator[Side]:
    folder.mkdir()
    command = [sys.executable, "-m", "bench.speed.post_floor", str(folder)]
    if name != "floor":
        file = folder / "tokens.json"
        file.write_text(tokens())
        file.chmod(0o600)
        where = ["--dir", str(folder / "location"), "--tokens", str(file), "--no-maintenance"]
        command = [sys.executable, "-m", "rpc.cli", "serve", "--port", "0", *where]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=checkout
        )
    assert process.stdout is not None
    try:
        said = process.stdout.readline().strip()
        if name != "floor":
            _made(said)
        yield Side(name, int(said.rpartition(":")[2]), process.pid)
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def _made(url: str) -> None:
    """Make the shard, as clients of any version can."""
    headers = {"authorization": f"Bearer {OWNER}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/shards/one", json.dumps(FIELDS).encode(), headers, method="PUT")
    urllib.request.urlopen(request).close()


def measure(root: Path, rounds: int, seconds: float = 3.0, before: Path | None = None) -> None:
    """Print the table and the bars; files go below `root`."""
    sides = {"floor": ROOT, "now": ROOT, **({"before": before} if before else {})}
    many: dict[str, list[Load]] = {name: [] for name in sides}
    single: dict[str, list[Load]] = {name: [] for name in sides}
    mixed: list[Load] = []
    for number in range(rounds):
        for name, checkout in sides.items():
            with opened(name, checkout, root / f"{name}{number}") as side:
                many[name].append(side.run(CONNECTIONS, seconds))
                single[name].append(side.run(1, seconds))
                if name == "now":
                    mixed.append(side.run(CONNECTIONS, seconds, with_bad=True))
            last, alone = many[name][-1], single[name][-1]
            cpu_ms, p50, p99 = 1000 * last.cpu_s / len(last.latencies), 1000 * last.p50_s, 1000 * last.p99_s
            times = f"p50 {p50:.2f}, p99 {p99:.2f} ms, {cpu_ms:.2f} ms CPU; one: {1000 * alone.p50_s:.2f} ms"
            print(f"{name:7} {last.rate:6.0f} posts/s, {times}", flush=True)

    def ratio(of: Callable[[Load], float], taken: dict[str, list[Load]], to: str) -> float:
        return median([of(now) / of(other) for now, other in zip(taken["now"], taken[to], strict=True)])

    bar("thin inserts/s of 16 connections / the floor", ratio(lambda one: one.rate, many, "floor"), ">= 0.35")
    if before:
        bar("the same / before", ratio(lambda one: one.rate, many, "before"), ">= 3")
    cpu_ms = median([1000 * one.cpu_s / len(one.latencies) for one in many["now"]])
    bar("server CPU of one of them, in ms", cpu_ms, "<= 0.4")
    bar("one thin connection, p50 / the floor", ratio(lambda one: one.p50_s, single, "floor"), "<= 2")
    good = median([some.rate / whole.rate for some, whole in zip(mixed, many["now"], strict=True)])
    bar("good posts/s with one bad in ten / without", good, ">= 0.6")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    before = options.before.resolve() if options.before else None
    with tempfile.TemporaryDirectory(prefix="bench-posts-") as folder:
        measure(Path(folder), options.rounds, options.seconds, before)


if __name__ == "__main__":
    main()
