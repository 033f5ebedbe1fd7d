"""Two programs that run Spark jobs, and two Python writers, on one table: what they do, and what has to be true of it.

The store hears each commit, whoever hears its answer. So it is known of each run of a job whether it landed, and when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any
from unittest import mock

import pyarrow as pa

from persist.client.connect import Connection
from persist.client.transport import Transport
from persist.core.errors import Indeterminate, UpperMismatch
from persist.parts import DIFF
from persist.spark import executors, upsert
from persist.spark.shard_table import ShardTable
from persist.spark.spark_schemas import spark_schema
from tests.support.rivals import DEPTH_MAX, NAME, Interrupted, PythonWriter, Rival, Rivals
from tests.support.spark_session import ABANDONED, DONE, REFUSED, Frame, Job, JobLost, Session
from tests.support.table_model import COLUMNS, GIVEN, VERBS, Bag, Verb, contents
from tests.support.without_jvm import read

APPLICATIONS = ("nightly", "hourly")
RERUNS_MAX = 3
# Bounds that a small table never meets. Without drops an overwrite reads what was there; with no row being dense the
# commit retracts it; and a task whose chunks are small claims keys several times.
SMALL = {"DENSE_ROWS": 0, "CHUNK_BYTES": 1, "KEYS_AT_ONCE": 1, "may_replace_all": lambda view: False}
BETWEEN_STEPS = 0.07  # of a job: how often somebody comes
Row = dict[str, Any]


class SparkRivals(Rivals):
    """Use it as a context: within it `executors.transport` leads to the table in memory."""

    def __init__(self, seed: int) -> None:
        self.retries = self.skipped = 0
        self.reads: list[tuple[int, Bag]] = []
        self.skips: list[tuple[str, int]] = []
        self._ways: dict[str, Transport] = {}
        self._patches = ExitStack()
        super().__init__(seed)

    def __enter__(self) -> SparkRivals:
        self._patches.enter_context(mock.patch.object(executors, "transport", self._reach))
        for name, small in SMALL.items():
            if self.rng.random() < 0.3:
                self._patches.enter_context(mock.patch.object(upsert, name, small))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        for way in self._ways.values():
            if way.leases is not None:
                way.leases.close()

    def invited(self) -> list[Rival]:
        self.sparks = [SparkWriter(self, f"memory:{number}") for number in range(2)]
        return [*self.sparks, PythonWriter(self), PythonWriter(self)]

    @property
    def jobs(self) -> list[Job]:
        return [job for spark in self.sparks for job in spark.session.jobs]

    @property
    def counts(self) -> Counter[str]:
        ended = Counter(f"job {job.ended}" for job in self.jobs)
        return ended + Counter(
            retries=self.retries,
            refused=self.refused,
            skipped=self.skipped,
            unheard=self.unheard,
            reads=len(self.reads),
        )

    def check(self) -> None:
        self.depth = DEPTH_MAX  # nobody comes any more
        while self.late:
            self.deliver(0)
        for job in self.jobs:
            self._settle(job)
        self._check_transactions()
        super().check()
        for as_of, bag in self.reads:
            assert bag == (contents(self.plain, as_of) if as_of >= 0 else Counter())
        feed: Bag = Counter()
        for row in read("memory:0", NAME, readChangeFeed="true"):
            feed[row["k"], row["a"], row["b"]] += row[DIFF]
        assert {row: n for row, n in feed.items() if n} == contents(self.plain, self.upper - 1)

    def _settle(self, job: Job) -> None:
        """Tell the story of a job what became of it."""
        done = self.landed(job.write_id)
        if job.ended in (REFUSED, ABANDONED):
            assert job.write_id not in self.told, f"{job} landed all the same"
        if job.ended == DONE and job.txn is None:
            assert done is not None or not job.has_rows, f"{job} is lost"
        if done is not None:
            assert job.read_time is None or done.lower.element == job.read_time + 1
            self.story.tell(job.about, done)

    def _check_transactions(self) -> None:
        """Of each application the versions grow, and one is skipped only after it, or a later one, was committed."""
        order = {name: at for at, name in enumerate(self.told)}  # by the first answer
        for app in APPLICATIONS:
            jobs = [job for job in self.jobs if job.txn is not None and job.txn[0] == app]
            landed = sorted((job for job in jobs if job.write_id in order), key=lambda job: order[job.write_id])
            versions = [job.txn[1] for job in landed if job.txn]
            assert versions == sorted(set(versions)), f"{app} committed {versions}"
            skipped = [job.txn for job in jobs if job.txn and job.ended == DONE and job.write_id not in order]
            for _, version in [*skipped, *(skip for skip in self.skips if skip[0] == app)]:
                assert max(versions, default=-1) >= version, f"{app} {version} was skipped, and never committed"

    def _reach(self, connection: Connection) -> Transport:
        url = connection.url or ""
        if url not in self._ways:
            self._ways[url] = Interrupted(self.transport(), self, gives_up=True)
        return self._ways[url]


class SparkWriter:
    """A program that runs Spark jobs by `ShardTable`, and runs them again as users do."""

    def __init__(self, rivals: SparkRivals, url: str) -> None:
        self.busy = False
        self.session = Session(rivals.rng, lambda: rivals.between(BETWEEN_STEPS), rivals.refuse)
        self._rivals = rivals
        self._options = {"url": url, "numPartitions": str(rivals.rng.randrange(1, 4))}

    def act(self) -> None:
        rng = self._rivals.rng
        self._table = ShardTable(self.session, NAME, self._options)
        if rng.random() < 0.15:
            return self._look()
        make = rng.choice(VERBS)
        self.session.about = verb = make(rng)
        if make in GIVEN:
            return self._write(verb)
        return self._rewrite(verb)

    # --- what a verb calls: a `Shard` by its looks, whose calls are jobs

    def insert(self, table: pa.Table, **options: Any) -> None:
        self._call(self._table.append, table.to_pylist(), **options)

    def upsert(self, rows: list[Row], delete_column: str | None = None, **options: Any) -> None:
        given = {} if delete_column is None else {"delete_column": delete_column}
        self._call(self._table.upsert, rows, **given, **options)

    def overwrite(self, table: pa.Table, **options: Any) -> None:
        self._call(self._table.overwrite, table.to_pylist(), **options)

    def _call(self, write: Callable[..., Any], rows: list[Row], **options: Any) -> None:
        schema = pa.schema([*COLUMNS, *([("gone", pa.bool_())] if "delete_column" in options else [])])
        before = len(self.session.jobs)
        done = write(self.session.createDataFrame(rows, spark_schema(schema)), **options)
        if done.skipped:
            self._rivals.skipped += 1
            self._rivals.skips.append(options["txn"])
            return
        [job] = self.session.jobs[before:]
        landed = self._rivals.landed(job.write_id)
        time = None if landed is None or landed.lower == landed.upper else landed.lower.element
        assert done.time == time, f"{job} was told {done}"

    # --- what it does

    def _write(self, verb: Verb) -> None:
        """A write of rows that are there already, perhaps on a condition, and perhaps again."""
        rivals, options = self._rivals, self._condition()
        for _ in range(RERUNS_MAX):
            try:
                verb.run(self, options)  # type: ignore[arg-type]
            except UpperMismatch:
                return
            except (JobLost, Indeterminate):
                if "txn" not in options:
                    return
                continue
            if "txn" not in options or rivals.rng.random() < 0.7:
                return
        return

    def _condition(self) -> dict[str, Any]:
        rivals = self._rivals
        options: dict[str, Any] = {}
        if rivals.rng.random() < 0.35:
            options["read_time"] = self._table.read().as_of
        if rivals.rng.random() < 0.4:
            name = rivals.rng.choice(APPLICATIONS)
            known = [job.txn[1] for job in rivals.jobs if job.txn is not None and job.txn[0] == name]
            options["txn"] = (name, max(0, max(known, default=0) + rivals.rng.choice([-1, 0, 1, 1, 1, 2])))
        return options

    def _rewrite(self, verb: Verb) -> None:
        """What `ShardTable.merge` does: read, work out what changes, and write it if nobody has written since."""
        before, rivals = len(self.session.jobs), self._rivals
        retries = rivals.rng.choice([1, 10])
        with suppress(JobLost, Indeterminate):
            try:
                self._table.rewritten(lambda frame: frame.changed(lambda rows: _changes(verb, rows)), retries=retries)
            except UpperMismatch:
                assert len(self.session.jobs) - before == retries + 1
        tries = self.session.jobs[before:]
        assert all(job.ended == REFUSED for job in tries[:-1])
        rivals.retries += len(tries) - 1

    def _look(self) -> None:
        df, as_of = self._table.read()
        assert isinstance(df, Frame)
        self._rivals.between()
        rows = self.session.collected(df)
        self._rivals.reads.append((as_of, Counter((row["k"], row["a"], row["b"]) for row in rows)))


def _changes(verb: Verb, rows: list[Row]) -> list[Row]:
    """What a verb adds to the rows of a table, and takes away."""
    bag: Bag = Counter()
    for row in rows:
        bag[row["k"], row["a"], row["b"]] += row[DIFF]
    after = verb.model(Counter(bag))
    moved = {row: after[row] - bag[row] for row in (*bag, *after)}
    return [{"k": k, "a": a, "b": b, DIFF: n} for (k, a, b), n in moved.items() if n]
