"""S3 as it is in the world: 30 ms a request and a rate for each connection, put in by a proxy before a private server.

    python -m bench.speed.far_s3 [--rounds 5]

Ours is an embedded client with its log in SQLite, and beside it plain boto3 calls of the same bytes through the same
proxy, in turns. A part is appended at 100 MB/s a connection. Eight splits are read by eight threads at 25 MB/s each:
Python on two cores passes no 800 MB/s on, and both sides have the same link. Documents are bytes that do not
compress; narrow rows compress, so that encoding and decoding them has its share: it is told, without a bar.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pyarrow as pa
from botocore.config import Config

from bench.bars import bar, interleaved, median
from bench.cost import GB
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import open_stores
from persist.parts.part_files import WHOLE_BYTES_MAX
from persist.parts.read_plan import FETCH_BYTES
from tests.services.far_proxy import MB, FarProxy, far
from tests.services.process import ServerMissing
from tests.services.s3 import ACCESS_KEY, SECRET_KEY, S3Server, start_s3

BUCKET = "bench"
REQUEST_S = 0.030
APPEND_RATE, READ_RATE = 100 * MB, 25 * MB  # bytes a second of one connection
PART_BYTES = 16 * 2**20
DOCUMENT_BYTES = 1_024
SPLITS = 8
CONNECTIONS = 32
COUNTED = 16  # parts of which requests are counted
APPEND_MAX, READ_MIN, REQUESTS_MAX = 1.2, 0.8, 1.1
SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64()), ("s", pa.binary())])


@dataclass(frozen=True)
class Place:
    """A private S3 server, and where what lies beside it goes."""

    server: S3Server
    root: Path

    @contextmanager
    def client(self, name: str, endpoint: str) -> Iterator[Client]:
        blob, log = f"s3://{BUCKET}/{name}?endpoint={endpoint}", f"sqlite:///{self.root}/{name}.db"
        with Client(EmbeddedTransport(open_stores(blob, log))) as client:
            yield client


class Raw:
    """S3 by plain boto3, as whoever had no persist would call it."""

    def __init__(self, endpoint: str) -> None:
        when = "when_required"
        config = Config(
            max_pool_connections=CONNECTIONS, request_checksum_calculation=when, response_checksum_validation=when
        )
        self._client = boto3.client("s3", endpoint_url=endpoint, config=config)
        self._names = count()

    def put(self, data: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=f"raw/{next(self._names)}", Body=data)

    def get(self, name: str) -> bytes:
        data: bytes = self._client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
        return data

    def blobs(self, location: str) -> list[tuple[str, int]]:
        """The blobs of a location, and their sizes."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{location}/")
        return [(one["Key"], one["Size"]) for page in pages for one in page.get("Contents", ())]

    def parts(self, location: str) -> list[tuple[str, int]]:
        """Those of them that hold rows."""
        return [(name, size) for name, size in self.blobs(location) if name.endswith(".parquet")]

    def close(self) -> None:
        self._client.close()


def documents(number: int) -> pa.Table:
    """Rows of one part of 16 MiB, whose values do not compress; no key is in another one."""
    rows = PART_BYTES // DOCUMENT_BYTES
    random = np.random.default_rng(number)
    texts = [random.bytes(DOCUMENT_BYTES) for _ in range(rows)]
    return _table(number, texts)


def narrow(number: int) -> pa.Table:
    """Rows of a text of 32 characters each; some 5 MiB once they are encoded."""
    rows = 320_000
    first = number * rows
    texts = [hashlib.md5(b"%d" % row, usedforsecurity=False).hexdigest().encode() for row in range(first, first + rows)]
    return _table(number, texts)


def _table(number: int, texts: list[bytes]) -> pa.Table:
    first = number * len(texts)
    numbers = range(first, first + len(texts))
    return pa.table({"k": [f"{row:016d}" for row in numbers], "v": list(numbers), "s": texts}, SCHEMA)


Make = Callable[[int], pa.Table]


def appends(place: Place, rounds: int) -> None:
    """One part appended, beside one PUT of its bytes and one round trip of the log."""
    with far(place.server.port, request_s=REQUEST_S, bytes_per_s=APPEND_RATE) as endpoint:
        documents_ratio = _appended(place, endpoint, "documents", documents, rounds)
        _appended(place, endpoint, "narrow", narrow, rounds)
    bar("append of a 16 MiB part / one PUT and one consensus round trip", documents_ratio, f"<= {APPEND_MAX}")


def _appended(place: Place, endpoint: str, name: str, make: Make, rounds: int) -> float:
    tables = [make(number) for number in range(rounds + 1)]
    where = f"append-{name}"
    with place.client(where, endpoint) as client, closing(Raw(endpoint)) as raw:
        shard = client.create_shard("one", SCHEMA, ["k"])
        with closing(shard.open_writer()) as writer:
            writer.insert(tables.pop())
            [(_, size)] = raw.parts(where)
            body, turns = os.urandom(size), iter(tables)
            raw.put(body)
            log, seqnos = client.transport.location.consensus, count(1)  # type: ignore[attr-defined]
            took = interleaved(
                rounds,
                lambda: raw.put(body),
                lambda: log.compare_and_set("bench", next(seqnos), bytes(500)),
                lambda: writer.insert(next(turns)),
            )
    put, trip, ours = (median(samples) for samples in took)
    ratio = ours / (put + trip)
    told = f"put {put * 1e3:.0f} ms, log {trip * 1e3:.1f} ms, append {ours * 1e3:.0f} ms: {ratio:.2f}"
    print(f"  {name}, a part of {size / 2**20:.1f} MiB: {told}", flush=True)
    return ratio


