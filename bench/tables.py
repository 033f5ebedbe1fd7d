"""Verbs of tables beside deltalake's: upserts of few keys, a delete, a point lookup; and an overwrite by Spark.

PyIceberg does the delete and the lookup too.

    python -m bench.tables [--rows 10000000] [--rounds 3] [--only stretches random delete lookup overwrite]

A shard, a Delta and an Iceberg table have the same `--rows` rows in key order, in files, on one disk; the shard was
compacted. A verb runs on each in turns, each time with new values, and the ratio of the medians is told.
`stretches`: 1,000 keys in five stretches; what the upsert reads of the shard is told too. `random`: 1,000 keys at
random, in one process, and by a Spark job of eight tasks, of which it is told how often a row group is read. `delete`:
1 percent of the rows by a predicate. `lookup`: one key. `overwrite`: all rows by Spark, beside the plain append of the
same rows.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import persist
from bench.bars import bar, timed
from bench.service_peers import IcebergPeer
from compactor.worker import Worker, WorkerSettings
from persist.client.shard import Shard
from persist.commit.location import LocationSettings, open_location
from persist.parts.part_files import PartFiles

Fetched = dict[tuple[str, int], tuple[int, int]]
SCHEMA = pa.schema([("id", pa.int64()), ("day", pa.int32()), ("amount", pa.int64()), ("note", pa.string())])
CHUNK = 1_000_000
KEYS = 1_000
STRETCHES = 5
TASKS = 8
WAYS = ["stretches", "random", "delete", "lookup", "overwrite"]


def rows(start: int, count: int, seed: int = 0) -> pa.Table:
    """Rows of consecutive keys; the values depend on the seed."""
    ids = pa.array(range(start, start + count), pa.int64())
    amounts = pc.bit_wise_and(pc.multiply(ids, 2_654_435_761 + 2 * seed), 0xFFFFF)
    days = pc.cast(pc.divide(ids, 1_000), pa.int32())
    notes = pc.binary_join_element_wise("note ", pc.cast(amounts, pa.string()), "")
    return pa.Table.from_arrays([ids, days, amounts, notes], schema=SCHEMA)


def some(keys: list[int], seed: int) -> pa.Table:
    """Rows of these keys with new values."""
    whole = [rows(key, 1, seed) for key in keys]
    return pa.concat_tables(whole).combine_chunks()


@contextmanager
def reading() -> Iterator[Fetched]:
    """Which bytes of parts are read: (part, where) -> (how often, how many)."""
    found: Fetched = {}
    real = PartFiles.fetch

    def fetch(self: PartFiles, part: Any, start: int, length: int) -> bytes:
        if start + length < part.size:  # no footer
            times = found.get((str(part.id), start), (0, 0))[0]
            found[str(part.id), start] = times + 1, length
        return real(self, part, start, length)

    PartFiles.fetch = fetch  # type: ignore[method-assign]
    try:
        yield found
    finally:
        PartFiles.fetch = real  # type: ignore[method-assign]


class Tables:
    """The shard, the Delta and the Iceberg table."""

    def __init__(self, root: Path, count: int) -> None:
        import deltalake

        self.count, self.root = count, root
        self.url = f"persist://{root}/shard"
        self.client = persist.connect(self.url)
        self.shard: Shard = self.client.create_shard("table", SCHEMA, ["id"])
        self.path = str(root / "delta")
        self.iceberg = IcebergPeer(root / "iceberg", SCHEMA)
        for start in range(0, count, CHUNK):
            table = rows(start, min(CHUNK, count - start))
            self.shard.insert(table)
            deltalake.write_deltalake(self.path, table, mode="append")
            self.iceberg.append(table)
        compact(self.url)
        self.delta = deltalake.DeltaTable(self.path)

    def merge(self, source: pa.Table) -> None:
        merged = self.delta.merge(source, "t.id = s.id", source_alias="s", target_alias="t")
        merged.when_matched_update_all().when_not_matched_insert_all().execute()

    def compare(self, name: str, turns: list[tuple[Any, ...]], bound: str) -> None:
        """Run ours, deltalake's and perhaps PyIceberg's in turns; the ratio of the medians of the first two."""
        found = [median(times) for times in zip(*([timed(one) for one in turn] for turn in turns), strict=True)]
        told = zip(("persist", "deltalake", "pyiceberg"), found, strict=False)
        print(f"{name}: {', '.join(f'{who} {seconds:.3f} s' for who, seconds in told)}", flush=True)
        bar(f"{name} / deltalake", found[0] / found[1], bound)


def compact(url: str) -> None:
    """Merge all that is worth it, as maintenance does."""
    with closing(open_location(url, settings=LocationSettings())) as location:
        while Worker(location, WorkerSettings()).run("table", idle=True):
            pass


def stretches(both: Tables, rounds: int) -> None:
    sets = []
    for number in range(rounds + 1):
        starts = [number * 1_000 + both.count * stretch // STRETCHES for stretch in range(STRETCHES)]
        keys = [start + n for start in starts for n in range(KEYS // STRETCHES)]
        sets.append(some(keys, number + 1))
    size = next(iter(both.client.summaries("table"))).bytes
    with reading() as found:
        both.shard.upsert(sets[0])
    bar("bytes read by an upsert of 5 stretches / the shard", sum(size for _, size in found.values()) / size, "<= 0.05")
    both.merge(sets[0])
    pairs = [(lambda t=t: both.shard.upsert(t), lambda t=t: both.merge(t)) for t in sets[1:]]
    both.compare("upsert of 1,000 keys in 5 stretches", pairs, "<= 0.5")


def at_random(both: Tables, rounds: int) -> None:
    rng = random.Random(7)
    sets = [some(sorted(rng.sample(range(both.count), KEYS)), 100 + number) for number in range(rounds + 2)]
    with reading() as found:
        both.shard.upsert(sets[0])
    bar("times that an upsert reads a row group", max(times for times, _ in found.values()), "<= 1")
    bar(f"times that an upsert by Spark in {TASKS} tasks reads a row group", by_tasks(both, sets[1]), "<= 1")
    pairs = [(lambda t=t: both.shard.upsert(t), lambda t=t: both.merge(t)) for t in sets[2:]]
    both.compare("upsert of 1,000 random keys", pairs, "<= 1.0")


def by_tasks(both: Tables, source: pa.Table) -> int:
    """The classes that Spark calls, with the rows of each task."""
    from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

    from persist.spark.source import PersistDataSource

    kinds = {"id": LongType(), "day": IntegerType(), "amount": LongType(), "note": StringType()}
    schema = StructType([StructField(name, kind) for name, kind in kinds.items()])
    options = {"url": both.url, "path": "table", "envelope": "upsert"}
    writer = PersistDataSource(options).writer(schema, False)
    order = list(range(len(source)))
    random.Random(3).shuffle(order)
    with reading() as found:
        messages = [writer.write(iter(source.take(order[n::TASKS]).to_batches())) for n in range(TASKS)]
        writer.commit(messages)
    return max(times for times, _ in found.values())


def delete(both: Tables, rounds: int) -> None:
    width = both.count // 100 // 1_000  # days of 1,000 rows
    spans = [f"day >= {(7 * n + 3) * width} AND day < {(7 * n + 4) * width}" for n in range(rounds)]
    turns = [
        (lambda w=w: both.shard.delete(w), lambda w=w: both.delta.delete(w), lambda w=w: both.iceberg.delete(w))
        for w in spans
    ]
    both.compare("delete of 1 percent by a predicate", turns, "<= 1.0")


def lookup(both: Tables, rounds: int) -> None:
    rng = random.Random(11)
    keys = [rng.randrange(both.count) for _ in range(5 * rounds)]

    def theirs(key: int) -> Any:
        return both.delta.to_pyarrow_dataset().to_table(filter=pc.field("id") == key)

    turns = [
        (lambda k=k: both.shard.get(k), lambda k=k: theirs(k), lambda k=k: both.iceberg.read(f"id = {k}")) for k in keys
    ]
    both.compare("point lookup", turns, "<= 0.2")


def overwrite(both: Tables, rounds: int) -> None:
    """A DataFrame that is cached, appended to new shards and written over a full one, in turns."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        spark.sparkContext.setLogLevel("ERROR")
        frame = spark.range(both.count).selectExpr(
            "id", "cast(id div 1000 as int) day", "id * 7919 % 1000003 amount", "concat('note ', id % 1000003) note"
        )
        url = f"persist://{both.root}/spark"

        def save(name: str, mode: str) -> float:
            write = frame.write.format("persist").options(url=url, key="id").mode(mode)
            return timed(lambda: write.save(name))

        save("full", "append")
        appends = [save(f"fresh-{number}", "append") for number in range(rounds)]
        overwrites = [save("full", "overwrite") for _ in range(rounds)]
        print(f"Spark: append {median(appends):.1f} s, overwrite {median(overwrites):.1f} s", flush=True)
        bar("overwrite by Spark / the plain append", median(overwrites) / median(appends), "<= 1.3")
    finally:
        spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=WAYS, choices=WAYS)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="persist-bench-"))
    try:
        both = Tables(root, args.rows)
        for name, way in zip(WAYS, (stretches, at_random, delete, lookup, overwrite), strict=True):
            if name in args.only:
                way(both, args.rounds)
        both.client.close()
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
