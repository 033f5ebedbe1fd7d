"""Our stores beside the raw drivers, in one run: compare-and-set against a single-row insert, S3 against boto3.

    python -m bench.stores [--rounds N] [--only sqlite,postgres,etcd,s3]

Starts private servers as the tests do; what is not installed is named and left out. Calls alternate between
ours and the raw driver's, so that a busy machine slows both alike.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import boto3
import psycopg
from botocore.config import Config

from bench.bars import bar, interleaved, median, percentile
from blob import open_blob
from consensus import Consensus, open_consensus
from consensus.etcd_protobuf import load_etcd3
from tests.services.etcd import start_etcd
from tests.services.postgres import start_postgres
from tests.services.process import ServerMissing
from tests.services.s3 import ACCESS_KEY, SECRET_KEY, start_s3

VALUE = os.urandom(500)
TABLE = (
    "CREATE TABLE raw_log (key text NOT NULL, seqno bigint NOT NULL, data {blob} NOT NULL, PRIMARY KEY (key, seqno))"
)
S3_THREADS = 8
S3_BYTES = 256 * 1024
S3_OBJECTS = 100
S3_ROUNDS = 12


def compare_and_set(name: str, store: Consensus, insert: Callable[[int], object], rounds: int, want: str) -> bool:
    """One line of figures and one bar: p50 of our compare-and-set over p50 of the driver's insert."""
    store.check()
    seqnos = {"ours": 0, "raw": 0}

    def ours() -> None:
        seqnos["ours"] += 1
        assert store.compare_and_set("bench", seqnos["ours"], VALUE)

    def raw() -> None:
        seqnos["raw"] += 1
        insert(seqnos["raw"])

    interleaved(50, raw, ours)
    raw_s, ours_s = interleaved(rounds, raw, ours)
    figures = (f"{median(each) * 1e3:.3f}/{percentile(each, 0.95) * 1e3:.3f}" for each in (raw_s, ours_s))
    print(f"{name}: p50/p95 ms of {rounds}: raw driver {next(figures)}, ours {next(figures)}")
    return bar(f"{name} compare-and-set / raw insert", median(ours_s) / median(raw_s), want)


def sqlite(directory: Path, rounds: int) -> bool:
    with closing(sqlite3.connect(directory / "raw.db", isolation_level=None)) as raw:
        raw.execute("PRAGMA journal_mode = WAL")
        raw.execute("PRAGMA synchronous = FULL")
        raw.execute(TABLE.format(blob="blob"))
        insert = "INSERT INTO raw_log VALUES (?, ?, ?)"
        with closing(open_consensus(f"sqlite:///{directory}/ours.db")) as store:
            return compare_and_set(
                "sqlite", store, lambda seqno: raw.execute(insert, ("bench", seqno, VALUE)), rounds, "<= 1.3"
            )


def postgres(directory: Path, rounds: int) -> bool:
    server = start_postgres(directory / "postgres")
    try:
        with psycopg.connect(server.url(), autocommit=True) as raw, closing(open_consensus(server.url())) as store:
            raw.execute(TABLE.format(blob="bytea"))
            insert = "INSERT INTO raw_log VALUES (%s, %s, %s)"
            return compare_and_set(
                "postgresql", store, lambda seqno: raw.execute(insert, ("bench", seqno, VALUE)), rounds, "<= 1.3"
            )
    finally:
        server.stop()


def etcd(directory: Path, rounds: int) -> bool:
    cluster = start_etcd(directory / "etcd", 1)
    try:
        raw = load_etcd3().client(port=cluster.ports[0])
        with closing(raw), closing(open_consensus(cluster.url("bench"))) as store:
            return compare_and_set(
                "etcd", store, lambda seqno: raw.put(f"/raw/bench/{seqno:020d}", VALUE), rounds, "<= 1.5"
            )
    finally:
        cluster.stop()


def s3(directory: Path, rounds: int) -> bool:
    del rounds
    server = start_s3(directory / "s3")
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY, AWS_DEFAULT_REGION="us-east-1")
    try:
        config = Config(max_pool_connections=32, signature_version="s3v4", s3={"addressing_style": "path"})
        raw = boto3.client("s3", endpoint_url=server.endpoint, config=config)
        raw.create_bucket(Bucket="bench")
        with closing(open_blob(f"s3://bench/ours?endpoint={server.endpoint}")) as ours, closing(raw):
            return _s3_throughput(server.kind, raw, ours)
    finally:
        server.stop()


def _s3_throughput(kind: str, raw: Any, ours: Any) -> bool:
    body = os.urandom(S3_BYTES)
    rates: dict[str, list[float]] = {"raw put": [], "ours put": [], "raw get": [], "ours get": []}
    with ThreadPoolExecutor(S3_THREADS) as threads:

        def rate(call: Callable[[str], object], number: int) -> float:
            keys = [f"{number}/{index}" for index in range(S3_OBJECTS)]
            started = time.perf_counter()
            list(threads.map(call, keys))
            return S3_OBJECTS * S3_BYTES / 2**20 / (time.perf_counter() - started)

        calls: dict[str, Callable[[str], object]] = {
            "raw put": lambda key: raw.put_object(Bucket="bench", Key=f"raw/{key}", Body=body),
            "ours put": lambda key: ours.put(key, body),
            "raw get": lambda key: raw.get_object(Bucket="bench", Key=f"raw/{key}")["Body"].read(),
            "ours get": ours.get,
        }
        for number in range(S3_ROUNDS + 1):
            # Puts before gets, and who goes first changes from round to round.
            order = sorted(calls, key=lambda name: ("get" in name, ("raw" in name) == bool(number % 2)))
            measured = {name: rate(calls[name], number) for name in order}
            if number:
                for name, value in measured.items():
                    rates[name].append(value)
    print(f"s3 ({kind}), {S3_THREADS} threads, {S3_BYTES // 1024} KiB, median MiB/s of {S3_ROUNDS} rounds:", end=" ")
    print(", ".join(f"{name} {median(each):.0f}" for name, each in rates.items()))
    put = bar("s3 put throughput / boto3", _ratio(rates["ours put"], rates["raw put"]), ">= 0.9")
    get = bar("s3 get throughput / boto3", _ratio(rates["ours get"], rates["raw get"]), ">= 0.9")
    return put and get


def _ratio(ours: list[float], raw: list[float]) -> float:
    """The median of the rounds' ratios: neighbours in time share what else the machine does."""
    return median([mine / theirs for mine, theirs in zip(ours, raw, strict=True)])


PARTS: dict[str, Callable[[Path, int], bool]] = {"sqlite": sqlite, "postgres": postgres, "etcd": etcd, "s3": s3}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1500, help="calls per store and side")
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated: sqlite, postgres, etcd, s3")
    arguments = parser.parse_args()
    missing = 0
    with tempfile.TemporaryDirectory(prefix="persist-bench-") as name:
        Path(name).chmod(0o755)
        for part in arguments.only.split(","):
            try:
                PARTS[part](Path(name), arguments.rounds)
            except ServerMissing as error:
                missing += 1
                print(f"{part}: NOT MEASURED: {error}")
    if missing:
        print(f"{missing} stores were not measured", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