def snapshots(place: Place, rounds: int) -> None:
    """A snapshot of eight splits, read by eight threads, beside plain GETs of its blobs by eight threads."""
    with far(place.server.port, request_s=REQUEST_S, bytes_per_s=READ_RATE) as endpoint:
        ratio = _read(place, endpoint, "documents", documents, rounds)
        _read(place, endpoint, "narrow", narrow, rounds)
    bar("snapshot of 8 splits / 8 parallel raw GETs", ratio, f">= {READ_MIN}")


def _read(place: Place, endpoint: str, name: str, make: Make, rounds: int) -> float:
    where = f"read-{name}"
    rows = _filled(place, where, make)
    with (
        place.client(where, endpoint) as client,
        closing(Raw(endpoint)) as raw,
        ThreadPoolExecutor(SPLITS) as threads,
    ):
        shard = client.shard("one")
        parts = raw.parts(where)
        size = sum(nbytes for _, nbytes in parts)

        def by_splits() -> None:
            with shard.snapshot(num_splits=SPLITS) as snapshot:
                assert sum(threads.map(lambda split: _rows(client, split), snapshot.splits)) == rows

        def at_once() -> None:
            assert shard.snapshot(num_splits=SPLITS).to_arrow().num_rows == rows

        def plain() -> None:
            assert sum(threads.map(lambda part: len(raw.get(part[0])), parts)) == size

        got, split, whole = (median(samples) for samples in interleaved(rounds, plain, by_splits, at_once))
    rates = [size / MB / seconds for seconds in (got, split, whole)]
    told = "GETs {:.0f} MB/s, splits {:.0f}, one process {:.0f}".format(*rates)
    print(f"  {name}, {len(parts)} parts, {size / 2**20:.0f} MiB: {told}: {got / split:.2f}, {got / whole:.2f}")
    return got / split


def _rows(client: Client, split: Any) -> int:
    return sum(len(table) for table in split.read(client.transport))


def _filled(place: Place, where: str, make: Make) -> int:
    """A shard of eight parts, written past the proxy: how many rows it has."""
    with place.client(where, place.server.endpoint) as client:
        shard, rows = client.create_shard("one", SCHEMA, ["k"]), 0
        with closing(shard.open_writer()) as writer:
            for number in range(SPLITS):
                table = make(number)
                rows += len(table)
                writer.insert(table)
    return rows


def requests(place: Place) -> None:
    """The requests for a GB as the proxy counts them, beside the fewest: a PUT for each blob, a GET for each 8 MiB."""
    with (
        FarProxy(place.server.port) as proxy,
        place.client("count", proxy.endpoint) as client,
        closing(Raw(place.server.endpoint)) as raw,
    ):
        shard = client.create_shard("one", SCHEMA, ["k"])
        before, there = proxy.counts(), len(raw.blobs("count"))
        with closing(shard.open_writer()) as writer:
            for number in range(COUNTED):
                writer.insert(documents(number))
        written = proxy.counts() - before
        before = proxy.counts()
        shard.snapshot(num_splits=1).to_arrow()
        read = proxy.counts() - before
        puts, parts = len(raw.blobs("count")) - there, [size for _, size in raw.parts("count")]
    size = sum(parts)
    # One for a small part; for another one its footer, and one for each 8 MiB.
    gets = sum(1 if one <= WHOLE_BYTES_MAX else 1 + max(1, one // FETCH_BYTES) for one in parts)
    print(f"  written: {written}; read: {read}; at least: {puts} PUTs, {gets} GETs", flush=True)
    for what, counts, kinds, least in (
        ("written", written, ("put", "head", "list"), puts),
        ("read", read, ("get", "head", "list"), gets),
    ):
        found = sum(counts.requests[kind] for kind in kinds)
        print(f"  a GB {what}: {found * GB / size:.0f} requests, at least {least * GB / size:.0f}")
        bar(f"requests per GB {what} / the fewest", found / least, f"<= {REQUESTS_MAX}")


@contextmanager
def served(root: Path) -> Iterator[Place]:
    """A private S3 server with its bucket."""
    server = start_s3(root)
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY, AWS_DEFAULT_REGION="us-east-1")
    try:
        with closing(boto3.client("s3", endpoint_url=server.endpoint)) as client:
            client.create_bucket(Bucket=BUCKET)
        yield Place(server, root)
    finally:
        server.stop()


def measure(root: Path, rounds: int) -> None:
    """Print the table and the bars; files go below `root`, which others may enter."""
    try:
        with served(root) as place:
            print(f"--- S3 by {place.server.kind}, {REQUEST_S * 1e3:.0f} ms a request", flush=True)
            appends(place, rounds)
            snapshots(place, rounds)
            requests(place)
    except ServerMissing as error:
        print(f"NOT MEASURED: {error}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="persist-bench-") as name:
        Path(name).chmod(0o755)
        measure(Path(name), arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
