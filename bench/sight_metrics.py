"""What metrics and logs cost an append: CPU of client and server together, and requests.

    python -m bench.sight_metrics [--rounds 9] [--appends 2000] [--rows 100]

Two servers, each a process of its own over SQLite and files, take turns: one counts, times and logs as `persist serve`
does, the other does none of it. So do their clients.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

import persist
from bench.bars import bar, median
from blob.memory_blobs import MemoryBlob
from blob.metrics import MeteredBlob
from consensus.memory_logs import MemoryConsensus
from consensus.metrics import MeteredConsensus
from persist.cli.long_running import configure_logs
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.commit.clocks_and_ids import SystemClock, SystemIds
from persist.commit.location import Location, LocationSettings, open_location
from rpc.app import bind, serve, url_of
from rpc.app_state import Service
from rpc.client.http_transport import HttpTransport
from rpc.settings import ServerSettings

CPU_MAX = "<= 1.05"
SCHEMA = pa.schema([("id", pa.int64()), ("amount", pa.int64())])
COUNTED_APPENDS = 300
ID = "0" * 32


class Nothing:
    """Takes the place of what counts, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class AtOnce:
    """Upkeep in the thread of the commit, so that its calls are the same each time."""

    def submit(self, work: Any) -> bool:
        work()
        return True

    def close(self) -> None:
        return


class Served:
    """A server process, and a client of it in this one."""

    def __init__(self, directory: Path, *, counts: bool, access_log: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (str(directory), theirs, counts, access_log)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        self._client = persist.connect(self._pipe.recv())
        if not counts:
            transport = self._client.transport
            assert isinstance(transport, HttpTransport)
            calls: Any = transport._calls
            calls.durations = Nothing()
            calls.call = lambda call: calls._call(call, ID)
            metered = transport._blob
            assert isinstance(metered, MeteredBlob)
            transport._blob = metered.inner
        self.shard = self._client.create_shard("orders", SCHEMA, key=["id"])
        self.cpu_s: list[float] = []

    def round(self, appends: int, rows: pa.Table) -> None:
        before = self._cpu_s()
        append(self.shard, appends, rows)
        self.cpu_s.append(self._cpu_s() - before)

    def _cpu_s(self) -> float:
        """CPU of both processes so far."""
        self._pipe.send("cpu")
        theirs: float = self._pipe.recv()
        return theirs + time.process_time()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._process.terminate()
        self._process.join()


def _serve(directory: str, pipe: Any, counts: bool, access_log: bool) -> None:
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if counts:
        configure_logs("info" if access_log else "warning")
    else:
        logging.disable(logging.CRITICAL)
        Service.__init__ = _uncounted(Service.__init__)  # type: ignore[method-assign]
    location = open_location(f"persist://{directory}", settings=LocationSettings(metered=counts))
    listener = bind("127.0.0.1", 0)
    settings = ServerSettings(port=0, maintenance=False, access_log=access_log)

    def ready() -> None:
        pipe.send(url_of(listener, settings))
        threading.Thread(target=_tell_cpu, args=(pipe,), daemon=True).start()

    serve(location, settings, listener, ready)
    location.close()


def _uncounted(init: Any) -> Any:
    def made(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self.metrics = Nothing()

    return made


def _tell_cpu(pipe: Any) -> None:
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        pipe.send(time.process_time())


def append(shard: Shard, appends: int, rows: pa.Table) -> None:
    for _ in range(appends):
        shard.insert(rows)


def table(rows: int) -> pa.Table:
    return pa.table({"id": range(rows), "amount": range(rows)}, SCHEMA)


def over_http(root: Path, rounds: int, appends: int, rows: int, *, access_log: bool) -> float:
    """The CPU of an append with metrics and logs for that of one without; a line for each round."""
    given = table(rows)
    with (
        Served(root / "with", counts=True, access_log=access_log) as counted,
        Served(root / "without", counts=False) as bare,
    ):
        for server in (counted, bare):  # warm
            append(server.shard, appends // 4, given)
        return _turns(rounds, appends, given, counted, bare)


def _turns(rounds: int, appends: int, given: pa.Table, counted: Any, bare: Any) -> float:
    for number in range(rounds):
        for one in (counted, bare) if number % 2 else (bare, counted):
            one.round(appends, given)
        left, right = counted.cpu_s[-1], bare.cpu_s[-1]
        ms = 1000 / appends
        print(f"  round {number + 1}: {left * ms:.3f} and {right * ms:.3f} ms of CPU an append: {left / right:.3f}")
    return median([left / right for left, right in zip(counted.cpu_s, bare.cpu_s, strict=True)])


class Embedded:
    """Shards in this process, over SQLite and files."""

    def __init__(self, directory: Path, *, counts: bool) -> None:
        location = open_location(f"persist://{directory}", settings=LocationSettings(metered=counts))
        self.client = Client(EmbeddedTransport(location))
        self.shard = self.client.create_shard("orders", SCHEMA, key=["id"])
        self.cpu_s: list[float] = []

    def round(self, appends: int, rows: pa.Table) -> None:
        before = time.process_time()
        append(self.shard, appends, rows)
        self.cpu_s.append(time.process_time() - before)


def embedded(root: Path, rounds: int, appends: int, rows: int) -> float:
    given = table(rows)
    counted = Embedded(root / "counted", counts=True)
    bare = Embedded(root / "bare", counts=False)
    with closing(counted.client), closing(bare.client):
        for one in (counted, bare):
            append(one.shard, appends // 4, given)
        return _turns(rounds, appends, given, counted, bare)


def requests(*, counts: bool) -> float:
    """Calls to both stores for each append."""
    calls: list[str] = []

    def observe(verb: str, *_: object) -> None:
        calls.append(verb)

    location = Location(
        MeteredBlob(MemoryBlob(), observe),
        MeteredConsensus(MemoryConsensus(), observe),
        settings=LocationSettings(metered=counts, compares_clock=False),
        clock=SystemClock(),
        ids=SystemIds(),
        background=AtOnce(),
    )
    with closing(Client(EmbeddedTransport(location))) as client:
        shard = client.create_shard("orders", SCHEMA, key=["id"])
        calls.clear()
        append(shard, COUNTED_APPENDS, table(100))
        if counts:
            assert client.metrics()["persist_commits_total"] >= COUNTED_APPENDS
        return len(calls) / COUNTED_APPENDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--appends", type=int, default=2_000)
    parser.add_argument("--rows", type=int, default=100)
    arguments = parser.parse_args()
    rounds, appends, rows = arguments.rounds, arguments.appends, arguments.rows
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        print("over HTTP, client and server together")
        http = over_http(root / "http", rounds, appends, rows, access_log=False)
        print("the same with a line for each request (--access-log)")
        lines = over_http(root / "lines", rounds, appends, rows, access_log=True)
        print("embedded")
        own = embedded(root, rounds, appends, rows)
    print(f"with a line for each request: {lines:.3f}")
    held = [
        bar("CPU of an append with metrics and logs / without", http, CPU_MAX),
        bar("CPU of an append of an embedded program with metrics / without", own, CPU_MAX),
        bar("requests of an append for metrics", requests(counts=True) - requests(counts=False), "<= 0"),
    ]
    sys.exit(0 if all(held) else 1)


if __name__ == "__main__":
    main()
