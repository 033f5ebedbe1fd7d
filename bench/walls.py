"""How long a well-behaved tenant waits while another one attacks the server that both use.

    python -m bench.walls [--only url,idle] [--seconds 4] [--no-quotas]

Each attack has one core and 50 connections, in a process of its own. It is measured twice: against the server, and
against a process that takes all that comes and discards it, so that what the attack itself costs this machine is known.
The attacker's token has quotas, as every token of a server should that strangers share (`QUOTAS`).
The bar: the 99th percentile of the tenant's inserts is at most the larger of 1.5 times and 50 ms more than that.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.bars import bar, percentile
from tests.attacks.harness import EVIL_SHARD, GOOD_SHARD, House, asked, house

CONNECTIONS = 50
TIMES, MORE_MS = 1.5, 50.0
PIECE = b"a" * 65536
QUOTAS = {"requests_per_s": 20, "rows_per_s": 200}


def send(connections: list[socket.socket], begin: Callable[[int], bytes], more: bytes = b"") -> None:
    """On each connection, and on a new one whenever one ends: `begin`, then `more` for as long as it is taken."""
    watched = selectors.DefaultSelector()
    address = connections[0].getpeername()

    def add(number: int, opened: socket.socket) -> None:
        with contextlib.suppress(OSError):
            opened.sendall(begin(number))
        opened.setblocking(False)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0)
        watched.register(opened, events, number)

    for number, opened in enumerate(connections):
        add(number, opened)
    while True:
        for key, events in watched.select(1.0):
            opened = key.fileobj  # type: ignore[assignment]
            try:
                if events & selectors.EVENT_READ and not opened.recv(1 << 16):
                    raise ConnectionResetError
                if events & selectors.EVENT_WRITE:
                    opened.send(more)
            except BlockingIOError:
                continue
            except OSError:
                watched.unregister(opened)
                opened.close()
                with contextlib.suppress(OSError):
                    add(key.data, socket.create_connection(address))


def stall(connections: list[socket.socket], begin: Callable[[int], bytes]) -> None:
    """Begin on each, and take nothing."""
    for number, opened in enumerate(connections):
        with contextlib.suppress(OSError):
            opened.sendall(begin(number))
    time.sleep(3600)


def attacks(token: str) -> dict[str, Callable[[list[socket.socket]], None]]:
    """By name: what is done with the connections."""

    def head(method: str, path: str, *lines: str) -> bytes:
        return "\r\n".join(
            (f"{method} {path} HTTP/1.1", "host: a", f"authorization: Bearer {token}", *lines, "", "")
        ).encode()

    rows = f"/v1/shards/{EVIL_SHARD}/insert?format=ndjson"
    snapshot = head("GET", f"/v1/shards/{EVIL_SHARD}/snapshot?format=csv")
    command = f"/v1/shards/{EVIL_SHARD}/commands"
    many = b"".join(b"x-%d: y\r\n" % n for n in range(2_000))
    insert = json.dumps({"id": 1, "text": "x" * 1000}).encode() + b"\n"
    large = insert * 100
    return {
        "url": lambda c: send(c, lambda _: b"GET /", PIECE),
        "headers": lambda c: send(c, lambda _: b"GET /healthz HTTP/1.1\r\n", many),
        "halves": lambda c: send(c, lambda _: b"GET /heal"),
        "idle": lambda c: stall(c, lambda _: b""),
        "bodies": lambda c: send(c, lambda _: head("POST", rows, "content-length: 4000000") + PIECE),
        "not allowed": lambda c: send(
            c, lambda _: head("POST", "/v1/shards/good/orders/commands", "content-length: 9000000"), PIECE
        ),
        "commands": lambda c: send(c, lambda _: head("POST", command, "content-length: 16000000"), PIECE),
        "snapshots": lambda c: stall(c, lambda _: snapshot),
        "listeners": lambda c: stall(c, lambda _: head("GET", f"/v1/shards/{EVIL_SHARD}/listen")),
        "pipelined": lambda c: send(c, lambda _: b"", head("GET", f"/v1/shards/{EVIL_SHARD}") * 20),
        "inserts": lambda c: send(c, lambda _: b"", head("POST", rows, f"content-length: {len(large)}") + large),
    }


def attack(name: str, token: str, port: int) -> None:
    """In a process of its own, until it is killed."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    opened = []
    for _ in range(CONNECTIONS):
        one = socket.socket()
        if name in ("snapshots", "listeners"):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", port))
        opened.append(one)
    attacks(token)[name](opened)


