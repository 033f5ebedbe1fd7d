"""As much of a Spark session as `ShardTable` needs, without a JVM: jobs run through the very classes that Spark calls.

A job is what Spark makes of it: a writer, pickled for each task; tasks that read partitions and give batches to it; and
a commit on the driver, or an abort. Tasks are tried twice now and then, and between any two steps others may act.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from persist.core.errors import UpperMismatch
from persist.spark.spark_schemas import arrow_schema
from tests.support.without_jvm import source

Task = Callable[[], Iterable[pa.RecordBatch]]
TASKS_MAX = 3
TRIED_TWICE = 0.15  # tasks of which one try counts, whether the other one failed or not
ABORTED = 0.07  # jobs
LOST = 0.07  # jobs that commit, and whose driver is never told
COMMITTED_TWICE = 0.1

REFUSED, ABANDONED, UNKNOWN, DONE = "refused", "abandoned", "unknown", "done"


class JobLost(Exception):
    """What the user of a job is told: an executor or the driver was lost."""


@dataclass
class Job:
    """One run of a write. `about` is what the session was told of it; `has_rows`: its tasks were given some."""

    about: Any
    write_id: str
    read_time: int | None
    txn: tuple[str, int] | None
    has_rows: bool = False
    ended: str = UNKNOWN


class Session:
    """`between` is called where others may act, `refused` with the time after which others are said to have written.

    `about` goes to the jobs that come.
    """

    def __init__(self, rng: random.Random, between: Callable[[], None], refused: Callable[[int], None]) -> None:
        self.rng = rng
        self.between = between
        self.refused = refused
        self.about: Any = None
        self.jobs: list[Job] = []

    @property
    def read(self) -> _Reading:
        return _Reading(self)

    def createDataFrame(self, rows: Sequence[dict[str, Any]], schema: StructType) -> Frame:
        return Frame(self, schema, lambda: self.spread(rows, schema))

    def spread(self, rows: Sequence[dict[str, Any]], schema: StructType) -> list[Task]:
        """The rows as the input of some tasks, of which some have none."""
        dealt: list[list[dict[str, Any]]] = [[] for _ in range(self.rng.randrange(1, TASKS_MAX + 1))]
        for row in rows:
            self.rng.choice(dealt).append(row)
        tables = [pa.Table.from_pylist(one, schema=arrow_schema(schema)) for one in dealt]
        return [partial(table.to_batches, max_chunksize=2) for table in tables]

    def collected(self, frame: Frame) -> list[dict[str, Any]]:
        return [row for task in frame.tasks() for batch in self._passing(task()) for row in batch.to_pylist()]

    def run(self, frame: Frame, overwrite: bool, options: dict[str, Any]) -> None:
        """A job that writes. Raises what Spark would tell of it."""
        job = _job_of(self.about, options)
        self.jobs.append(job)
        self._run(job, frame, overwrite, options)
        job.ended = DONE

    def _run(self, job: Job, frame: Frame, overwrite: bool, options: dict[str, Any]) -> None:
        self.between()
        with self._answered(job):
            sent = pickle.dumps(source(**options).writer(frame.schema, overwrite))
        messages: list[Any] = []
        try:
            self.between()
            for task in frame.tasks():
                messages.append(self._message(job, sent, task))
            self.between()
            if self.rng.random() < ABORTED:
                job.ended = ABANDONED
                raise JobLost("a task failed each time")
            for _ in range(1 + (self.rng.random() < COMMITTED_TWICE)):
                with self._answered(job):
                    pickle.loads(sent).commit(_copied(messages))
                self.between()
            if self.rng.random() < LOST:
                raise JobLost("the driver has not heard of the commit")
        except BaseException:
            pickle.loads(sent).abort([*_copied(messages), None])
            raise

    @contextmanager
    def _answered(self, job: Job) -> Iterator[None]:
        try:
            yield
        except UpperMismatch:
            assert job.read_time is not None, f"{job} is refused for no reason"
            self.refused(job.read_time)
            job.ended = REFUSED
            raise

    def _message(self, job: Job, sent: bytes, task: Task) -> Any:
        """What the driver hears of a task: of its first try, or of its second one."""
        first = self._try(job, sent, task, fails=False) if self.rng.random() >= TRIED_TWICE else None
        if first is not None:
            return first
        fails = self.rng.random() < 0.5
        tries = [self._try(job, sent, task, fails=fails), self._try(job, sent, task, fails=False)]
        return self.rng.choice([one for one in tries if one is not None])

    def _try(self, job: Job, sent: bytes, task: Task, *, fails: bool) -> Any:
        """What a try of a task tells; None: it failed in the middle."""
        self.between()
        with suppress(JobLost):
            return pickle.loads(pickle.dumps(pickle.loads(sent).write(self._given(job, task, fails))))
        return None

    def _given(self, job: Job, task: Task, fails: bool) -> Iterator[pa.RecordBatch]:
        for batch in self._passing(task()):
            job.has_rows = job.has_rows or batch.num_rows > 0
            yield batch
        if fails:
            raise JobLost("the executor was lost")

    def _passing(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self.between()
            yield batch


class Frame(DataFrame):
    """A DataFrame that knows its schema, and of which tasks it is made, each time anew."""

    def __new__(cls, *_: Any) -> Frame:
        return object.__new__(cls)

    def __init__(self, session: Session, schema: StructType, tasks: Callable[[], list[Task]]) -> None:
        self._session_of = session
        self._given = schema
        self.tasks = tasks

    @property
    def schema(self) -> StructType:
        return self._given

    @property
    def write(self) -> Any:
        return _Writing(self._session_of, self)

    def changed(self, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Frame:
        """What a function makes of all of its rows."""
        session = self._session_of
        return Frame(session, self._given, lambda: session.spread(change(session.collected(self)), self._given))


class _Chained:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._options: dict[str, Any] = {}

    def format(self, name: str) -> Any:
        assert name == "persist"
        return self

    def options(self, **given: Any) -> Any:
        self._options.update(given)
        return self


class _Reading(_Chained):
    def load(self, name: str) -> Frame:
        found = source(shard=name, **self._options)
        schema = found.schema()

        def tasks() -> list[Task]:
            reader = found.reader(schema)
            partitions = reader.partitions()
            sent = pickle.dumps(reader)
            return [partial(_read, sent, pickle.dumps(one)) for one in partitions]

        return Frame(self._session, schema, tasks)


class _Writing(_Chained):
    def __init__(self, session: Session, frame: Frame) -> None:
        super().__init__(session)
        self._frame = frame
        self._overwrites = False

    def mode(self, name: str) -> _Writing:
        assert name in ("append", "overwrite")
        self._overwrites = name == "overwrite"
        return self

    def save(self, name: str) -> None:
        self._session.run(self._frame, self._overwrites, {**self._options, "shard": name})


def _read(reader: bytes, partition: bytes) -> Iterable[pa.RecordBatch]:
    found: Iterable[pa.RecordBatch] = pickle.loads(reader).read(pickle.loads(partition))
    return found


def _copied(messages: list[Any]) -> list[Any]:
    copied: list[Any] = pickle.loads(pickle.dumps(messages))
    return copied


def _job_of(about: Any, options: dict[str, Any]) -> Job:
    read_time = options.get("readTime")
    if read_time is None and "expectedUpper" in options:
        read_time = int(options["expectedUpper"]) - 1
    txn = (options["txnAppId"], int(options["txnVersion"])) if "txnAppId" in options else None
    return Job(about, options["writeId"], None if read_time is None else int(read_time), txn)
