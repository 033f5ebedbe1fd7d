"""What it costs on S3: appends of 100 rows, one Spark write, a day on which nobody does anything; beside peers.

    python -m bench.cost [--only appends,spark,idle] [--appends 2000] [--spark-rows 1000000]
                         [--shards 10000] [--idle-seconds 600] [--endpoint http://HOST:PORT --bucket NAME]

A proxy stands before an S3 server and counts what passes: a private server as the tests start it, or that of
`--endpoint`, whose keys are in the environment. Ours is `persist serve` with its maintenance, over S3 and SQLite, and a
client of it. Requests are priced as S3 Standard's (`S3_STANDARD`). S3 prices no log store, so what ours costs is not in
the figures: the number of commits is printed. deltalake and SlateDB have their logs in S3.

What is said of 1 GB or of a day is extrapolated from what was measured; a line says from how much.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import pyarrow as pa

import persist
from bench.bars import bar
from bench.cost_peers import Delta, Slate
from compactor.metering import MaintenanceMetrics
from compactor.scrubber import SAMPLES, Scrubber
from consensus import open_consensus
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import open_stores
from tests.services.metering_proxy import Counts, MeteringProxy
from tests.services.process import ServerMissing
from tests.services.s3 import ACCESS_KEY, SECRET_KEY, start_s3

ROWS = 100
SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64()), ("s", pa.string())])
GB = 2**30  # bytes, as S3 bills them
DAY_S, YEAR_DAYS, YEAR_MONTHS = 86_400, 365, 12
BUDGET_USD = 100.0  # a year
SETTLE_S = 60.0  # that maintenance has after the last write
LOOK_S = 5.0
QUIET_LOOKS, QUIET_REQUESTS = 6, 10  # so many looks one after the other with so few requests: it has settled
CREATORS = 8
SLATE_IDLE_S = 120.0
SPARK_TASKS = 8
IDLE_USD_MAX = 1.0


@dataclass(frozen=True)
class Prices:
    """US dollars for 1,000 requests of a kind, and for 1 GB kept for a month. Traffic within a region is free."""

    put: float
    list: float
    get: float
    delete: float
    gb_month: float

    def requests(self, kind: str, count: int) -> float:
        """`kind` is `put`, `list`, `get` or `delete`."""
        each: float = getattr(self, kind)
        return count * each / 1_000

    def month(self, size: int) -> float:
        """So many bytes kept for a month."""
        return size / GB * self.gb_month


S3_STANDARD = Prices(put=0.005, list=0.005, get=0.0004, delete=0.0, gb_month=0.023)  # us-east-1, first 50 TB a month


@dataclass(frozen=True)
class Place:
    """An S3 server, and a bucket there for one run."""

    host: str
    port: int
    bucket: str
    root: Path

    def proxy(self) -> MeteringProxy:
        return MeteringProxy(self.port, host=self.host)


class Ours:
    """`persist serve` with its maintenance, behind a proxy."""

    def __init__(self, place: Place, proxy: MeteringProxy, name: str, sample: str = "1%") -> None:
        self.blob = f"s3://{place.bucket}/{name}?endpoint={proxy.endpoint}"
        self.consensus = f"sqlite:///{place.root}/{name}.db"
        self.direct = f"s3://{place.bucket}/{name}?endpoint=http://{place.host}:{place.port}"
        stores = ["--blob", self.blob, "--consensus", self.consensus]
        os.environ["AWS_ENDPOINT_URL_S3"] = proxy.endpoint  # clients here open the bucket themselves
        command = [sys.executable, "-m", "rpc.cli", "serve", "--port", "0", *stores]
        self._log = (place.root / f"{name}.log").open("wb")
        environment = {**os.environ, "PERSIST_VERIFY_SAMPLE": sample}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, env=environment)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().decode().strip()
        assert self.url, f"the server did not start: {(place.root / f'{name}.log').read_text()[-500:]}"

    def check_sample(self) -> None:
        """Check a sample of the parts, as maintenance does once a day."""
        with closing(open_stores(self.blob, self.consensus)) as location:
            scrubber = Scrubber(
                location, MaintenanceMetrics(), location.all_names, of=SAMPLES, rate=8 << 20, first_after_s=0.0
            )
            assert scrubber.once()

    def close(self) -> None:
        os.environ.pop("AWS_ENDPOINT_URL_S3", None)
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


def dollars(counts: Counts) -> float:
    """What these requests cost by S3 Standard's prices; traffic within a region is free."""
    prices, asked = S3_STANDARD, counts.requests
    gets = prices.requests("get", asked["get"] + asked["head"])
    return prices.requests("put", asked["put"]) + prices.requests("list", asked["list"]) + gets