def discard(pipe: Any) -> None:
    """Take all that comes on any connection, and say nothing."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    pipe.send(listener.getsockname()[1])
    watched = selectors.DefaultSelector()
    watched.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in watched.select():
            opened = key.fileobj
            assert isinstance(opened, socket.socket)
            if opened is listener:
                watched.register(listener.accept()[0], selectors.EVENT_READ)
            elif not opened.recv(1 << 20):
                watched.unregister(opened)
                opened.close()


class Tenant:
    """Inserts one row after the other, and notes how long each takes."""

    def __init__(self, served: House) -> None:
        self._served = served
        self._connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        self._number = 0
        self.errors = 0

    def p99_ms(self, seconds: float) -> float:
        took = []
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            start = time.perf_counter()
            self._number += 1
            body = json.dumps({"id": self._number, "text": "good"}).encode()
            path = f"/v1/shards/{GOOD_SHARD}/insert?format=ndjson"
            status, _ = asked(self._connection, self._served.tokens["good"], "POST", path, body)
            self.errors += status != 200
            took.append(time.perf_counter() - start)
        return percentile(took, 0.99) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of attacks, with commas")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement (4)")
    parser.add_argument("--no-quotas", action="store_true", help="the attacker has no quota")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    sink = context.Process(target=discard, args=(theirs,), daemon=True)
    sink.start()
    sink_port = ours.recv()
    names = arguments.only.split(",") if arguments.only else list(attacks(""))
    with tempfile.TemporaryDirectory(prefix="bench-walls-") as directory, limited(Path(directory)) as (served, file):
        fill(served)
        if not arguments.no_quotas:
            file.write_text(json.dumps({"tokens": {"evil": QUOTAS}}))
            time.sleep(1.0)  # by then it was read
        tenant = Tenant(served)
        memory: list[float] = []
        print(f"alone: p99 {tenant.p99_ms(arguments.seconds):.1f} ms", flush=True)
        for name in names:
            found = []
            served.forget_peak()
            for port in (sink_port, served.port):
                attacker = context.Process(target=attack, args=(name, served.tokens["evil"], port))
                attacker.start()
                time.sleep(0.5)
                found.append(tenant.p99_ms(arguments.seconds))
                attacker.kill()
                attacker.join()
            memory.append(served.peak_bytes() / (1 << 20))
            elsewhere, here = found
            print(f"{name}: elsewhere {elsewhere:.1f} ms, here {here:.1f} ms, memory {memory[-1]:.0f} MiB", flush=True)
            bar(f"p99 beside the attack {name}, ms", here, f"<= {max(TIMES * elsewhere, elsewhere + MORE_MS):.3g}")
        bar("refusals and errors of the tenant", tenant.errors, "<= 0")
        bar("most memory of the server, MiB", max(memory), "<= 512")
    sink.kill()


@contextlib.contextmanager
def limited(directory: Path) -> Iterator[tuple[House, Path]]:
    """A server with the limits that servers have, and its file of quotas."""
    file = directory / "quotas.json"
    file.write_text("{}")
    with house(directory, {}, arguments=("--quotas", str(file))) as served:
        yield served, file


def fill(served: House) -> None:
    """Some rows of which an attacker can have snapshots."""
    body = b"\n".join(json.dumps({"id": n, "text": os.urandom(500).hex()}).encode() for n in range(20_000))
    status, told = served.ask("evil", "POST", f"/v1/shards/{EVIL_SHARD}/insert?format=ndjson", body)
    assert status == 200, told


if __name__ == "__main__":
    main()
