"""Two threads of Spark jobs and two Python writers on one shard, in a real session: as if one ran after the other."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import functions as F  # noqa: N812

import persist
from persist.client.merge import source, target
from persist.client.shard import Shard
from persist.core.errors import UpperMismatch
from persist.spark import ShardTable
from persist.spark.write_job import Written
from tests.support.examples import seeds
from tests.support.table_model import COLUMNS, GIVEN, KEY, VERBS, Story, Verb, contents, options, replace_where

pytestmark = pytest.mark.spark

NAME = "table"
DDL = "k bigint, a bigint, b string"
OF_SPARK = tuple(verb for verb in VERBS if verb is not replace_where)  # ShardTable has no such verb
SEEDS = range(2)
PROOF_SEEDS = seeds(10)
CALLS_MAX = 12  # of each Python writer in a story
SQL = {  # what the verbs of the model compute, as Spark has it
    str(pc.field("a") + 1): "a + 1",
    str(source("a") + target("a")): "source.a + target.a",
    str(source("b")): "source.b",
    str(target("a") < source("a")): "target.a < source.a",
}
Row = dict[str, Any]


class SparkShard:
    """A `Shard` by its looks, as the verbs of the model call it, whose calls are Spark jobs."""

    def __init__(self, spark: Any, url: str) -> None:
        self._spark = spark
        self.table = ShardTable.for_name(spark, NAME, url=url)

    def insert(self, table: pa.Table, **given: Any) -> Any:
        return self.table.append(self._frame(table.to_pylist()), **given)

    def upsert(self, rows: list[Row], delete_column: str | None = None, **given: Any) -> Any:
        return self.table.upsert(self._frame(rows, delete_column), delete_column=delete_column, **given)

    def overwrite(self, table: pa.Table, **given: Any) -> Any:
        return self.table.overwrite(self._frame(table.to_pylist()), **given)

    def delete(self, where: str | None = None, *, keys: list[int] | None = None) -> Any:
        return self.table.delete(where or f"k IN ({', '.join(map(str, keys or ()))})")

    def update(self, sets: Row, where: str) -> Any:
        return self.table.update(where, {name: _sql(value) for name, value in sets.items()})

    def merge(self, rows: list[Row]) -> _Merging:
        return _Merging(self.table.merge(self._frame(rows)))

    def _frame(self, rows: list[Row], flag: str | None = None) -> Any:
        names = [*COLUMNS.names, *([flag] if flag else [])]
        ddl = DDL + (f", {flag} boolean" if flag else "")
        return self._spark.createDataFrame([tuple(row[name] for name in names) for row in rows], ddl)


@dataclass(frozen=True)
class _Merging:
    """A merge of which values and conditions come as Python has them."""

    inner: Any

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.inner, name)

        def called(*given: Any) -> Any:
            values = [one if not isinstance(one, dict) else {k: _sql(v) for k, v in one.items()} for one in given]
            return _Merging(method(*(SQL[str(one)] if isinstance(one, pc.Expression) else one for one in values)))

        return method if name == "execute" else called


def _sql(value: Any) -> Any:
    return SQL[str(value)] if isinstance(value, pc.Expression) else F.lit(value)


@dataclass(frozen=True)
class Called:
    """What a call came to: the time that it took, or, where it changed nothing, the uppers between which it did so."""

    verb: Verb
    time: int | None
    first: int
    last: int


class Rivals:
    """One story. Whoever runs jobs lets the writers go on in the middle of them: between a read and its write."""

    def __init__(self, spark: Any, url: str, seed: int) -> None:
        self._spark, self._url, self._seed = spark, url, seed
        self._turns = threading.Semaphore(2)
        self._over = threading.Event()
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Raises AssertionError where the table differs from the serial model at any time."""
        whole = ShardTable._write

        def write(table: ShardTable, *given: Any) -> Any:
            self.counts["tries"] += 1
            self._turns.release()
            return whole(table, *given)

        with persist.connect(self._url) as client, mock.patch.object(ShardTable, "_write", write):
            shard = client.create_shard(NAME, COLUMNS, KEY)
            with ThreadPoolExecutor(4) as pool:
                writers = [pool.submit(self._calls, number) for number in range(2)]
                jobs = [pool.submit(self._jobs, number) for number in range(2)]
                try:
                    told = [one for job in jobs for one in job.result()]
                finally:
                    self._over.set()
                    self._turns.release(len(writers))
                told += [one for writer in writers for one in writer.result()]
            story = Story()
            for one in told:
                if one.time is None:
                    story.idled(one.verb, one.first, one.last)
                else:
                    story.landed(one.verb, one.time)
            story.check(lambda time: contents(shard, time), _upper(shard))

    def _calls(self, number: int) -> list[Called]:
        """What a Python writer does: a call a turn."""
        rng, told = random.Random(f"{self._seed} python {number}"), []
        with persist.connect(self._url) as client:  # each of its own: inserts of one process may share a time
            shard = client.shard(NAME)
            for _ in range(CALLS_MAX):
                self._turns.acquire()
                if self._over.is_set():
                    break
                verb = rng.choice(VERBS)(rng)
                told += self._called(shard, shard, verb, options(rng, shard, verb, client.new_token))
        return told

    def _jobs(self, number: int) -> list[Called]:
        """What a program does that runs Spark jobs."""
        rng, told = random.Random(f"{self._seed} spark {number}"), []
        jobs = SparkShard(self._spark, self._url)
        with persist.connect(self._url) as client:
            for version in range(rng.randrange(1, 3)):
                make, chosen = rng.choice(OF_SPARK), {}
                if make in GIVEN and rng.random() < 0.4:
                    chosen["read_time"] = jobs.table.read().as_of
                if make in GIVEN and rng.random() < 0.4:
                    chosen["txn"] = (f"program {number}", version)
                verb = make(rng)
                told += self._called(client.shard(NAME), jobs, verb, chosen)
                if told and told[-1].verb is verb and "txn" in chosen:  # its user runs it again
                    again = verb.run(jobs, chosen)  # type: ignore[arg-type]
                    assert again.skipped
                    assert again.time == told[-1].time
        return told

    def _called(self, shard: Shard, callee: Any, verb: Verb, chosen: dict[str, Any]) -> list[Called]:
        first, read_time = _upper(shard), chosen.get("read_time")
        self.counts["calls"] += 1
        try:
            done = verb.run(callee, chosen)
        except UpperMismatch:
            assert read_time is None or _upper(shard) != read_time + 1, "nobody has written"
            assert read_time is not None or isinstance(callee, SparkShard), "only jobs give up"
            self.counts["refused"] += 1
            return []
        self.counts["retries"] += getattr(done, "retries", 0)
        time = done.time if isinstance(done, Written) else _time_of(done)
        assert read_time is None or time in (None, read_time + 1)
        return [Called(verb, time, first, _upper(shard))]


def _time_of(done: Any) -> int | None:
    return None if done.lower == done.upper else done.lower.element


def _upper(shard: Shard) -> int:
    upper = shard.upper().element
    assert upper is not None
    return upper


@pytest.mark.parametrize("seed", SEEDS)
def test_jobs_and_writers_are_as_if_each_had_run_alone_at_its_time(spark: Any, url: str, seed: int) -> None:
    Rivals(spark, url, seed).run()


@pytest.mark.proof
def test_jobs_and_writers_are_as_if_each_had_run_alone_in_many_stories(spark: Any, tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    for seed in PROOF_SEEDS:
        story = Rivals(spark, f"persist://{tmp_path}/{seed}", seed)
        story.run()
        found += story.counts
    assert found["refused"] + found["retries"], found
