"""Small commits beside one fsynced log, many writers beside SlateDB, and what an insert costs the server.

python -m bench.speed.commits [--only alone,server,writers,embedded] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

import persist
from bench.bars import bar, median, percentile, timed
from bench.service import KEY, appender, run_writers
from bench.service_peers import slate_commits, table
from bench.service_server import ServerProcess
from bench.speed.http_load import insert_commands, posts, sent, wrk_inserts

APPENDS = 200  # of each kind in a round, in turns
SECONDS = 4.0
CONNECTIONS = 16
COMMANDS = 4_000
WARM = 12 * CONNECTIONS


class FsyncedLog:
    """The floor: rows as Arrow IPC at the end of one file, which is flushed to the disk after each."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def append(self, rows: pa.Table) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
        os.write(self._file, sink.getvalue())
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def alone(root: Path, rounds: int) -> None:
    """One writer, nobody else: the floor, embedded and over HTTP, call by call in turns."""
    log, rows = FsyncedLog(root / "log"), table()
    with ServerProcess(root / "http") as server, persist.connect(f"persist://{root / 'embedded'}") as embedded:
        http = persist.connect(server.url)
        works: dict[str, Callable[[], object]] = {
            "log": lambda: log.append(rows),
            "embedded": appender(embedded, rows),
            "http": appender(http, rows),
        }
        for work in works.values():
            for _ in range(WARM):
                work()
        taken: list[dict[str, list[float]]] = []
        for _ in range(rounds):
            samples: dict[str, list[float]] = {name: [] for name in works}
            for _ in range(APPENDS):
                for name, work in works.items():
                    samples[name].append(timed(work))
            taken.append(samples)
        http.close()
    log.close()

    def ratio(name: str, of: Callable[[list[float]], float]) -> float:
        return median([of(one[name]) / of(one["log"]) for one in taken])

    for name in works:
        p50, p99 = (median([of(one[name]) for one in taken]) * 1000 for of in (median, _p99))
        print(f"{name:9} p50 {p50:.3f} ms, p99 {p99:.3f} ms")
    bar("embedded append / fsynced Arrow log", ratio("embedded", median), "<= 2.5")
    bar("HTTP append / fsynced Arrow log", ratio("http", median), "<= 4")
    bar("p99 of embedded / of the log", ratio("embedded", _p99), "<= 2.5")
    bar("p99 of HTTP / of the log", ratio("http", _p99), "<= 2.5")


def _p99(samples: list[float]) -> float:
    return percentile(samples, 0.99)