def budget(gb_written: float) -> str:
    """What 100 dollars a year buy, where a GB costs so much to write."""
    kept = BUDGET_USD / (S3_STANDARD.gb_month * YEAR_MONTHS)
    puts = BUDGET_USD / S3_STANDARD.requests("put", 1)
    return f"{kept:,.0f} GB kept, or {puts:,.0f} PUTs, or {BUDGET_USD / gb_written:,.0f} GB written like this"


def rows(number: int, count: int = ROWS) -> pa.Table:
    """The rows of one append: keys that no other has, and texts that do not compress away."""
    keys = range(number * count, (number + 1) * count)
    texts = [hashlib.md5(str(key).encode(), usedforsecurity=False).hexdigest() for key in keys]
    return pa.table({"k": [f"{key:016d}" for key in keys], "v": list(keys), "s": texts}, SCHEMA)


def settle(proxy: MeteringProxy, seconds: float) -> bool:
    """Wait until there were few requests for a while, or so long; whether there were."""
    end = time.monotonic() + seconds
    quiet, before = 0, proxy.counts()
    while time.monotonic() < end and quiet < QUIET_LOOKS:
        time.sleep(LOOK_S)
        now = proxy.counts()
        quiet = quiet + 1 if (now - before).requests.total() <= QUIET_REQUESTS else 0
        before = now
    return quiet >= QUIET_LOOKS


def per_gb(name: str, counts: Counts, size: int, seconds: float | None = None) -> float:
    """Dollars for a GB of rows as Arrow has them, extrapolated; a line says of what."""
    cost = dollars(counts)
    found = cost / size * GB
    took = "" if seconds is None else f" in {seconds:.0f} s"
    print(
        f"  {name}: {counts}{took}: ${cost:.5f} for {size / 2**20:.1f} MiB, ${found:.3f} a GB (extrapolated)",
        flush=True,
    )
    return found


def appends(place: Place, arguments: argparse.Namespace) -> None:
    """Appends of 100 rows, one after the other, each durable before the next one."""
    count = arguments.appends
    tables = [rows(number) for number in range(count)]
    size = sum(table.nbytes for table in tables)
    print(f"{count} appends of {ROWS} rows, {size:,} bytes of Arrow")
    ours = _our_appends(place, tables, size)
    with place.proxy() as proxy:
        delta, start = Delta(proxy, place.bucket, "delta"), time.monotonic()
        found = delta.appended(tables)
        theirs = per_gb("deltalake", found, size, time.monotonic() - start)
        per_gb("its compaction besides, once at the end (not in the ratio)", delta.compacted(), size)
    with place.proxy() as proxy:
        start = time.monotonic()
        found = Slate(proxy, place.bucket, "slate").put([_bytes(table) for table in tables])
        slate = per_gb("SlateDB, a put of the rows and a flush each", found, size, time.monotonic() - start)
    bar("cost.gb_by_appends_usd", ours, f"<= {theirs:.3f}")
    bar("cost.gb_by_appends_vs_deltalake", ours / theirs, "<= 1")
    bar("cost.gb_by_appends_vs_slatedb", ours / slate, "<= 1")


def _our_appends(place: Place, tables: list[pa.Table], size: int) -> float:
    with place.proxy() as proxy, closing(Ours(place, proxy, "appends")) as server:
        with persist.connect(server.url) as client:
            shard = client.create_shard("one", SCHEMA, ["k"])
            before, start = proxy.counts(), time.monotonic()
            for table in tables:
                shard.insert(table)
            took = time.monotonic() - start
            during = proxy.counts() - before
            settle(proxy, SETTLE_S)
            counts = proxy.counts() - before
        per_gb("persist, until the last append", during, size, took)
        found = per_gb("persist, with all its maintenance after it", counts, size, time.monotonic() - start)
        with closing(open_consensus(server.consensus)) as log:
            head = log.head("one")
        assert head is not None
    print(f"  {head.seqno} commits to the log store are not priced", flush=True)
    print(f"  ${BUDGET_USD:.0f} a year buy {budget(found)}", flush=True)
    return found


def _bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def spark(place: Place, arguments: argparse.Namespace) -> None:
    """One write by a Spark job of eight tasks."""
    from pyspark.sql import SparkSession

    count = arguments.spark_rows
    whole = rows(0, count)
    print(f"one write of {count:,} rows, {whole.nbytes:,} bytes of Arrow")
    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        session.sparkContext.setLogLevel("ERROR")
        columns = ("lpad(id, 16, '0') k", "id v", "md5(cast(id AS string)) s")
        frame = session.range(0, count, 1, SPARK_TASKS).selectExpr(*columns)
        with place.proxy() as proxy, closing(Ours(place, proxy, "spark")) as server:
            before, start = proxy.counts(), time.monotonic()
            frame.write.format("persist").options(url=server.url, key="k").mode("append").save("one")
            took = time.monotonic() - start
            settle(proxy, SETTLE_S)
            ours = per_gb("persist, with its maintenance", proxy.counts() - before, whole.nbytes, took)
    finally:
        session.stop()
    with place.proxy() as proxy:
        start = time.monotonic()
        found = Delta(proxy, place.bucket, "delta-whole").appended([whole])
        theirs = per_gb("deltalake, one write without Spark", found, whole.nbytes, time.monotonic() - start)
    bar("cost.gb_by_spark_usd", ours, f"<= {S3_STANDARD.gb_month}")  # what keeping it for a month costs
    print(f"  {ours / theirs:.2f} times deltalake's")


