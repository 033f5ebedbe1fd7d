"""The service beside deltalake, PyIceberg and SlateDB: small appends, many writers, listening, idleness, a killing.

    python -m bench.service [--only small,writers,listen,idle,kill] [--rounds 500] [--seconds 5] [--writers 64]
                            [--shards 10000] [--listeners 2000] [--idle-seconds 600]

Rounds are interleaved. Every server is `persist serve` on SQLite (synchronous=FULL) and files.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import secrets
import socket
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

import persist
from bench.bars import bar, median, percentile
from bench.service_peers import DeltaPeer, IcebergPeer, slate_commits, table
from bench.service_server import ServerProcess
from consensus import open_consensus
from persist.http_client.http_calls import rendezvous

KEY = ["k"]
SLICE = 25  # appends before the next peer has its turn: a writer that writes finds its caches warm
FIRST = 50  # appends that are looked at by themselves: what a commit costs grows with their number elsewhere
SLOW_S = 2.0


def small(root: Path, rounds: int) -> None:
    """100-row appends, one shard or table each. Raw compare-and-sets and ours call by call, the peers in slices."""
    raw = open_consensus(f"sqlite:///{root / 'raw.db'}")
    rows = table()
    delta, iceberg = DeltaPeer(root / "delta"), IcebergPeer(root / "iceberg")
    with ServerProcess(root / "http") as server, persist.connect(f"persist://{root / 'embedded'}") as embedded:
        http = persist.connect(server.url)
        numbers = itertools.count(1)
        works: dict[str, Callable[[], object]] = {
            "raw": lambda: raw.compare_and_set("bench", next(numbers), b"x" * 500),
            "embedded": appender(embedded, rows),
            "http": appender(http, rows),
            "deltalake": lambda: delta.append(rows),
            "pyiceberg": lambda: iceberg.append(rows),
        }
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for start_at in range(0, rounds, SLICE):
            for turn in (("raw", "embedded", "http"), ("deltalake",), ("pyiceberg",)):
                for _ in range(min(SLICE, rounds - start_at)):
                    for name in turn:
                        start = time.perf_counter()
                        works[name]()
                        seconds[name].append(time.perf_counter() - start)
        http.close()
    raw.close()
    p50 = {name: median(samples) * 1000 for name, samples in seconds.items()}
    for name, samples in seconds.items():
        first, last = median(samples[:FIRST]) * 1000, median(samples[-FIRST:]) * 1000
        print(
            f"{name:10} p50 {p50[name]:8.3f} ms; of the first {FIRST} {first:8.3f}, of the last {FIRST} {last:8.3f} ms"
        )
    bar("embedded append / raw compare-and-set", p50["embedded"] / p50["raw"], "<= 3")
    bar("HTTP append / raw compare-and-set", p50["http"] / p50["raw"], "<= 5")
    bar("deltalake append / HTTP append", p50["deltalake"] / p50["http"], ">= 8")
    bar("PyIceberg append / HTTP append", p50["pyiceberg"] / p50["http"], ">= 60")


def appender(client: persist.client.client.Client, rows: pa.Table) -> Callable[[], object]:
    shard = client.create_shard(f"bench-{secrets.token_hex(6)}", rows.schema, KEY, history="none")
    writer = shard.open_writer()
    upper = [0]

    def append() -> None:
        writer.compare_and_append(rows, upper[0], upper[0] + 1)
        upper[0] += 1

    append()
    return append


def writers(root: Path, count: int, seconds: float) -> None:
    """Many processes insert into one shard; then 16 of deltalake's, and one of SlateDB's."""
    with ServerProcess(root / "writers") as server:
        with persist.connect(server.url) as client:
            shard = client.create_shard("one", table().schema, KEY, history="none")
        single = run_writers(server.url, 1, min(seconds, 3.0))
        many = run_writers(server.url, count, seconds)
        with persist.connect(server.url) as client:
            found = client.shard("one").snapshot().to_arrow()
            total = pa.compute.sum(found["__diff"]).as_py() or 0
        del shard
    promised = 100 * (len(single.latencies) + len(many.latencies))
    rate = len(many.latencies) / seconds
    p50, p99 = median(single.latencies), percentile(many.latencies, 0.99)
    print(f"{count} writers: {rate:.0f} inserts/s, p50 {median(many.latencies) * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms")
    print(f"one writer: {len(single.latencies) / min(seconds, 3.0):.0f} inserts/s, p50 {p50 * 1000:.2f} ms")
    delta = DeltaPeer.commits_per_second(root / "delta16", 16, seconds)
    slate = slate_commits(root / "slate", seconds)
    print(f"deltalake, 16 writers: {delta:.1f} commits/s; SlateDB, one process of 16 writers: {slate:.0f} puts/s")
    bar(f"errors of {count} writers", many.errors + single.errors, "<= 0")
    bar("rows lost or doubled", abs(total - promised), "<= 0")
    bar("inserts/s / deltalake's commits/s", rate / delta, ">= 50")
    bar("inserts/s / SlateDB's puts/s", rate / slate, ">= 5")
    bar("p99 of many / p50 of one", p99 / p50, "<= 20")


class Ran:
    def __init__(self) -> None:
        self.latencies: list[float] = []
        self.errors = 0


def run_writers(url: str, count: int, seconds: float) -> Ran:
    context = multiprocessing.get_context("fork")
    queue: Any = context.Queue()
    barrier: Any = context.Barrier(count)
    processes = [context.Process(target=_writer, args=(url, seconds, barrier, queue)) for _ in range(count)]
    for process in processes:
        process.start()
    ran = Ran()
    for _ in processes:
        latencies, errors = queue.get()
        ran.latencies += latencies
        ran.errors += errors
    for process in processes:
        process.join()
    return ran


def _writer(url: str, seconds: float, barrier: Any, queue: Any) -> None:
    latencies: list[float] = []
    errors = 0
    rows = table()
    with persist.connect(url) as client:
        writer = client.shard("one").open_writer()
        barrier.wait()
        end = time.monotonic() + seconds
        while (start := time.monotonic()) < end:
            try:
                writer.insert(rows)
                latencies.append(time.monotonic() - start)
            except persist.core.errors.PersistError as error:
                errors += 1
                print(f"a writer failed: {error}")
    queue.put((latencies, errors))


def listening(root: Path, rounds: int, postgres: str | None) -> None:
    """From the append's call to the rows in another process's hands, against the append itself."""
    _listening(root / "listen", rounds, None)
    if postgres is not None:
        write, arrive = _listening(root / "listen-pg", rounds, postgres)
        bar("PostgreSQL + file: write p50, ms", write, "<= 5.5")
        bar("PostgreSQL + file: write to listen p50, ms", arrive, "<= 6.4")


def _listening(root: Path, rounds: int, consensus: str | None) -> tuple[float, float]:
    context = multiprocessing.get_context("spawn")
    with ServerProcess(root, consensus=consensus) as server, persist.connect(server.url) as client:
        rows = table()
        shard = client.create_shard(f"listen-{secrets.token_hex(4)}", rows.schema, KEY, history="none")
        parent, child = context.Pipe()
        listener = context.Process(target=_listener, args=(server.url, shard.name, rounds, child))
        listener.start()
        parent.recv()
        sent, took = [], []
        writer = shard.open_writer()
        writer.compare_and_append(rows, 0, 1)
        parent.recv()  # both ends have done once what they do from now on
        for number in range(1, rounds + 1):
            sent.append(time.monotonic())
            writer.compare_and_append(rows, number, number + 1)
            took.append(time.monotonic() - sent[-1])
            time.sleep(0.01)
        arrived = parent.recv()
        listener.join()
    write = median(took) * 1000
    arrive = median([at - start for at, start in zip(arrived, sent, strict=True)]) * 1000
    where = "PostgreSQL" if consensus else "SQLite"
    print(f"{where}: append p50 {write:.2f} ms, append to listen p50 {arrive:.2f} ms")
    bar(f"{where}: append to listen / append", arrive / write, "<= 2")
    return write, arrive


def _listener(url: str, name: str, rounds: int, pipe: Any) -> None:
    arrived: list[float] = []
    with persist.connect(url) as client, client.shard(name).listen(None, until=rounds + 1) as listen:
        pipe.send("ready")
        for event in listen:
            now = time.monotonic()
            if event.lower.element == 0:
                pipe.send("warm")
                continue
            lower, upper = event.lower.element, event.upper.element
            assert lower is not None
            assert upper is not None
            arrived += [now] * (upper - lower)
    pipe.send(arrived)


def idle(root: Path, shards: int, listeners: int, seconds: float) -> None:
    """Many shards and idle listeners on one server: its memory, and what it asks of the consensus store."""
    with ServerProcess(root / "idle", metered=True) as server:
        with persist.connect(server.url) as client:
            for number in range(shards):
                client.create_shard(f"s{number:05d}", table().schema, KEY, history="none")
        streams = [_open_stream(server.port, f"s{number % shards:05d}") for number in range(listeners)]
        time.sleep(2.0)
        before, statements = server.rss(), server.statements()
        peak = before
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(5.0, max(0.1, end - time.monotonic())))
            peak = max(peak, server.rss())
        rate = (server.statements() - statements) / seconds
        print(f"{shards} shards, {listeners} listeners, {seconds:.0f} s: {before >> 20} MiB, at most {peak >> 20} MiB")
        bar("growth of memory while idle", peak / before, "<= 1.05")
        bar("consensus statements/s while idle", rate, "<= 5")
        for stream in streams:
            stream.close()


def _open_stream(port: int, name: str) -> socket.socket:
    stream = socket.create_connection(("127.0.0.1", port))
    stream.sendall(f"GET /v1/shards/{name}/listen HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
    assert b" 200 " in stream.recv(4096)
    return stream


def kill(root: Path, seconds: float) -> None:
    """One of two servers is killed under load."""
    directory = root / "kill"
    with ServerProcess(directory) as a, ServerProcess(directory) as b:
        client = persist.connect(f"{a.url},{b.url}")
        shard = client.create_shard("one", table().schema, KEY, history="none")
        victim = a if rendezvous([a.url, b.url], "one")[0] == a.url else b
        longest, errors, done = 0.0, 0, 0
        killer = threading.Timer(seconds / 2, victim.kill)
        killer.start()
        end = time.monotonic() + seconds
        while (start := time.monotonic()) < end:
            try:
                shard.insert(table())
                done += 1
            except persist.core.errors.PersistError as error:
                errors += 1
                print(f"an insert failed: {error}")
            longest = max(longest, time.monotonic() - start)
        killer.join()
        total = pa.compute.sum(shard.snapshot().to_arrow()["__diff"]).as_py()
        client.close()
    print(f"{done} inserts, the longest took {longest * 1000:.0f} ms")
    bar("errors when one of two servers is killed", errors, "<= 0")
    bar("acknowledged rows lost or doubled", abs(total - 100 * done), "<= 0")
    bar("longest insert, s", longest, f"<= {SLOW_S}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="small,writers,listen,idle,kill")
    parser.add_argument("--rounds", type=int, default=500, help="appends of each (500)")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--writers", type=int, default=64)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--listeners", type=int, default=2_000)
    parser.add_argument("--idle-seconds", type=float, default=600.0)
    parser.add_argument("--postgres", help="URL of a PostgreSQL to measure listening on, too")
    arguments = parser.parse_args()
    print(f"SQLite {sqlite3.sqlite_version}, {os.cpu_count()} cores")
    parts: dict[str, Callable[[Path], None]] = {
        "small": lambda root: small(root, arguments.rounds),
        "writers": lambda root: writers(root, arguments.writers, arguments.seconds),
        "listen": lambda root: listening(root, arguments.rounds, arguments.postgres),
        "idle": lambda root: idle(root, arguments.shards, arguments.listeners, arguments.idle_seconds),
        "kill": lambda root: kill(root, arguments.seconds),
    }
    for name in arguments.only.split(","):
        print(f"--- {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="bench-service-") as directory:
            parts[name](Path(directory))


if __name__ == "__main__":
    main()