def server(root: Path, rounds: int) -> None:
    """What clients in C see, and the CPU that an insert costs the server, upkeep included."""
    rows = table()
    body = "\n".join(json.dumps(row) for row in rows.to_pylist()).encode()
    thin, rich, thin_cpu, rich_cpu = [], [], [], []
    for number in range(rounds):
        with ServerProcess(root / f"server{number}") as process:
            with persist.connect(process.url) as client:
                shard = client.create_shard("one", rows.schema, KEY)
                opened = [shard.open_writer() for _ in range(CONNECTIONS)]
                for writer in opened:
                    writer.insert(rows)
                shard_id = shard.view().shard_id
            ids = [writer.writer_id for writer in opened]
            thin_posts = posts("/v1/shards/one/insert", [body] * (WARM + COMMANDS // 2), "application/x-ndjson")
            sent(process.port, thin_posts[:WARM], 1)
            before = process.cpu_s()
            sent(process.port, thin_posts[WARM:], CONNECTIONS)
            thin_cpu.append((process.cpu_s() - before) / (len(thin_posts) - WARM))
            rate = wrk_inserts(root, process.port, "one", body, CONNECTIONS, int(SECONDS))
            if rate is not None:
                thin.append(rate)
            bodies = insert_commands(rows, KEY, shard_id, ids, WARM + COMMANDS)
            rich_posts = posts("/v1/shards/one/commands", bodies)
            sent(process.port, rich_posts[:WARM], 1)
            before = process.cpu_s()
            seconds = sent(process.port, rich_posts[WARM:], CONNECTIONS)
            rich.append(COMMANDS / seconds)
            rich_cpu.append((process.cpu_s() - before) / COMMANDS)
    if thin:
        bar(f"thin inserts/s by wrk, {CONNECTIONS} connections", median(thin), ">= 1800")
    else:
        print("wrk is not installed: thin inserts/s were not measured")
    bar("ready commands/s by raw sockets", median(rich), ">= 4000")
    bar("server CPU of a thin insert, ms", median(thin_cpu) * 1000, "<= 0.5")
    bar("server CPU of a ready command, ms", median(rich_cpu) * 1000, "<= 0.2")


def writers(root: Path, rounds: int) -> None:
    """Processes that insert over HTTP into one shard, in a closed loop; SlateDB in between."""
    rates, ratios, spreads = [], [], []
    for number in range(rounds):
        with ServerProcess(root / f"writers{number}") as process:
            with persist.connect(process.url) as client:
                client.create_shard("one", table().schema, KEY, history="none")
            ran = run_writers(process.url, 16, SECONDS)
            rates.append(len(ran.latencies) / SECONDS)
            ratios.append(rates[-1] / slate_commits(root / f"slate{number}", SECONDS))
            many = run_writers(process.url, 64, SECONDS)
            assert not ran.errors + many.errors, "a writer failed"
            spreads.append(_p99(many.latencies) / (sum(many.latencies) / len(many.latencies)))
    bar("inserts/s of 16 processes", median(rates), ">= 1500")
    bar("inserts/s of 16 processes / SlateDB's puts/s", median(ratios), ">= 8")
    bar("p99 / mean of 64 processes", median(spreads), "<= 2")


def embedded(root: Path, rounds: int) -> None:
    """Embedded processes that share one directory and one shard."""
    rates, slowest = [], []
    for number in range(rounds):
        url = f"persist://{root / f'shared{number}'}"
        with persist.connect(url) as client:
            client.create_shard("one", table().schema, KEY, history="none")
        counts = _insert_side_by_side(url, 16)
        rates.append(sum(counts) / SECONDS)
        slowest.append(min(counts) / (sum(counts) / len(counts)))
        with persist.connect(url) as client:
            found = sum(client.shard("one").snapshot().to_arrow()["__diff"].to_pylist())
        assert found == 100 * (sum(counts) + len(counts)), "rows were lost or doubled"
    bar("inserts/s of 16 embedded processes", median(rates), ">= 150")
    bar("slowest of them / their mean", median(slowest), ">= 0.5")


def _insert_side_by_side(url: str, count: int) -> list[int]:
    context = multiprocessing.get_context("fork")
    queue: Any = context.Queue()
    barrier: Any = context.Barrier(count)
    processes = [context.Process(target=_embedded_writer, args=(url, barrier, queue)) for _ in range(count)]
    for process in processes:
        process.start()
    counts: list[int] = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    return counts


def _embedded_writer(url: str, barrier: Any, queue: Any) -> None:
    rows, done = table(), 0
    with persist.connect(url) as client:
        writer = client.shard("one").open_writer()
        writer.insert(rows)
        barrier.wait()
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            writer.insert(rows)
            done += 1
    queue.put(done)


PARTS: dict[str, Callable[[Path, int], None]] = {
    "alone": alone,
    "server": server,
    "writers": writers,
    "embedded": embedded,
}


def measure(root: Path, rounds: int, only: str = ",".join(PARTS)) -> None:
    """Print every bar of small commits, each the median of `rounds` rounds."""
    for name in only.split(","):
        print(f"--- {name}", flush=True)
        (root / name).mkdir()
        PARTS[name](root / name, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-speed-") as directory:
        measure(Path(directory), arguments.rounds, arguments.only)


if __name__ == "__main__":
    main()