def idle(place: Place, arguments: argparse.Namespace) -> None:
    """Shards that were written to once, with maintenance running; then nobody does anything.

    Maintenance verifies a sample of everything once a day. That is counted by itself, and once: a window of minutes
    that holds it would be taken for a day full of samples.
    """
    count, seconds = arguments.shards, arguments.idle_seconds
    print(f"{count:,} shards, idle for {seconds:.0f} s (a day is extrapolated: times {DAY_S / seconds:.0f})")
    start = time.monotonic()
    stores = (f"s3://{place.bucket}/idle?endpoint=http://{place.host}:{place.port}", f"sqlite:///{place.root}/idle.db")
    with Client(EmbeddedTransport(open_stores(*stores))) as client, ThreadPoolExecutor(CREATORS) as threads:
        list(threads.map(lambda number: _made(client, number), range(count)))
    print(f"  made in {time.monotonic() - start:.0f} s, past the proxy", flush=True)
    with place.proxy() as proxy, closing(Ours(place, proxy, "idle", sample="0")) as server:
        has = "has settled" if settle(proxy, arguments.settle_seconds) else "HAS NOT SETTLED"
        settled = proxy.counts()
        print(f"  it {has} after {time.monotonic() - start:.0f} s: {settled}: ${dollars(settled):.3f}", flush=True)
        time.sleep(seconds)
        ours = _day(f"persist, {count:,} shards", proxy.counts() - settled, seconds)
        before, start = proxy.counts(), time.monotonic()
        server.check_sample()
        sample = proxy.counts() - before
        ours += dollars(sample)
        print(f"  its sample of a day, once: {sample} in {time.monotonic() - start:.0f} s: ${dollars(sample):.4f}")
        print(f"  together ${ours:.4f} a day", flush=True)
    theirs_s = min(seconds, SLATE_IDLE_S)
    with place.proxy() as proxy:
        slate = _day("SlateDB, one open database", Slate(proxy, place.bucket, "idle-slate").idle(theirs_s), theirs_s)
    print("  deltalake: no process, no request")
    bar(f"cost.idle_day_of_{count}_shards_usd", ours, f"<= {IDLE_USD_MAX:g}")
    bar("cost.idle_day_of_a_shard_vs_a_slatedb_database", ours / count / slate, "<= 1")


def _made(client: Client, number: int) -> None:
    client.create_shard(f"s{number:06}", SCHEMA, ["k"]).insert(rows(number, 1))


def _day(name: str, counts: Counts, seconds: float) -> float:
    day = dollars(counts) * DAY_S / seconds
    told = f"${day:.4f} a day, ${day * YEAR_DAYS:.2f} a year (extrapolated)"
    print(f"  {name}: {counts} in {seconds:.0f} s: {told}", flush=True)
    return day


PARTS: dict[str, Callable[[Place, argparse.Namespace], None]] = {"appends": appends, "spark": spark, "idle": idle}


@contextmanager
def served(arguments: argparse.Namespace, root: Path) -> Iterator[Place]:
    """The S3 server that is given, or a private one."""
    if arguments.endpoint:
        where = urlsplit(arguments.endpoint)
        assert where.hostname is not None
        os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
        yield Place(where.hostname, where.port or 80, arguments.bucket, root)
        return
    server = start_s3(root / "s3")
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY, AWS_DEFAULT_REGION="us-east-1")
    try:
        with closing(boto3.client("s3", endpoint_url=server.endpoint)) as client:
            client.create_bucket(Bucket=arguments.bucket)
        print(f"a private {server.kind}")
        yield Place("127.0.0.1", server.port, arguments.bucket, root)
    finally:
        server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated: appends, spark, idle")
    parser.add_argument("--appends", type=int, default=2_000)
    parser.add_argument("--spark-rows", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--idle-seconds", type=float, default=600.0)
    parser.add_argument("--settle-seconds", type=float, default=1_800.0, help="that shards have to settle at most")
    parser.add_argument("--endpoint", help="an S3 server without TLS, in the place of a private one")
    parser.add_argument("--bucket", default="bench", help="its bucket, which has to be there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="persist-bench-") as name:
        root = Path(name)
        root.chmod(0o755)
        try:
            with served(arguments, root) as place:
                for part in arguments.only.split(","):
                    print(f"--- {part}", flush=True)
                    PARTS[part](place, arguments)
        except ServerMissing as error:
            print(f"NOT MEASURED: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
